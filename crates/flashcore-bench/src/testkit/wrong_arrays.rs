//! Device arrays that the host refuses: offsets that fall or pass the total, lengths past their bounds, padding longer than
//! its sequence, batches of the cache and pages that do not exist.
//!
//! Kernels do not wait for the host to look at such arrays. They give wrong numbers, but no access outside of the tensors:
//! the simulator has unmapped memory around each. A sequence writes its own rows alone, those between its offsets as far as
//! there are such rows, and one whose entries are right has right results. The rest is as it was.
//!
//! Two sequences whose offsets are wrong may both have a row. Then both write it, in any order.

use std::ops::Range;

use flashcore_ir::Space;
use flashcore_kernels::LaunchPlan;
use flashcore_problem::{Evidence, Inputs, Operand, Outputs, Problem, Shape, SplitMix64, Strides, Tensor, Verdict};
use flashcore_sim::{FaultKind, SimError};

use crate::testkit::simulate::simulate;
use crate::testkit::verify::{NoVerdict, Yardstick};

/// Contents of the device arrays of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arrays {
    /// Entries that the host allows.
    #[default]
    Right,
    /// New keys that the cache has no room for, and padding that reaches into new keys: a device leaves such keys out.
    Crowded,
    /// Entries that the host refuses, by number: of the arrays that the problem has, each alone in turn and then all.
    Wrong(u64),
}

/// An array that can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Array {
    Of(Operand),
    /// `cu_seqlens_k_new`.
    NewKeys,
}

const OPERANDS: [Operand; 7] = [
    Operand::CuSeqlensQ,
    Operand::CuSeqlensK,
    Operand::SequsedQ,
    Operand::SequsedK,
    Operand::LeftpadK,
    Operand::KvBatchIdx,
    Operand::PageTable,
];

/// The stream of wrong numbers.
const STREAM: u64 = 0xbad;
/// Draws after which the host must have refused one.
const MOST_DRAWS: u64 = 64;

/// The arrays of a problem that can be wrong.
pub(super) fn count(problem: &Problem) -> usize {
    OPERANDS.into_iter().filter(|operand| operand.is_present(problem)).count()
}

/// Makes arrays wrong by number, until `is_refused` says that the host refuses them.
pub(super) fn spoil<T: Clone>(
    (problem, total_new): (&Problem, Option<usize>),
    (right, number): (&T, u64),
    parts: fn(&mut T) -> (&mut Inputs, Option<&mut Vec<u32>>),
    is_refused: impl Fn(&T) -> bool,
) -> T {
    for draw in 0..MOST_DRAWS {
        let mut random = SplitMix64::stream(number, STREAM + (draw << 32));
        let mut wrong = right.clone();
        let (inputs, mut new_keys) = parts(&mut wrong);
        let mut present: Vec<Array> =
            OPERANDS.into_iter().filter(|operand| operand.is_present(problem)).map(Array::Of).collect();
        present.extend(new_keys.is_some().then_some(Array::NewKeys));
        let chosen = number as usize % (present.len() + 1);
        for (_, &array) in present.iter().enumerate().filter(|&(index, _)| chosen == index || chosen == present.len()) {
            match (array, &mut new_keys) {
                (Array::Of(operand), _) => spoil_operand(problem, inputs, operand, &mut random),
                (Array::NewKeys, Some(offsets)) => spoil_offsets(offsets, total_new.unwrap_or(0), &mut random),
                (Array::NewKeys, None) => {}
            }
        }
        if is_refused(&wrong) {
            return wrong;
        }
    }
    panic!("{problem}: {MOST_DRAWS} draws of wrong arrays, and the host refuses none")
}

/// A number above `most`: by a little, or as far as a signed or an unsigned number goes.
fn above(most: usize, random: &mut SplitMix64) -> u32 {
    let most = most as u32;
    match random.below(7) {
        0 => i32::MAX as u32,
        1 => i32::MIN as u32,
        2 => u32::MAX,
        3 => most + 16 + random.below(300) as u32,
        number => most + number as u32 - 3,
    }
}

