//! Debug check of lengths and page tables on the device: copies them to the host and explains what is wrong with them.
//!
//! Kernels clamp offsets, lengths, pages and slots that lie on the device, so that wrong ones give wrong numbers and nothing
//! else. Here they are checked as those of host tensors are, with the same errors.

use std::collections::HashMap;
use std::env;
use std::sync::OnceLock;

use flashcore_cuda::{CudaError, Stream, read_device};
use flashcore_problem::{
    AppendProblem, Invalid, KvCacheProblem, Operand, PositionType, Positions, Problem, TensorError,
    check_sequence_operands,
};
use zerocopy::IntoBytes;

use super::DeviceTensors;
use crate::{Error, Operation};

/// The environment variable that makes every launch check its lengths first.
const VARIABLE: &str = "FLASHCORE_CHECK_LENGTHS";

/// True if every launch checks its lengths first. The environment is read once.
pub(crate) fn is_on() -> bool {
    static IS_ON: OnceLock<bool> = OnceLock::new();
    *IS_ON.get_or_init(|| means_on(env::var(VARIABLE).ok().as_deref()))
}

fn means_on(value: Option<&str>) -> bool {
    value.is_some_and(|value| !matches!(value, "" | "0" | "off"))
}

/// Checks lengths, offsets, tables, slots and positions that a launch would read now, in stream order, and waits for the
/// copies. The tensors were checked.
///
/// # Safety
///
/// As for a launch of the operation on this stream, for these operands.
pub(crate) unsafe fn check(operation: &Operation, stream: &Stream, tensors: &DeviceTensors) -> Result<(), Error> {
    if stream.is_capturing()? {
        return Err(Error::CheckWhileCapturing);
    }
    // SAFETY: the contract of this function.
    let copy = |address, to: &mut [u8]| unsafe { read_device(stream, address, to) };
    match operation {
        Operation::Attention(problem) | Operation::Continue(problem) => check_copied(problem, tensors, copy),
        Operation::KvCache(problem) => check_copied_cache(problem, tensors, copy),
        Operation::Append(problem) => check_slots(problem, tensors, copy),
        Operation::Merge(_) => Ok(()),
    }
}

/// Checks the slots and positions of an append that `copy` brings to the host.
fn check_slots(
    problem: &AppendProblem,
    tensors: &DeviceTensors,
    mut copy: impl FnMut(u64, &mut [u8]) -> Result<(), CudaError>,
) -> Result<(), Error> {
    let tokens = tensors.tokens.unwrap_or(problem.tokens);
    let mut slots = vec![0_i64; tokens];
    copy(tensors.slot_mapping, slots.as_mut_bytes())?;
    let (mut narrow, mut wide) = (vec![0_i32; tokens], vec![0_i64; tokens]);
    let positions = match problem.rotary.map(|rotary| rotary.positions) {
        None => None,
        Some(PositionType::I32) => {
            copy(tensors.positions, narrow.as_mut_bytes())?;
            Some(Positions::I32(&narrow))
        }
        Some(PositionType::I64) => {
            copy(tensors.positions, wide.as_mut_bytes())?;
            Some(Positions::I64(&wide))
        }
    };
    judge_tokens(problem, &slots, positions).map_err(Error::from)
}

fn check_copied_cache(
    problem: &KvCacheProblem,
    tensors: &DeviceTensors,
    mut copy: impl FnMut(u64, &mut [u8]) -> Result<(), CudaError>,
) -> Result<(), Error> {
    let batch = problem.attention.batch;
    let of_attention = copied(&problem.attention, tensors, &mut copy)?;
    let mut extra = |is_given: bool, address: u64, count: usize| -> Result<_, CudaError> {
        let mut numbers = vec![0_u32; if is_given { count } else { 0 }];
        if is_given {
            copy(address, numbers.as_mut_bytes())?;
        }
        Ok(is_given.then_some(numbers))
    };
    let offsets = extra(problem.total_new.is_some(), tensors.cu_seqlens_k_new, batch + 1)?;
    let starts = extra(problem.rotary_seqlens, tensors.rotary_seqlens, batch)?;
    let bytes = |operand: Operand| of_attention[operand as usize].as_deref().map(IntoBytes::as_bytes);
    problem.check_sequence_operands(bytes, [offsets.as_deref(), starts.as_deref()]).map_err(Error::from)
}

/// Checks operands that `copy` brings to the host.
fn check_copied(
    problem: &Problem,
    tensors: &DeviceTensors,
    copy: impl FnMut(u64, &mut [u8]) -> Result<(), CudaError>,
) -> Result<(), Error> {
    let copied = copied(problem, tensors, copy)?;
    let bytes = |operand: Operand| copied[operand as usize].as_deref().map(IntoBytes::as_bytes);
    check_sequence_operands(problem, bytes).map_err(Error::from)
}

