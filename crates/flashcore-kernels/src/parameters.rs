//! What kernels receive at run time, in one order for the kernel and for whoever launches it.

use core::f32::consts::LOG2_E;

use flashcore_ir::types::{F32, S32, U32, U64};
use flashcore_ir::{Builder, Reg, TensorMap};
use flashcore_problem::expression::{Constants, Expression, Kind};
use flashcore_problem::{BiasStrides, Problem, Strides};

use crate::attention::tile_ranges::RangeShape;
use crate::plan::LONGEST;
use crate::specialization::Specialization;
use crate::tile::BoundExpression;

/// Declares the parameters once: the registers a kernel reads them from, and the values a launch passes.
macro_rules! parameters {
    ($($(#[$doc:meta])* $name:ident: $ty:ident,)*) => {
        /// The parameters of every attention kernel, loaded into registers.
        #[derive(Debug, Clone, Copy)]
        pub struct Parameters {
            $($(#[$doc])* pub $name: Reg<$ty>,)*
            /// The expression for scores, with its constants.
            pub score_mod: Option<BoundExpression>,
            /// The expression for masks, with its constants.
            pub mask_mod: Option<BoundExpression>,
        }

        impl Parameters {
            /// Declares and loads them: those that all kernels have, and the constants of expressions.
            pub fn load(k: &mut Builder, specialization: Specialization) -> Self {
                Self {
                    $($name: k.parameter::<$ty>(stringify!($name)),)*
                    score_mod: specialization.score_mod.map(|expression| BoundExpression::load(k, "score", expression)),
                    mask_mod: specialization.mask_mod.map(|expression| BoundExpression::load(k, "mask", expression)),
                }
            }
        }

        /// The values of the parameters, by the same names.
        struct Values {
            $($name: <$ty as HostValue>::Host,)*
        }

        impl Values {
            fn arguments(self) -> Vec<Argument> {
                vec![$(<$ty as HostValue>::argument(self.$name),)*]
            }
        }
    };
}

parameters! {
    /// The address of the query.
    query: U64,
    /// The address of the key.
    key: U64,
    /// The address of the value.
    value: U64,
    /// The address of the output.
    output: U64,
    /// The address of the log-sum-exp, an `f32` per row of the output; not read by kernels that do not write it.
    lse: U64,
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
    /// What is added to a query row to give its position among the keys; where each batch has a key length of its own,
    /// less [`position_per_key`](Self::position_per_key) times that length.
    position_offset: S32,
    /// How far one more key of a batch moves the positions of its rows: 1 when they are aligned at the end, 0 at the
    /// beginning. Read only where each batch has a key length of its own.
    position_per_key: S32,
    /// Keys before its position that a row attends.
    window_left: S32,
    /// Keys behind its position that a row attends: 0 under a causal mask.
    window_right: S32,
    /// The scale of the scores times `log2(e)`; with a softcap, `2 * log2(e) * scale / softcap`.
    scale_log2: F32,
    /// What rounding took from it; read by kernels of `f32`.
    scale_log2_rest: F32,
    /// One over the scale; read by kernels that add something to products before they scale them.
    inverse_scale: F32,
    /// The softcap times `log2(e)`.
    softcap_log2: F32,
    /// The address of a `u32` per batch: its key length.
    seqused_k: U64,
    /// The address of an `f32` per query head: its slope.
    alibi_slopes: U64,
    /// The address of an `f32` per query head: its sink.
    sinks: U64,
    /// The address of the table of numbers that expressions read.
    aux_f32: U64,
    /// The index of its last entry.
    last_number: S32,
    /// The address of the table of integers that expressions read.
    aux_i32: U64,
    /// The index of its last entry.
    last_integer: S32,
    /// The address of what is known of the tiles that an expression leaves: see `attention/tile_ranges.rs`.
    tile_ranges: U64,
    /// Bytes from what is known for one batch to that for the next.
    ranges_batch_stride: U64,
    /// Bytes from what is known for one query head to that for the next.
    ranges_head_stride: U64,
    /// The address of the bias.
    bias: U64,
    /// Bytes from one batch of the bias to the next.
    bias_batch_stride: U64,
    /// Bytes from one query head of the bias to the next.
    bias_head_stride: U64,
    /// Bytes from one query row of the bias to the next.
    bias_row_stride: U64,
    /// Bytes from one key of the bias to the next.
    bias_key_stride: U64,
}

/// What kernels that take their tiles in turn receive besides, behind the others.
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

/// What kernels that each take a part of the keys receive besides, behind the others, and the kernel that combines what
/// they have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitParameters {
    /// Parts of the keys.
    pub(crate) num_splits: Reg<U32>,
    /// Rows of the output in all.
    pub(crate) rows: Reg<U64>,
    /// The address of what is known of the parts.
    pub(crate) workspace: Reg<U64>,
}

impl SplitParameters {
    /// Declares and loads them.
    pub(crate) fn load(k: &mut Builder) -> Self {
        Self { num_splits: k.parameter("num_splits"), rows: k.parameter("rows"), workspace: k.parameter("workspace") }
    }
}

/// What kernels of some configs receive behind the parameters that all have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extra {
    /// Nothing.
    Nothing,
    /// [`TileParameters`].
    Tiles { tiles: u32, heads: u32, all: u32 },
    /// [`SplitParameters`].
    Splits { num_splits: u32, rows: u64 },
}

impl Extra {
    pub(crate) fn arguments(self, buffers: Buffers) -> Vec<Argument> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Tiles { tiles, heads, all } => vec![Argument::U32(tiles), Argument::U32(heads), Argument::U32(all)],
            Self::Splits { num_splits, rows } => {
                vec![Argument::U32(num_splits), Argument::U64(rows), Argument::U64(buffers.workspace)]
            }
        }
    }
}