/// Changes one entry, and one in four of the others.
fn each_victim(count: usize, random: &mut SplitMix64, mut spoil: impl FnMut(usize, &mut SplitMix64)) {
    let first = random.below(count.max(1));
    for index in 0..count {
        if index == first || random.below(4) == 0 {
            spoil(index, random);
        }
    }
}

/// The last offset falls, or those from one on are those of longer tensors, or single ones fall or pass the total.
fn spoil_offsets(offsets: &mut [u32], total: usize, random: &mut SplitMix64) {
    let last = offsets.len() - 1;
    match random.below(4) {
        0 => {
            offsets[last] = random.below(offsets[last - 1] as usize + 1) as u32;
            return;
        }
        1 => {
            let (first, begin, step) = (random.below(last), total + random.below(9), 1 + random.below(9));
            for (offset, number) in offsets[first..].iter_mut().zip(0..) {
                *offset = (begin + number * step) as u32;
            }
            return;
        }
        _ => {}
    }
    each_victim(offsets.len(), random, |index, random| {
        let before = offsets[index.saturating_sub(1)] as usize;
        offsets[index] = match random.below(2) {
            0 => random.below(before.min(total) + 1) as u32,
            _ => above(total, random),
        };
    });
}

fn spoil_operand(problem: &Problem, inputs: &mut Inputs, operand: Operand, random: &mut SplitMix64) {
    let keys = |inputs: &Inputs, sequence: usize| match (&inputs.seqused_k, &inputs.cu_seqlens_k) {
        (Some(used), _) => (used[sequence] as usize).min(problem.key_length),
        (None, Some(offsets)) => offsets[sequence + 1].saturating_sub(offsets[sequence]) as usize,
        (None, None) => problem.key_length,
    };
    let mut lengths = |lengths: &mut Option<Vec<u32>>, most: &dyn Fn(usize) -> usize| {
        let Some(lengths) = lengths else { return };
        each_victim(lengths.len(), random, |sequence, random| lengths[sequence] = above(most(sequence), random));
    };
    match operand {
        Operand::CuSeqlensQ => {
            spoil_offsets(inputs.cu_seqlens_q.as_mut().expect("it has these"), problem.total_q.unwrap_or(0), random);
        }
        Operand::CuSeqlensK => {
            spoil_offsets(inputs.cu_seqlens_k.as_mut().expect("it has these"), problem.total_k.unwrap_or(0), random);
        }
        Operand::SequsedQ => lengths(&mut inputs.seqused_q, &|_| problem.query_length),
        Operand::SequsedK => lengths(&mut inputs.seqused_k, &|_| problem.key_length),
        Operand::LeftpadK => {
            let most: Vec<usize> = (0..problem.batch).map(|sequence| keys(inputs, sequence)).collect();
            lengths(&mut inputs.leftpad_k, &|sequence| most[sequence]);
        }
        Operand::KvBatchIdx => lengths(&mut inputs.kv_batch_idx, &|_| problem.cache_batches() - 1),
        Operand::PageTable => {
            let used: Vec<_> =
                (0..problem.batch).filter_map(|sequence| used_entries(problem, inputs, sequence)).collect();
            let (Some(paged), Some(table)) = (problem.paged, &mut inputs.page_table) else { return };
            each_victim(used.len(), random, |sequence, random| {
                let entry = used[sequence].start + random.below(used[sequence].len().max(1));
                table[entry] = match random.below(4) {
                    0 => -1,
                    1 => i32::MIN,
                    _ => above(paged.num_pages - 1, random).cast_signed(),
                };
            });
        }
        _ => {}
    }
}

/// The entries of the page table that a sequence uses, of arrays whose other entries may be wrong.
fn used_entries(problem: &Problem, inputs: &Inputs, sequence: usize) -> Option<Range<usize>> {
    let paged = problem.paged?;
    let row = inputs.kv_batch_idx.as_ref().map_or(sequence, |batches| batches[sequence] as usize);
    let row = row.min(problem.cache_batches() - 1) * paged.table_stride;
    let keys = inputs.seqused_k.as_ref().map_or(problem.key_length, |used| used[sequence] as usize);
    Some(row..row + keys.min(problem.key_length).div_ceil(paged.page_size))
}