/// The operands that say where sequences lie, brought to the host by `copy`.
fn copied(
    problem: &Problem,
    tensors: &DeviceTensors,
    mut copy: impl FnMut(u64, &mut [u8]) -> Result<(), CudaError>,
) -> Result<[Option<Vec<u32>>; Operand::COUNT], CudaError> {
    let mut copied: [Option<Vec<u32>>; Operand::COUNT] = std::array::from_fn(|_| None);
    for (&operand, copied) in Operand::ALL.iter().zip(&mut copied) {
        if operand.is_of_sequences() && operand.is_present(problem) {
            let mut numbers = vec![0_u32; operand.elements(problem).unwrap_or(0)];
            copy(tensors.address(operand), numbers.as_mut_bytes())?;
            *copied = Some(numbers);
        }
    }
    Ok(copied)
}

/// Everything that is wrong with slots and positions: what an append of host tensors says, and that no two tokens may have
/// one slot.
fn judge_tokens(problem: &AppendProblem, slots: &[i64], positions: Option<Positions<'_>>) -> Result<(), Invalid> {
    let mut errors: Vec<_> = problem.token_errors(slots, positions).collect();
    let mut taken = HashMap::new();
    for (token, &slot) in slots.iter().enumerate().filter(|&(_, &slot)| problem.place(slot).is_some()) {
        if let Some(first) = taken.insert(slot, token) {
            errors.push(TensorError::SlotTwice { slot, tokens: (first, token) });
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{DType, PagedKv, Rotary, RotaryStyle};

    /// Two packed queries of up to 3 rows, 5 in all, over up to 10 keys in pages of 4; a cache of three rows of the table.
    fn problem() -> Problem {
        let mut problem = Problem::new(2, 2, 3, 8, DType::F16)
            .with_total_q(Some(5))
            .with_seqused_k(true)
            .with_leftpad_k(true)
            .with_kv_batch(Some(3))
            .with_paged(Some(PagedKv { page_size: 4, num_pages: 6, table_width: 3, table_stride: 4 }));
        problem.key_length = 10;
        problem
    }

    /// Device memory: vectors by address. What the sequences do not use is poison.
    struct Memory {
        cu_seqlens_q: [u32; 3],
        seqused_k: [u32; 2],
        leftpad_k: [u32; 2],
        kv_batch_idx: [u32; 2],
        page_table: [i32; 11],
    }

    const GOOD: Memory = Memory {
        cu_seqlens_q: [0, 2, 5],
        seqused_k: [9, 4],
        leftpad_k: [1, 4],
        kv_batch_idx: [2, 0],
        page_table: [5, i32::MIN, i32::MAX, 77, -1, -1, -1, -1, 3, 0, 3],
    };

    fn check(change: impl FnOnce(&mut Memory), expected: &[TensorError]) {
        let mut memory = GOOD;
        change(&mut memory);
        let tensors = DeviceTensors::new(16, 32, 48, 64)
            .with_cu_seqlens_q(1)
            .with_seqused_k(2)
            .with_leftpad_k(3)
            .with_kv_batch_idx(4)
            .with_page_table(5);
        let mut read = Vec::new();
        let found = check_copied(&problem(), &tensors, |address, to| {
            let from = match address {
                1 => memory.cu_seqlens_q.as_bytes(),
                2 => memory.seqused_k.as_bytes(),
                3 => memory.leftpad_k.as_bytes(),
                4 => memory.kv_batch_idx.as_bytes(),
                _ => memory.page_table.as_bytes(),
            };
            read.push(address);
            to.copy_from_slice(from);
            Ok(())
        });
        assert_eq!(read, [1, 2, 3, 4, 5], "nothing but the operands of sequences is read");
        let errors = match found {
            Ok(()) => Vec::new(),
            Err(Error::Invalid(Invalid::Tensors(errors))) => errors,
            Err(other) => panic!("{other}"),
        };
        assert_eq!(errors, expected);
    }

    #[test]
    fn operands_on_the_device_are_judged_like_those_of_the_host() {
        let (bound, rows) = ("the keys of the sequence", "the rows of all sequences");
        check(|_| {}, &[]);
        check(|memory| memory.cu_seqlens_q[0] = 1, &[TensorError::FirstOffset { tensor: "cu_seqlens_q", first: 1 }]);
        check(
            |memory| memory.cu_seqlens_q[2] = 1,
            &[TensorError::OffsetsFall { tensor: "cu_seqlens_q", sequence: 1, begin: 2, end: 1 }],
        );
        check(
            |memory| memory.cu_seqlens_q = [0, 3, 6],
            &[TensorError::BeyondBound { tensor: "cu_seqlens_q", sequence: 1, value: 6, most: 5, bound: rows }],
        );
        check(
            |memory| memory.seqused_k[1] = u32::MAX,
            &[TensorError::KeyLength { batch: 1, length: u32::MAX, key_length: 10 }],
        );
        check(
            |memory| memory.leftpad_k[1] = 5,
            &[TensorError::BeyondBound { tensor: "leftpad_k", sequence: 1, value: 5, most: 4, bound }],
        );
        let bound = "the last batch of the cache";
        check(
            |memory| memory.kv_batch_idx[0] = 3,
            &[TensorError::BeyondBound { tensor: "kv_batch_idx", sequence: 0, value: 3, most: 2, bound }],
        );
        check(
            |memory| memory.page_table[10] = 6,
            &[TensorError::Page { sequence: 0, entry: 2, page: 6, num_pages: 6 }],
        );
        check(
            |memory| memory.page_table[0] = -1,
            &[TensorError::Page { sequence: 1, entry: 0, page: -1, num_pages: 6 }],
        );
    }

    #[test]
    fn failed_copies_are_errors() {
        let capturing = CudaError::Capturing { call: "a copy to the host" };
        let tensors = DeviceTensors::new(16, 32, 48, 64);
        let found = check_copied(&problem(), &tensors, |_, _| Err(capturing.clone()));
        assert_eq!(found, Err(Error::Cuda(capturing)));
    }

    /// New keys without room, and positions past the rotary tables, are told as for tensors of the host.
    #[test]
    fn growing_caches_on_the_device_are_judged_like_those_of_the_host() {
        let attention = Problem::new(2, 1, 1, 8, DType::F16).with_seqused_k(true).with_key_length(10);
        let mut problem = KvCacheProblem::new(attention, 3).with_total_new(Some(5));
        problem = problem.with_rotary(Rotary::new(RotaryStyle::Neox, 8, 20)).with_rotary_seqlens(true);
        let mut tensors = DeviceTensors::new(16, 32, 48, 64).with_seqused_k(1);
        (tensors.cu_seqlens_k_new, tensors.rotary_seqlens) = (2, 3);
        let check = |lengths: [u32; 2], offsets: [u32; 3], starts: [u32; 2]| {
            let found = check_copied_cache(&problem, &tensors, |address, to| {
                to.copy_from_slice(match address {
                    1 => lengths.as_bytes(),
                    2 => offsets.as_bytes(),
                    _ => starts.as_bytes(),
                });
                Ok(())
            });
            found.map_err(|error| error.to_string())
        };
        let one = |error: TensorError| Err(Error::Invalid(vec![error].into()).to_string());
        assert_eq!(check([7, 8], [0, 3, 5], [17, 18]), Ok(()));
        let full = TensorError::CacheFull { sequence: 1, length: 9, new: 2, key_length: 10 };
        assert_eq!(check([7, 9], [0, 3, 5], [17, 18]), one(full));
        let past = TensorError::Position { of: "sequence", index: 0, position: 20, max_position: 20 };
        assert_eq!(check([7, 8], [0, 3, 5], [18, 18]), one(past));
        let falls = TensorError::OffsetsFall { tensor: "cu_seqlens_k_new", sequence: 1, begin: 3, end: 2 };
        assert_eq!(check([7, 8], [0, 3, 2], [0, 0]), one(falls));
    }

    #[test]
    fn slots_and_positions_are_judged() {
        let mut problem = AppendProblem::new(5, 1, 2, DType::F32, 2, 4);
        assert_eq!(judge_tokens(&problem, &[3, -1, 0, -1, 7], None), Ok(()));
        let expected = vec![
            TensorError::Slot { token: 0, slot: 8, slots: 8 },
            TensorError::Slot { token: 1, slot: -2, slots: 8 },
            TensorError::SlotTwice { slot: 5, tokens: (2, 4) },
        ];
        assert_eq!(judge_tokens(&problem, &[8, -2, 5, -1, 5], None), Err(expected.into()));
        problem = problem.with_rotary(Rotary::new(RotaryStyle::Neox, 2, 10));
        let at = |index, position| TensorError::Position { of: "token", index, position, max_position: 10 };
        let positions = Positions::I32(&[0, -1, 9, 10, 12]);
        let found = judge_tokens(&problem, &[3, -1, 0, -1, 7], Some(positions));
        assert_eq!(found, Err(vec![at(4, 12)].into()), "skipped tokens have no key");
        let found = judge_tokens(&problem.with_query(1), &[3, -1, 0, -1, 7], Some(positions));
        assert_eq!(found, Err(vec![at(1, -1), at(3, 10), at(4, 12)].into()));
    }

    #[test]
    fn the_switch_is_off_unless_set() {
        for (value, is_on) in
            [(None, false), (Some("0"), false), (Some("off"), false), (Some(""), false), (Some("1"), true)]
        {
            assert_eq!(means_on(value), is_on, "{value:?}");
        }
    }
}
