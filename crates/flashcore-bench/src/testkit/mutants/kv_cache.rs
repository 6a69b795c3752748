//! Bugs of the append to a growing KV cache, and their trial: ragged sequences over shuffled pages, packed new keys, padding,
//! batch indices and a rotary embedding.

use flashcore_ir::{Instruction, Kernel, Op, Operand, Type, VerifiedKernel};
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{
    Alignment, DType, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle, SequenceLengths,
};

use super::addressing::capped;
use super::catalogue::{Mutation, mutations};
use super::edit::{parameter, rewrite_if};
use super::{Group, Kill, Killer, MutantsError, OtherTrial};
use crate::testkit::kv_cache::KvCacheTrial;
use crate::testkit::verify::{NoVerdict, SIMULATED_ARCH};

/// Wrong rows, pages, batches, positions and lengths of what is appended.
pub const KV_CACHE: &[Mutation] = mutations! { Group::KvCache;
    "append": "append-after-the-rows-of-another", "sequences from the second on are taken to be as long as the second" =>
        |kernel| capped_wide(kernel, "cache_seqlens", 1);
    "append": "append-new-keys-of-another", "sequences from the third on have the new keys of the third" =>
        |kernel| capped_wide(kernel, "cu_seqlens_k_new", 2);
    "append": "append-to-another-batch", "sequences from the second on append to the batch of the second" =>
        |kernel| capped_wide(kernel, "kv_batch_idx", 1);
    "append": "append-by-another-table-row", "table rows from the second on are the second" =>
        |kernel| capped(kernel, "page_table_stride", 1);
    "append": "append-over-the-last-row", "new keys begin at the last row that is used" => over_the_last_row;
    "append": "append-positions-from-zero", "every sequence is rotated as if it began" => positions_from_zero;
    "append": "append-sines-of-cosines", "sines are read from the table of cosines" => sines_of_cosines;
};

/// Indices into an array become at most `most`.
fn capped_wide(kernel: &mut Kernel, array: &str, most: u64) -> usize {
    let Some(array) = parameter(kernel, array).map(Operand::Register) else { return 0 };
    let indexes = |op: &Op| matches!(op, Op::MadWide { ty: Type::U32, c, .. } if *c == array);
    rewrite_if(kernel, indexes, |kernel, mut instruction| {
        let Op::MadWide { a, .. } = &mut instruction.op else { return vec![instruction] };
        let changed = kernel.add_register(Type::U32, instruction.origin.section);
        let change = Op::Min { ty: Type::U32, d: changed, a: *a, b: Operand::Constant(most) };
        *a = Operand::Register(changed);
        vec![Instruction { op: change, ..instruction.clone() }, instruction]
    })
}

/// The rows that a sequence uses are one fewer, as far as there are any.
fn over_the_last_row(kernel: &mut Kernel) -> usize {
    let Some(bound) = parameter(kernel, "key_length").map(Operand::Register) else { return 0 };
    let clamps = |op: &Op| matches!(op, Op::Min { b, .. } if *b == bound);
    rewrite_if(kernel, clamps, |kernel, mut instruction| {
        let Op::Min { d, .. } = &mut instruction.op else { return vec![instruction] };
        let (used, clamped, ty) = (*d, kernel.add_register(Type::U32, instruction.origin.section), Type::U32);
        *d = clamped;
        let at_least_one = kernel.add_register(ty, instruction.origin.section);
        let most = Op::Max { ty, d: at_least_one, a: Operand::Register(clamped), b: Operand::Constant(1) };
        let fewer = Op::Sub { ty, d: used, a: Operand::Register(at_least_one), b: Operand::Constant(1) };
        let [most, fewer] = [most, fewer].map(|op| Instruction { op, ..instruction.clone() });
        vec![instruction, most, fewer]
    })
}

fn positions_from_zero(kernel: &mut Kernel) -> usize {
    let Some(last) = parameter(kernel, "last_position").map(Operand::Register) else { return 0 };
    let starts = |op: &Op| matches!(op, Op::Min { b, .. } if *b == last);
    rewrite_if(kernel, starts, |_, mut instruction| {
        if let Op::Min { b, .. } = &mut instruction.op {
            *b = Operand::Constant(0);
        }
        vec![instruction]
    })
}

fn sines_of_cosines(kernel: &mut Kernel) -> usize {
    let [cos, sin] = ["cos", "sin"].map(|name| parameter(kernel, name).map(Operand::Register));
    let (Some(cos), Some(sin)) = (cos, sin) else { return 0 };
    let reads = |op: &Op| matches!(op, Op::Mad { c, .. } | Op::MadWide { c, .. } if *c == sin);
    rewrite_if(kernel, reads, |_, mut instruction| {
        if let Op::Mad { c, .. } | Op::MadWide { c, .. } = &mut instruction.op {
            *c = cos;
        }
        vec![instruction]
    })
}

/// Among more than 16 sequences, one that the search for the sequence of a row never comes to.
pub const SEARCHES: &[Mutation] = mutations! { Group::Scans;
    "append": "append-search-of-16", "the search for the sequence of a packed row looks at the first sixteen alone" =>
        |kernel| first_step(kernel, 8);
    "append": "append-search-of-32", "the search for the sequence of a packed row looks at the first 32 alone" =>
        |kernel| first_step(kernel, 16);
};