/// True for each sequence that has an entry which is not that of the right arrays.
pub(super) fn wrong_sequences(problem: &Problem, right: &Inputs, wrong: &Inputs) -> Vec<bool> {
    let is_wrong = |sequence: usize| {
        let offsets =
            |offsets: &Option<Vec<u32>>| offsets.as_ref().map(|offsets| offsets[sequence..sequence + 2].to_vec());
        let length = |lengths: &Option<Vec<u32>>| lengths.as_ref().map(|lengths| lengths[sequence]);
        // The whole row of the table: new keys go to entries that no key before has.
        let row = right.kv_batch_idx.as_ref().map_or(sequence, |batches| batches[sequence] as usize);
        let pages = |inputs: &Inputs| {
            let (paged, table) = problem.paged.zip(inputs.page_table.as_ref())?;
            Some(table[row * paged.table_stride..][..paged.table_width].to_vec())
        };
        offsets(&right.cu_seqlens_q) != offsets(&wrong.cu_seqlens_q)
            || offsets(&right.cu_seqlens_k) != offsets(&wrong.cu_seqlens_k)
            || length(&right.seqused_q) != length(&wrong.seqused_q)
            || length(&right.seqused_k) != length(&wrong.seqused_k)
            || length(&right.leftpad_k) != length(&wrong.leftpad_k)
            || length(&right.kv_batch_idx) != length(&wrong.kv_batch_idx)
            || pages(right) != pages(wrong)
    };
    (0..problem.batch).map(is_wrong).collect()
}

/// Rows between two offsets, as far as there are such rows.
pub(super) fn rows_between(offsets: &[u32], sequence: usize, total: usize) -> Range<usize> {
    let [begin, end] = [offsets[sequence], offsets[sequence + 1]].map(|offset| (offset as usize).min(total));
    begin..end.max(begin)
}

/// Contents that a row of query and output may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowFate {
    /// The poison from before: no sequence has it.
    Untouched,
    /// The results of a sequence whose entries are right.
    Right,
    /// Anything: a sequence with a wrong entry has it.
    Anything,
}

/// The fate of each query row, `[batch, row]`, and true if two sequences have one.
pub(super) fn fates(problem: &Problem, arrays: &Inputs, is_wrong: &[bool]) -> (Vec<RowFate>, bool) {
    let shape = problem.output_shape();
    let (mut fates, mut is_contested) = (vec![RowFate::Untouched; shape.batch * shape.rows], false);
    for sequence in 0..problem.batch {
        let rows = match (&arrays.cu_seqlens_q, problem.total_q) {
            (Some(offsets), Some(total)) => rows_between(offsets, sequence, total),
            _ => sequence * problem.query_length..(sequence + 1) * problem.query_length,
        };
        let used = arrays.seqused_q.as_ref().map_or(usize::MAX, |used| used[sequence] as usize);
        for fate in &mut fates[rows.clone()][..rows.len().min(problem.query_length).min(used)] {
            is_contested |= *fate != RowFate::Untouched;
            *fate = if is_wrong[sequence] || *fate != RowFate::Untouched { RowFate::Anything } else { RowFate::Right };
        }
    }
    (fates, is_contested)
}

/// True if CTAs of a launch wrote to the same place, which sequences do that have a row in common.
pub(super) fn is_race(error: &NoVerdict) -> bool {
    let NoVerdict::Simulator(SimError::Fault(fault)) = error else { return false };
    matches!(fault.kind, FaultKind::Race { space: Space::Global, .. })
}

/// Takes rows of a tensor that may hold anything, and those that nothing wrote, from a run on right arrays. An error if a row
/// of no sequence was written.
pub(super) fn take_rows(
    fates: &[RowFate],
    (shape, strides): (Shape, Strides),
    [found, right, poisoned]: [&Tensor; 3],
) -> Result<Tensor, NoVerdict> {
    let mut taken = found.clone();
    for (batch, head, row) in shape.each_row() {
        let size = found.dtype.size_bytes();
        let start = strides.row_start(batch, head, row) * size;
        let bytes = start..start + shape.columns * size;
        match fates[batch * shape.rows + row] {
            RowFate::Right => continue,
            RowFate::Untouched if found.data[bytes.clone()] != poisoned.data[bytes.clone()] => {
                return Err(NoVerdict::Written(format!("row {row} of batch {batch}, head {head}, of no sequence")));
            }
            RowFate::Untouched | RowFate::Anything => {}
        }
        taken.data[bytes.clone()].copy_from_slice(&right.data[bytes]);
    }
    Ok(taken)
}

