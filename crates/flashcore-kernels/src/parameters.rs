//! Kernel parameters, in one order for the kernel and for whoever launches it.
//!
//! Two blocks of 64-bit parameters change from launch to launch and are replaced as such: first the addresses of the
//! tensors and outputs, last those of the other operands, the workspace, the block mask and the strides of the bias. What
//! follows from the problem and the plan lies between them, so that a kernel without optional operands reads adjacent
//! lines of constant memory: with all addresses first, the smallest problems took 2 to 4 % longer on an H200.

use core::f32::consts::LOG2_E;

use flashcore_ir::types::{F32, S32, U32, U64};
use flashcore_ir::{Argument, Builder, Reg};
use flashcore_problem::expression::{Constants, Expression, Kind};
use flashcore_problem::{Operand, Problem, Strides};

use crate::attention::block_mask::BlockMaskShape;
use crate::bindings::{Place, Word};
use crate::cache::FusedParameters;
use crate::primitives::BoundExpression;
use crate::specialization::Specialization;
use crate::unsupported::LONGEST;

/// Declares the parameters once: the registers a kernel reads them from, and the values a launch passes.
macro_rules! parameters {
    (
        first { $($first:ident,)* }
        plan { $($(#[$doc:meta])* $name:ident: $ty:ident,)* }
        last { $($last:ident,)* }
        launch { $($(#[$launch_doc:meta])* $launch:ident,)* }
    ) => {
        /// The parameters of every attention kernel, loaded into registers. Of operands, the addresses; those of
        /// operands that a problem has not are not read.
        #[derive(Debug, Clone, Copy)]
        #[expect(missing_docs, reason = "operands have the names of their rows in the table")]
        pub struct Parameters {
            $(pub $first: Reg<U64>,)*
            $($(#[$doc])* pub $name: Reg<$ty>,)*
            $(pub $last: Reg<U64>,)*
            $($(#[$launch_doc])* pub $launch: Reg<U64>,)*
            /// The expression for scores, with its constants.
            pub score_mod: Option<BoundExpression>,
            /// The expression for masks, with its constants.
            pub mask_mod: Option<BoundExpression>,
            /// The scales of query, key and value, those that the problem has.
            pub scales: [Option<ScaleParameters>; Operand::SCALES.len()],
            /// The parameters of an append inside of the launch.
            pub(crate) append: Option<FusedParameters>,
        }

        impl Parameters {
            /// Declares and loads them: those that all kernels have, and the constants of expressions.
            pub fn load(k: &mut Builder, specialization: Specialization) -> Self {
                Self {
                    $($first: k.parameter::<U64>(stringify!($first)),)*
                    $($name: k.parameter::<$ty>(stringify!($name)),)*
                    $($last: k.parameter::<U64>(stringify!($last)),)*
                    $($launch: k.parameter::<U64>(stringify!($launch)),)*
                    score_mod: specialization.score_mod.map(|expression| BoundExpression::load(k, "score", expression)),
                    mask_mod: specialization.mask_mod.map(|expression| BoundExpression::load(k, "mask", expression)),
                    scales: Operand::SCALES.map(|scale| specialization.has(scale).then(|| ScaleParameters::load(k, scale))),
                    append: specialization.append.map(|_| FusedParameters::load(k)),
                }
            }
        }

        /// The operands whose addresses are parameters of every kernel, in their order.
        #[cfg(test)]
        const OPERANDS: &[&str] = &[$(stringify!($first),)* $(stringify!($last),)*];
        /// The number of parameters that change from launch to launch.
        const LAUNCH_PARAMETERS: usize = FIRST + [$(stringify!($last),)* $(stringify!($launch),)*].len();
        /// The number of those in the first block.
        const FIRST: usize = [$(stringify!($first),)*].len();
        /// Parameters that follow from problem and plan, between the two blocks.
        const BETWEEN: usize = [$(stringify!($name),)*].len();

        /// The values of the parameters that follow from problem and plan, by the same names.
        struct PlanValues {
            $($name: <$ty as HostValue>::Host,)*
        }

        impl PlanValues {
            fn arguments(self) -> Vec<Argument> {
                let plan = [$(<$ty as HostValue>::argument(self.$name),)*];
                let launch = |count| std::iter::repeat_n(Argument::U64(0), count);
                launch(FIRST).chain(plan).chain(launch(LAUNCH_PARAMETERS - FIRST)).collect()
            }
        }
    };
}

parameters! {
    first { query, key, value, output, lse, }
    plan {
        /// Bytes from one batch of the query to the next.
        query_batch_stride: U64,
        /// Bytes from one head of the query to the next.
        query_head_stride: U64,
        /// Bytes from one row of the query to the next.
        query_row_stride: U64,
        /// Bytes from one batch of the key to the next.
        key_batch_stride: U64,
        /// Bytes from one head of the key to the next.
        key_head_stride: U64,
        /// Bytes from one row of the key to the next.
        key_row_stride: U64,
        /// Bytes from one batch of the value to the next.
        value_batch_stride: U64,
        /// Bytes from one head of the value to the next.
        value_head_stride: U64,
        /// Bytes from one row of the value to the next.
        value_row_stride: U64,
        /// Bytes from one batch of the output to the next.
        output_batch_stride: U64,
        /// Bytes from one head of the output to the next.
        output_head_stride: U64,
        /// Bytes from one row of the output to the next.
        output_row_stride: U64,
        /// Rows of the query.
        query_length: U32,
        /// Rows of key and value, up to the last that any query row attends.
        key_length: U32,
        /// Query heads that share one key head.
        heads_per_key_head: U32,
        /// Offset from a query row to its position among the keys; where each batch has a key length of its own,
        /// less [`position_per_key`](Self::position_per_key) times that length.
        position_offset: S32,
        /// Distance by which one more key of a batch moves the positions of its rows: 1 when they are aligned at the end, 0 at the
        /// beginning. Read only where each batch has a key length of its own.
        position_per_key: S32,
        /// Keys before its position that a row attends.
        window_left: S32,
        /// Keys after its position that a row attends: 0 under a causal mask.
        window_right: S32,
        /// The scale of the scores times `log2(e)`; with a softcap, `2 * log2(e) * scale / softcap`.
        scale_log2: F32,
        /// Rounding error of [`scale_log2`](Self::scale_log2); read by kernels of `f32`.
        scale_log2_rest: F32,
        /// One over the scale; read by kernels that add something to products before they scale them.
        inverse_scale: F32,
        /// The softcap times `log2(e)`.
        softcap_log2: F32,
        /// The index of the last entry of [`aux_f32`](Self::aux_f32).
        last_aux_f32: S32,
        /// The index of the last entry of [`aux_i32`](Self::aux_i32).
        last_aux_i32: S32,
        /// Bytes from the block mask of one batch to that of the next.
        block_mask_batch_stride: U64,
        /// Bytes from the block mask of one query head to that of the next.
        block_mask_head_stride: U64,
        /// Rows of one head of query, output and LSE in memory: of all sequences where they are packed.
        query_rows: U32,
        /// Rows of key and value of all sequences, where they are packed.
        total_k: U32,
        /// The last batch of the KV cache, or the last row of the page table.
        last_cache_batch: U32,
        /// Rows of a page; its logarithm where that is a power of two.
        page_size: U32,
        /// The last page of the cache.
        last_page: U32,
        /// Entries from one row of the page table to the next.
        table_stride: U32,
    }
    last {
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, kv_batch_idx, page_table, alibi_slopes, sinks, aux_f32,
        aux_i32, bias,
    }
    launch {
        /// The address of the memory that the kernels of a launch use among themselves: partial results of
        /// split-KV.
        workspace,
        /// The address of the block mask, within the workspace.
        block_mask,
        /// Bytes from one batch of the bias to the next.
        bias_batch_stride,
        /// Bytes from one query head of the bias to the next.
        bias_head_stride,
        /// Bytes from one query row of the bias to the next.
        bias_row_stride,
        /// Bytes from one key of the bias to the next.
        bias_key_stride,
    }
}

impl Parameters {
    /// The parameters of a scale, where the problem has it.
    pub fn scale(&self, scale: Operand) -> Option<ScaleParameters> {
        scale.scale_index().and_then(|index| self.scales[index])
    }
}

/// Parameters of a scale of an 8-bit tensor, in kernels of problems that have it: they change from launch to launch.
#[derive(Debug, Clone, Copy)]
pub struct ScaleParameters {
    /// The address of the first.
    pub first: Reg<U64>,
    /// Bytes from one sequence to the next.
    pub sequence_stride: Reg<U64>,
    /// Bytes from one batch of the tensor, or one page, to the next.
    pub batch_stride: Reg<U64>,
    /// Bytes from one row of the tensor to the next.
    pub row_stride: Reg<U64>,
    /// Bytes from one KV head to the next.
    pub key_head_stride: Reg<U64>,
    /// Bytes from one query head of a KV head to the next.
    pub query_head_stride: Reg<U64>,
}

impl ScaleParameters {
    /// Declares and loads them.
    pub(crate) fn load(k: &mut Builder, scale: Operand) -> Self {
        let mut word = |field: &str| k.parameter::<U64>(&format!("{}{field}", scale.name()));
        Self {
            first: word(""),
            sequence_stride: word("_sequence_stride"),
            batch_stride: word("_batch_stride"),
            row_stride: word("_row_stride"),
            key_head_stride: word("_key_head_stride"),
            query_head_stride: word("_query_head_stride"),
        }
    }
}

/// Parameters of persistent kernels, after the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileParameters {
    /// Tiles of query rows in one head.
    pub(crate) tiles: Reg<U32>,
    /// Query heads.
    pub(crate) heads: Reg<U32>,
    /// Tiles in all.
    pub(crate) all: Reg<U32>,
}

impl TileParameters {
    /// Declares and loads them.
    pub(crate) fn load(k: &mut Builder) -> Self {
        Self { tiles: k.parameter("tiles"), heads: k.parameter("heads"), all: k.parameter("all_tiles") }
    }
}

/// Parameters of split-KV kernels and of the kernel that combines their partial results, after the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitParameters {
    /// Number of KV splits.
    pub(crate) num_splits: Reg<U32>,
    /// Rows of the output in all.
    pub(crate) rows: Reg<U64>,
    /// The address of the partial results.
    pub(crate) workspace: Reg<U64>,
}

impl SplitParameters {
    /// Declares and loads them.
    pub(crate) fn load(k: &mut Builder, parameters: &Parameters) -> Self {
        Self { num_splits: k.parameter("num_splits"), rows: k.parameter("rows"), workspace: parameters.workspace }
    }
}

/// Values of the parameters that kernels of some configs have after those that all have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extra {
    /// Nothing.
    Nothing,
    /// [`TileParameters`].
    Tiles { tiles: u32, heads: u32, all: u32 },
    /// [`SplitParameters`].
    Splits { num_splits: u32, rows: u64 },
    /// [`ChunkParameters`](crate::attention::scheduler::chunks::ChunkParameters).
    Chunks { max_chunks: u32, rows: u64, chunk_keys: u32, sequences: u32, heads: u32 },
}

impl Extra {
    pub(crate) fn arguments(self) -> Vec<Argument> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Tiles { tiles, heads, all } => vec![Argument::U32(tiles), Argument::U32(heads), Argument::U32(all)],
            Self::Splits { num_splits, rows } => vec![Argument::U32(num_splits), Argument::U64(rows)],
            Self::Chunks { max_chunks, rows, chunk_keys, sequences, heads } => vec![
                Argument::U32(max_chunks),
                Argument::U64(rows),
                Argument::U32(chunk_keys),
                Argument::U32(sequences),
                Argument::U32(heads),
            ],
        }
    }
}

/// The words that every kernel of attention takes from a launch, by the index of the parameter.
pub(crate) fn launch_words(block_mask_offset: u64) -> impl Iterator<Item = (usize, Word)> {
    let [workspace, block_mask] = [0, block_mask_offset].map(|offset| Word::Address(Place::in_workspace(offset)));
    let operands = Operand::ALL[..Operand::PARAMETERS].iter().map(|&operand| Word::Address(operand.into()));
    let words = operands.chain([workspace, block_mask]).chain((0..4).map(Word::BiasStride));
    words.enumerate().map(|(index, word)| (if index < FIRST { index } else { index + BETWEEN }, word))
}

/// A window wider than this is as wide as one that is not there: no sequence is longer.
const WIDEST_WINDOW: usize = LONGEST;

/// The arguments that all kernels of a plan have, in the order of [`Parameters`]; those that change from launch to launch
/// are 0.
pub(crate) fn arguments(problem: &Problem, block_mask: Option<BlockMaskShape>) -> Vec<Argument> {
    let [block_mask_batch_stride, block_mask_head_stride] = block_mask.map_or([0; 2], BlockMaskShape::strides);
    let bytes = |operand: Operand, strides: Strides| {
        let element = operand.element_bytes(problem) as u64;
        [strides.batch, strides.head, strides.row].map(|stride| stride as u64 * element)
    };
    let strides = problem.strides();
    let [query_batch_stride, query_head_stride, query_row_stride] = bytes(Operand::Query, strides.query);
    let [key_batch_stride, key_head_stride, key_row_stride] = bytes(Operand::Key, strides.key);
    let [value_batch_stride, value_head_stride, value_row_stride] = bytes(Operand::Value, strides.value);
    let [output_batch_stride, output_head_stride, output_row_stride] = bytes(Operand::Output, strides.output);
    let (left, right) = problem.mask.limits();
    let window = |keys: Option<usize>| keys.unwrap_or(0).min(WIDEST_WINDOW) as i32;
    // The offset is the same for every length, or follows it.
    let follows = problem.position_offset(problem.key_length) != problem.position_offset(problem.key_length + 1);
    let (position_offset, position_per_key) = if problem.has_device_lengths() {
        (follows_nothing(problem, follows), i32::from(follows))
    } else {
        (problem.position_offset(problem.key_length) as i32, 0)
    };
    let scale = problem.scale * core::f64::consts::LOG2_E;
    let scale = problem.softcap.map_or(scale, |softcap| 2.0 * scale / f64::from(softcap));
    PlanValues {
        query_batch_stride,
        query_head_stride,
        query_row_stride,
        key_batch_stride,
        key_head_stride,
        key_row_stride,
        value_batch_stride,
        value_head_stride,
        value_row_stride,
        output_batch_stride,
        output_head_stride,
        output_row_stride,
        query_length: problem.query_length as u32,
        key_length: match problem.paged {
            Some(paged) if paged.num_pages == 0 => 0,
            _ if problem.is_ragged() => problem.key_length as u32,
            _ => problem.attended_range(problem.key_length).end as u32,
        },
        heads_per_key_head: (problem.query_heads / problem.key_heads) as u32,
        position_offset,
        position_per_key,
        window_left: window(left),
        window_right: window(right),
        scale_log2: scale as f32,
        scale_log2_rest: (scale - f64::from(scale as f32)) as f32,
        inverse_scale: (1.0 / problem.scale) as f32,
        softcap_log2: problem.softcap.unwrap_or(0.0) * LOG2_E,
        last_aux_f32: problem.aux_f32.saturating_sub(1) as i32,
        last_aux_i32: problem.aux_i32.saturating_sub(1) as i32,
        block_mask_batch_stride,
        block_mask_head_stride,
        query_rows: problem.query_shape().rows as u32,
        total_k: problem.total_k.unwrap_or(0) as u32,
        last_cache_batch: problem.cache_batches().saturating_sub(1) as u32,
        page_size: problem.paged.map_or(0, |paged| {
            if paged.page_size.is_power_of_two() { paged.page_size.ilog2() } else { paged.page_size as u32 }
        }),
        last_page: problem.paged.map_or(0, |paged| paged.num_pages.saturating_sub(1)) as u32,
        table_stride: problem.paged.map_or(0, |paged| paged.table_stride) as u32,
    }
    .arguments()
}

/// The offset from a query row to its position among no keys; where query lengths are only known to a launch, less
/// the query length.
fn follows_nothing(problem: &Problem, follows: bool) -> i32 {
    let offset = problem.position_offset(0) as i32;
    let is_dynamic = follows && (problem.total_q.is_some() || problem.seqused_q);
    if is_dynamic { offset + problem.query_length as i32 } else { offset }
}

/// The constants of `score_mod` and `mask_mod`, which follow in kernels that compute scores.
pub(crate) fn expression_constants(problem: &Problem) -> impl Iterator<Item = Argument> {
    let score = problem.score_mod.map(|score_mod| constants(score_mod.expression(), score_mod.constants()));
    let mask = problem.mask_mod.map(|mask_mod| constants(mask_mod.expression(), mask_mod.constants()));
    score.into_iter().flatten().chain(mask.into_iter().flatten())
}

/// The arguments for the constants of an expression, in the order in which [`BoundExpression::load`] declares them.
fn constants(expression: &'static Expression, constants: Constants) -> impl Iterator<Item = Argument> {
    expression.slots().map(move |(slot, kind)| match kind {
        Kind::Number => Argument::F32(constants.number(slot)),
        Kind::Integer | Kind::Truth => Argument::S32(constants.integer(slot)),
    })
}

/// The host's side of a parameter type.
trait HostValue {
    type Host;
    fn argument(value: Self::Host) -> Argument;
}

macro_rules! host_values {
    ($($marker:ident = $host:ty;)*) => {
        $(impl HostValue for $marker {
            type Host = $host;
            fn argument(value: $host) -> Argument {
                Argument::$marker(value)
            }
        })*
    };
}

host_values! {
    U32 = u32;
    S32 = i32;
    F32 = f32;
    U64 = u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_in_the_order_of_the_operands() {
        assert!(Operand::ALL[..Operand::PARAMETERS].iter().map(|operand| operand.name()).eq(OPERANDS.iter().copied()));
    }
}