/// The first step of the search becomes at most `most`.
fn first_step(kernel: &mut Kernel, most: u64) -> usize {
    let Some(step) = parameter(kernel, "first_step").map(Operand::Register) else { return 0 };
    rewrite_if(
        kernel,
        |op| matches!(op, Op::Mov { a, .. } if *a == step),
        |_, mut instruction| {
            if let Op::Mov { ty, d, a } = instruction.op {
                instruction.op = Op::Min { ty, d, a, b: Operand::Constant(most) };
            }
            vec![instruction]
        },
    )
}

/// Sequences of a trial.
const FEW: usize = 5;
/// More than the search finds in four steps, and in five.
const MANY: usize = 41;
const SEED: u64 = 0;

/// A growing cache that the kernel as it is passes.
#[derive(Debug)]
pub(super) struct AppendTrial {
    problem: KvCacheProblem,
    plan: LaunchPlan,
    trial: KvCacheTrial,
}

impl AppendTrial {
    /// All of them.
    pub(super) fn all() -> Result<Vec<Self>, MutantsError> {
        let plain = [RotaryStyle::Neox, RotaryStyle::GptJ].map(|style| Self::new(FEW, style, None));
        // Given scales of each row and head, and computed ones.
        let quantized = [false, true].map(|computes| Self::new(FEW, RotaryStyle::Neox, Some(computes)));
        let many = Self::new(MANY, RotaryStyle::Neox, None);
        plain.into_iter().chain(quantized).chain([many]).collect()
    }

    fn new(batch: usize, style: RotaryStyle, computes_scales: Option<bool>) -> Result<Self, MutantsError> {
        let mut attention = Problem::new(batch, 4, 3, 64, DType::F16).with_layout(Layout::Bshd);
        (attention.key_heads, attention.key_length, attention.seqused_k) = (2, 203, true);
        attention.mask = Mask::Causal(Alignment::BottomRight);
        let batches = batch + 2;
        (attention.leftpad_k, attention.kv_batch) = (true, Some(batches));
        attention.paged = Some(PagedKv::new(16, batches * 13 + 1, 13));
        let is_quantized = computes_scales.is_some();
        attention.kv_dtype = is_quantized.then_some(DType::E4m3);
        (attention.k_scale, attention.v_scale) = (is_quantized, is_quantized);
        let dim = if is_quantized { 64 } else { 32 };
        let problem = KvCacheProblem::new(attention, 9)
            .with_total_new(Some(6 * batch + 1))
            .with_rotary(Rotary::new(style, dim, 210))
            .with_compute_scales(computes_scales == Some(true));
        let plan = LaunchPlan::kv_cache(&problem, None, SIMULATED_ARCH).map_err(MutantsError::Refused)?;
        let baseline = |complaint: String| MutantsError::Baseline {
            kernel: "append".to_owned(),
            problem: problem.append_text(),
            complaint,
        };
        let trial =
            KvCacheTrial::of(&problem, SequenceLengths::Ragged, SEED).map_err(|error| baseline(error.to_string()))?;
        Ok(Self { problem, plan, trial })
    }

    fn is_quantized(&self) -> bool {
        self.problem.attention.kv_dtype.is_some()
    }

    fn baseline(&self, complaint: String) -> MutantsError {
        MutantsError::Baseline { kernel: "append".to_owned(), problem: self.name(), complaint }
    }

    /// The check that a kernel does not pass, and its complaint.
    fn killer(&self, kernel: &VerifiedKernel) -> Option<(Killer, String)> {
        if self.is_quantized() {
            // What is appended says all: no kernel attends an FP8 cache here.
            return match self.trial.verify_append(Some(kernel), SEED) {
                Ok(()) => None,
                Err(NoVerdict::Simulator(error)) => Some((Killer::Fault, error.to_string())),
                Err(other) => Some((Killer::Gate, other.to_string())),
            };
        }
        match self.trial.verify_kernel(Config::scalar(), kernel, SEED) {
            Ok(verdict) => verdict.failures.first().map(|failure| (Killer::Gate, failure.to_string())),
            Err(NoVerdict::Simulator(error)) => Some((Killer::Fault, error.to_string())),
            Err(other) => Some((Killer::Gate, other.to_string())),
        }
    }
}

impl OtherTrial for AppendTrial {
    fn group(&self) -> Group {
        match self.is_quantized() {
            true => Group::Quantize,
            false if self.problem.attention.batch > FEW => Group::Scans,
            false => Group::KvCache,
        }
    }

    fn name(&self) -> String {
        format!("append {}", self.problem.append_text())
    }

    fn kernel(&self) -> Result<VerifiedKernel, MutantsError> {
        Ok(VerifiedKernel::clone(&self.plan.launches[0].kernel()))
    }

    fn pass(&self) -> Result<(), MutantsError> {
        let kernel = self.kernel()?;
        match self.killer(&kernel) {
            None => Ok(()),
            Some((_, complaint)) => Err(self.baseline(complaint)),
        }
    }

    fn try_to_kill(&self, kernel: Kernel) -> Option<Kill> {
        let (by, report) = match kernel.verify(SIMULATED_ARCH) {
            Err(errors) => (Killer::Verifier, errors[0].to_string()),
            Ok(kernel) => self.killer(&kernel)?,
        };
        Some(Kill { by, report: super::one_line(&report), problem: self.name() })
    }
}