/// [`take_rows`] of output and LSE.
pub(super) fn take_outputs(
    problem: &Problem,
    fates: &[RowFate],
    [found, right]: [&Outputs; 2],
) -> Result<Outputs, NoVerdict> {
    let (shape, poisoned) = (problem.output_shape(), Outputs::poisoned(problem));
    let output = [found, right, &poisoned].map(|outputs| &outputs.output);
    let numbers = |outputs: &Outputs| -> Tensor {
        let data = outputs.lse.iter().flatten().flat_map(|sum| sum.to_le_bytes()).collect();
        Tensor { dtype: flashcore_problem::DType::F32, data }
    };
    let sums = Shape { columns: 1, ..shape };
    let lse = found.lse.as_ref().map(|_| {
        let tensors = [found, right, &poisoned].map(numbers);
        take_rows(fates, (sums, Strides::bhsd(sums)), tensors.each_ref())
    });
    let lse = lse.transpose()?.map(|sums| {
        sums.data.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
    });
    Ok(Outputs { output: take_rows(fates, (shape, problem.strides().output), output)?, lse, ..Outputs::default() })
}

/// Attention on arrays that the host refuses, with all that its results are judged by.
#[derive(Debug)]
pub(super) struct WrongAttention<'a> {
    problem: &'a Problem,
    yardstick: &'a Yardstick,
    arrays: Inputs,
    fates: Vec<RowFate>,
    is_contested: bool,
}

impl<'a> WrongAttention<'a> {
    /// The arrays of a number in place of those of the yardstick.
    pub(super) fn new(problem: &'a Problem, yardstick: &'a Yardstick, number: u64) -> Self {
        let right = yardstick.inputs();
        let is_refused = |arrays: &Inputs| arrays.validate(problem).is_err();
        let arrays = spoil((problem, None), (right, number), |arrays| (arrays, None), is_refused);
        let (fates, is_contested) = fates(problem, &arrays, &wrong_sequences(problem, right, &arrays));
        Self { problem, yardstick, arrays, fates, is_contested }
    }

    /// The arrays that are wrong, with the rest of the inputs.
    pub(super) const fn arrays(&self) -> &Inputs {
        &self.arrays
    }

    /// Simulates a plan on right arrays and on these, and judges the latter.
    pub(super) fn verify(&self, plan: &LaunchPlan, seed: u64, repeats: u64) -> Result<Verdict, NoVerdict> {
        let Self { problem, yardstick, arrays, fates, is_contested } = self;
        let right = simulate(plan, problem, yardstick.inputs(), seed)?.outputs;
        let mut runs = Vec::new();
        for repeat in 0..=repeats {
            let run = simulate(plan, problem, arrays, seed + repeat).map_err(NoVerdict::Simulator);
            match run {
                Ok(run) => runs.push((take_outputs(problem, fates, [&run.outputs, &right])?, run.inputs_after)),
                Err(error) if *is_contested && is_race(&error) => runs.push((right.clone(), arrays.clone())),
                Err(error) => return Err(error),
            }
        }
        let repeats: Vec<_> = runs[1..].iter().map(|(outputs, _)| outputs.clone()).collect();
        let (outputs, inputs_after) = &runs[0];
        let evidence = Evidence { inputs: arrays, inputs_after, outputs, repeats: &repeats, guards: &[] };
        Ok(yardstick.judge_kernel(problem, plan.config, &evidence)?)
    }
}

/// The verdict on a call that the host refused with nothing written.
pub(super) const fn refused() -> Verdict {
    Verdict {
        failures: Vec::new(),
        max_error: 0.0,
        reference_max_error: 0.0,
        relative_l2: 0.0,
        relative_bias: 0.0,
        worst: None,
    }
}
