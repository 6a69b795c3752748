//! Merge in place: a second partial result is merged into the first, whose output and LSE are replaced (`continue`).
//!
//! Rows that the second part has not written are left alone, whatever the first holds there: their LSE has the bits
//! [`UNWRITTEN`], which no kernel writes (a NaN that arithmetic makes is `0x7fff_ffff`). Every lane of a row reads both parts
//! before any lane stores.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Kernel, SpecialRegister};
use flashcore_problem::{MergeProblem, Operand, Problem, ProblemError, StateMerge};

use super::{LaneColumns, MergeSpec, Parameters, RowParts, THREADS, Words, launch, merge_few, store};
use crate::bindings::{Place, Word};
use crate::cache::PART_ALIGNMENT;
use crate::launch_plan::{Fill, LaunchPlan};
use crate::target::Target;
use crate::unsupported::Reason;

/// Bits of an LSE in a row that was not written.
pub const UNWRITTEN: u32 = u32::MAX;

impl LaunchPlan {
    /// Attention into the workspace and a merge of that into output and LSE, or every reason against it. The plan of the
    /// attention is absent if there is nothing to attend.
    pub fn continued(
        problem: &Problem,
        attention: Option<Self>,
        target: impl Into<Target>,
    ) -> Result<Self, Vec<Reason>> {
        let state =
            StateMerge::of(problem).map_err(|errors| errors.into_iter().map(Reason::from).collect::<Vec<_>>())?;
        let (spec, target) = (MergeSpec::in_place(&state.merge), target.into());
        let element = problem.dtypes().output.size_bytes();
        let (group_bytes, multiple) = (state.output_stride * element, spec.alignments()[0].1 as usize);
        if state.groups > 1 && !group_bytes.is_multiple_of(multiple) {
            return Err(vec![Reason::Problem(ProblemError::OutOfRange {
                argument: "the batch stride of output",
                value: state.output_stride.to_string(),
                allowed: format!("a multiple of {} to continue", multiple / element),
            })]);
        }
        let Some(attention) = attention else { return Self::of_operation(Vec::new(), Vec::new(), target) };
        let output_bytes = problem.strides().output.extent(problem.output_shape()).unwrap_or(0) * element;
        let output = attention.workspace_bytes.next_multiple_of(PART_ALIGNMENT);
        let lse = (output + output_bytes as u64).next_multiple_of(PART_ALIGNMENT);
        let shape = problem.output_shape();
        let lse_bytes = (shape.batch * shape.heads * shape.rows * size_of::<f32>()) as u64;
        let [output, part_lse] = [output, lse].map(Place::in_workspace);
        let merges = (0..state.groups as u64).map(|group| {
            let first = [
                Place::from(Operand::Output).plus(group * group_bytes as u64),
                Place::from(Operand::Lse).plus(group * state.lse_stride as u64 * size_of::<f32>() as u64),
            ];
            let second = [output, part_lse].map(Place::from);
            launch(&state.merge, spec, words(first, ([Operand::Output, Operand::Lse].map(Place::from), second)), target)
        });
        let merges = Self::of_operation(merges.collect(), attention.alignments.clone(), target)?;
        let mut plan = attention.moved(Operand::Output, output).moved(Operand::Lse, part_lse);
        plan.launches.extend(merges.launches);
        plan.alignments = merges.alignments;
        plan.workspace_bytes = lse + lse_bytes;
        // Rows that no sequence has stay as they are.
        if problem.total_q.is_some() || problem.seqused_q {
            plan.fill = Some(Fill { place: part_lse, bytes: lse_bytes, value: UNWRITTEN as u8 });
        }
        Ok(plan)
    }

    /// The merge of the second of two parts into the first, or every reason against it: the first are output and LSE, the
    /// second [`Operand::PartOutputs`] and [`Operand::PartLses`], all with the type and the strides of the output.
    pub fn merge_in_place(problem: &MergeProblem, target: impl Into<Target>) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let (spec, target) = (MergeSpec::in_place(problem), target.into());
        let first = [Operand::Output, Operand::Lse].map(Place::from);
        let second = [Operand::PartOutputs, Operand::PartLses].map(Place::from);
        let launch = launch(problem, spec, words(first, (first, second)), target);
        Self::of_operation(vec![launch], spec.alignments().into(), target)
    }
}

/// The words of a merge into the first of two parts, which are as far apart as two other places.
fn words([output, lse]: [Place; 2], (from, to): ([Place; 2], [Place; 2])) -> Words {
    Words {
        part: Word::address(output),
        part_lse: Word::address(lse),
        part_stride: Word::Distance { from: from[0], to: to[0] },
        part_lse_stride: Word::Distance { from: from[1], to: to[1] },
        output: Word::address(output),
        lse: Word::address(lse),
        tokens: Word::Tokens,
    }
}

/// Writes the kernel.
pub(super) fn kernel(spec: MergeSpec) -> Kernel {
    let mut builder = Builder::new(spec.name(), THREADS);
    let k = &mut builder;
    let p = Parameters::load(k);
    let thread = k.special(SpecialRegister::ThreadX);
    let lane_in_row = k.and(thread, spec.lanes() - 1);
    let row_in_cta = k.shr(thread, spec.lanes().ilog2());
    let cta = k.special(SpecialRegister::CtaX);
    let row = k.mad(cta, spec.rows_per_cta(), row_in_cta);
    let tokens = k.truncate(p.tokens);
    let rows = k.mul(tokens, p.heads);
    let exists = k.compare(Compare::Lt, row, rows);
    let token = k.div(row, p.heads);
    let first = k.mul(token, p.heads);
    let head = k.sub(row, first);
    let (token, head) = (k.widen(token), k.widen(head));
    let address = |k: &mut Builder, base, token_stride, head_stride| {
        let address = k.mad(token, token_stride, base);
        k.mad(head, head_stride, address)
    };
    let row_parts = RowParts {
        p: &p,
        part: address(k, p.part, p.part_token_stride, p.part_head_stride),
        lse: address(k, p.part_lse, p.part_lse_token_stride, p.part_lse_head_stride),
    };
    let columns = LaneColumns::new(k, spec, lane_in_row);
    let bits = k.copy(UNWRITTEN);
    k.if_then(exists, |k| {
        let second = k.add(row_parts.lse, p.part_lse_stride);
        let loaded = k.load_one::<U32>(second);
        k.set(bits, loaded);
    });
    let is_written = k.compare(Compare::Ne, bits, UNWRITTEN);
    let (shift, sum) = (k.copy(0.0f32), k.copy(0.0f32));
    k.if_then(is_written, |k| {
        let merged = merge_few(k, &row_parts, &columns, 2);
        k.set(shift, merged.0);
        k.set(sum, merged.1);
    });
    // The lanes of a row, all in one warp, read what others of them store.
    k.warp_sync();
    k.if_then(is_written, |k| {
        k.section("epilogue", |k| {
            store(k, spec, &columns, row_parts.part, sum);
            let logarithm = k.log2(sum);
            let lse = k.fma(logarithm, p.from_log2, shift);
            let is_first = k.compare(Compare::Eq, lane_in_row, 0u32);
            k.when(is_first, |k| k.store_one(row_parts.lse, lse));
        });
    });
    builder.finish()
}