/// A value that a launch passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// An unsigned 32-bit integer.
    U32(u32),
    /// A signed 32-bit integer.
    S32(i32),
    /// A single-precision float.
    F32(f32),
    /// An unsigned 64-bit integer or an address.
    U64(u64),
    /// A signed 64-bit integer.
    S64(i64),
    /// A tensor in memory of the device.
    TensorMap(TensorMap),
}

/// Device addresses of the tensors of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffers {
    /// Of the query.
    pub query: u64,
    /// Of the key.
    pub key: u64,
    /// Of the value.
    pub value: u64,
    /// Of the output.
    pub output: u64,
    /// Of the log-sum-exp; any address when the problem does not ask for it, like the others below.
    pub lse: u64,
    /// Of the key lengths.
    pub seqused_k: u64,
    /// Of the slopes.
    pub alibi_slopes: u64,
    /// Of the sinks.
    pub sinks: u64,
    /// Of the bias.
    pub bias: u64,
    /// Where the terms of the bias lie.
    pub bias_strides: BiasStrides,
    /// Of the table of numbers.
    pub aux_f32: u64,
    /// Of the table of integers.
    pub aux_i32: u64,
    /// Of the part of the workspace that begins [`Plan::ranges_offset`](crate::Plan::ranges_offset) bytes behind its
    /// beginning; any address when there is none.
    pub tile_ranges: u64,
    /// Of [`Plan::workspace_bytes`](crate::Plan::workspace_bytes) bytes that the kernels use among themselves; any address
    /// when they are none.
    pub workspace: u64,
}

impl Buffers {
    /// Query, key, value and output, and nothing else.
    pub const fn new(query: u64, key: u64, value: u64, output: u64) -> Self {
        let bias_strides = BiasStrides { batch: 0, head: 0, row: 0, key: 0 };
        Self {
            query,
            key,
            value,
            output,
            lse: 0,
            seqused_k: 0,
            alibi_slopes: 0,
            sinks: 0,
            bias: 0,
            bias_strides,
            aux_f32: 0,
            aux_i32: 0,
            tile_ranges: 0,
            workspace: 0,
        }
    }
}

/// A window wider than this is as wide as one that is not there: no sequence is longer.
const WIDEST_WINDOW: usize = LONGEST;

/// The arguments of a launch, in the order of [`Parameters`].
pub(crate) fn arguments(problem: &Problem, buffers: Buffers, ranges: Option<RangeShape>) -> Vec<Argument> {
    let [ranges_batch_stride, ranges_head_stride] = ranges.map_or([0; 2], RangeShape::strides);
    let element = problem.dtype.size_bytes() as u64;
    let bytes = |strides: Strides| [strides.batch, strides.head, strides.row].map(|stride| stride as u64 * element);
    let strides = problem.strides();
    let [query_batch_stride, query_head_stride, query_row_stride] = bytes(strides.query);
    let [key_batch_stride, key_head_stride, key_row_stride] = bytes(strides.key);
    let [value_batch_stride, value_head_stride, value_row_stride] = bytes(strides.value);
    let [output_batch_stride, output_head_stride, output_row_stride] = bytes(strides.output);
    let (left, right) = problem.mask.limits();
    let window = |keys: Option<usize>| keys.unwrap_or(0).min(WIDEST_WINDOW) as i32;
    // The offset is the same for every length, or follows it.
    let follows = problem.position_offset(problem.key_length) != problem.position_offset(problem.key_length + 1);
    let (position_offset, position_per_key) = if problem.seqused_k {
        (problem.position_offset(0) as i32, i32::from(follows))
    } else {
        (problem.position_offset(problem.key_length) as i32, 0)
    };
    let scale = problem.scale * core::f64::consts::LOG2_E;
    let scale = problem.softcap.map_or(scale, |softcap| 2.0 * scale / f64::from(softcap));
    let bias_bytes = |stride: usize| stride as u64 * size_of::<f32>() as u64;
    let mut arguments = Values {
        query: buffers.query,
        key: buffers.key,
        value: buffers.value,
        output: buffers.output,
        lse: buffers.lse,
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
        key_length: problem.attended_range(problem.key_length).end as u32,
        heads_per_key_head: (problem.query_heads / problem.key_heads) as u32,
        position_offset,
        position_per_key,
        window_left: window(left),
        window_right: window(right),
        scale_log2: scale as f32,
        scale_log2_rest: (scale - f64::from(scale as f32)) as f32,
        inverse_scale: (1.0 / problem.scale) as f32,
        softcap_log2: problem.softcap.unwrap_or(0.0) * LOG2_E,
        seqused_k: buffers.seqused_k,
        alibi_slopes: buffers.alibi_slopes,
        sinks: buffers.sinks,
        aux_f32: buffers.aux_f32,
        last_number: problem.aux_f32.saturating_sub(1) as i32,
        aux_i32: buffers.aux_i32,
        last_integer: problem.aux_i32.saturating_sub(1) as i32,
        tile_ranges: buffers.tile_ranges,
        ranges_batch_stride,
        ranges_head_stride,
        bias: buffers.bias,
        bias_batch_stride: bias_bytes(buffers.bias_strides.batch),
        bias_head_stride: bias_bytes(buffers.bias_strides.head),
        bias_row_stride: bias_bytes(buffers.bias_strides.row),
        bias_key_stride: bias_bytes(buffers.bias_strides.key),
    }
    .arguments();
    let score = problem.score_mod.map(|score_mod| constants(score_mod.expression(), score_mod.constants()));
    let mask = problem.mask_mod.map(|mask_mod| constants(mask_mod.expression(), mask_mod.constants()));
    arguments.extend(score.into_iter().flatten());
    arguments.extend(mask.into_iter().flatten());
    arguments
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
