//! Contents of the tensors of a case: random numbers, numbers that stress a weak point, or NaN and infinities.

use std::collections::HashSet;
use std::ops::Range;

use flashcore_problem::{
    Bias, BiasStrides, DType, Inputs, Operand, Problem, Scale, ScaleStrides, SequenceLengths, Shape, SplitMix64,
    Stress, Strides, Tensor,
};

use crate::testkit::suites::huge::FAR_BIAS_ROWS;

/// Contents of the tensors of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numbers {
    /// Independent normal numbers.
    #[default]
    Normal,
    /// Query, key and value that stress a weak point.
    Stress(Stress),
    /// Normal numbers, and among them some that are not.
    Planted(Planted),
}

/// Numbers that random inputs never hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// NaN and infinities in the keys and values that no row attends: they must leave no trace.
    Unattended,
    /// NaN in one key of each head: the rows that attend it are NaN, and no others.
    NanKey,
    /// NaN in one value of each head.
    NanValue,
    /// NaN in one query row of each head.
    NanQuery,
    /// An infinity in one value of each head.
    InfiniteValue,
    /// A bias of minus infinity for some keys, and for all keys of some rows.
    MinusInfiniteBias,
    /// Sinks of minus infinity, which are none, and sinks far above and below the scores.
    ExtremeSinks,
    /// Values, and so outputs, below the smallest normal number of the type.
    SubnormalValues,
    /// Queries below the smallest normal number, and keys so large that the scores are of ordinary size.
    SubnormalQueries,
    /// Large queries and small keys, and values near the largest number of the type.
    LargeMagnitudes,
    /// Values with scales of tokens that grow along the keys by 2^18, if they have scales.
    GrowingScales,
    /// Values with scales of tokens that fall along the keys by 2^18, if they have scales.
    FallingScales,
}

impl Planted {
    /// Every kind but those of scales.
    pub const ALL: [Self; 10] = [
        Self::Unattended,
        Self::NanKey,
        Self::NanValue,
        Self::NanQuery,
        Self::InfiniteValue,
        Self::MinusInfiniteBias,
        Self::ExtremeSinks,
        Self::SubnormalValues,
        Self::SubnormalQueries,
        Self::LargeMagnitudes,
    ];

    /// Name in the names of cases.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unattended => "planted-unattended",
            Self::NanKey => "planted-nan-key",
            Self::NanValue => "planted-nan-value",
            Self::NanQuery => "planted-nan-query",
            Self::InfiniteValue => "planted-infinite-value",
            Self::MinusInfiniteBias => "planted-minus-infinite-bias",
            Self::ExtremeSinks => "planted-extreme-sinks",
            Self::SubnormalValues => "planted-subnormal-values",
            Self::SubnormalQueries => "planted-subnormal-queries",
            Self::LargeMagnitudes => "planted-large-magnitudes",
            Self::GrowingScales => "planted-growing-scales",
            Self::FallingScales => "planted-falling-scales",
        }
    }

    /// Changes inputs that hold normal numbers.
    fn plant(self, problem: &Problem, inputs: &mut Inputs, random: &mut SplitMix64) {
        let types = problem.dtypes();
        let strides = problem.strides();
        let (query, key, value) = (
            (problem.query_shape(), strides.query),
            (problem.key_shape(), strides.key),
            (problem.value_shape(), strides.value),
        );
        match self {
            Self::Unattended => plant_unattended(problem, inputs, random),
            Self::NanKey => plant_one_per_head(&mut inputs.key, key, &[f64::NAN], random),
            Self::NanValue => plant_one_per_head(&mut inputs.value, value, &[f64::NAN], random),
            Self::NanQuery => plant_one_per_head(&mut inputs.query, query, &[f64::NAN], random),
            Self::InfiniteValue => {
                plant_one_per_head(&mut inputs.value, value, &[f64::INFINITY, f64::NEG_INFINITY], random);
            }
            Self::MinusInfiniteBias => {
                for term in inputs.bias.iter_mut().flat_map(|bias| &mut bias.data).filter(|term| !term.is_nan()) {
                    *term = if random.below(3) == 0 { f32::NEG_INFINITY } else { *term };
                }
                plant_empty_rows(problem, inputs);
            }
            Self::ExtremeSinks => {
                let extremes = [f32::NEG_INFINITY, 8.0, -200.0, 0.0];
                for (sink, extreme) in inputs.sinks.iter_mut().flatten().zip(extremes.into_iter().cycle()) {
                    *sink = extreme;
                }
            }
            Self::SubnormalValues => scale(&mut inputs.value, value, types.key_value.smallest_normal() / 8.0),
            Self::SubnormalQueries => {
                let factor = types.query.smallest_normal() / 8.0;
                scale(&mut inputs.query, query, factor);
                scale(&mut inputs.key, key, 0.25 / factor);
            }
            Self::LargeMagnitudes => {
                let (factor, largest) = (large(types.query).0.min(large(types.key_value).0), large(types.key_value).1);
                scale(&mut inputs.query, query, factor);
                scale(&mut inputs.key, key, 1.0 / factor);
                scale(&mut inputs.value, value, largest);
            }
            Self::GrowingScales => plant_value_scales(problem, inputs, random, [-14.0, 4.0]),
            Self::FallingScales => plant_value_scales(problem, inputs, random, [4.0, -14.0]),
        }
    }
}

impl Numbers {
    /// The inputs of a problem, the bias lying in some way.
    pub fn inputs(self, problem: &Problem, seed: u64, bias: BiasForm) -> Inputs {
        self.inputs_of_lengths(problem, seed, bias, SequenceLengths::Ragged)
    }

    /// The inputs of a problem, its sequences of lengths by a pattern; those of stress are always ragged.
    pub fn inputs_of_lengths(self, problem: &Problem, seed: u64, bias: BiasForm, lengths: SequenceLengths) -> Inputs {
        /// Keeps what is planted apart from what it is planted in.
        const STREAM: u64 = 0x9_1a47;
        let mut random = SplitMix64::stream(seed, STREAM);
        let mut inputs = match self {
            Self::Normal | Self::Planted(_) => Inputs::random_sequences(problem, lengths, seed),
            Self::Stress(stress) => Inputs::stress(problem, stress, seed),
        };
        if problem.bias && bias != BiasForm::PerHead {
            inputs.bias = Some(bias.random(problem, &mut random));
        }
        if self == Self::Stress(Stress::OneKey) {
            inputs.mask_but_one_key(problem, seed);
        }
        if let Self::Planted(planted) = self {
            planted.plant(problem, &mut inputs, &mut random);
        }
        inputs
    }
}

impl From<Option<Stress>> for Numbers {
    fn from(stress: Option<Stress>) -> Self {
        stress.map_or(Self::Normal, Self::Stress)
    }
}

/// Memory layout of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BiasForm {
    /// One for each head, row and key, the same for all batches.
    #[default]
    PerHead,
    /// One for each batch, head, row and key.
    PerBatchAndHead,
    /// One for each row and key.
    PerRowAndKey,
    /// One for each key of each batch, as a padding mask.
    PerKey,
    /// One for each row and head.
    PerRow,
    /// A single one.
    Single,
    /// One for each head, row and key, with padding between the rows and heads.
    Padded,
    /// One for each head, row and key, the rows of a key side by side.
    KeyMajor,
    /// One for each head, row and key, the rows so far apart that 97 of them take 6 GiB.
    FarRows,
}

impl BiasForm {
    /// Every form but the far one.
    pub const ALL: [Self; 8] = [
        Self::PerHead,
        Self::PerBatchAndHead,
        Self::PerRowAndKey,
        Self::PerKey,
        Self::PerRow,
        Self::Single,
        Self::Padded,
        Self::KeyMajor,
    ];

    /// Name in the names of cases.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PerHead => "bias",
            Self::PerBatchAndHead => "bias-per-batch-and-head",
            Self::PerRowAndKey => "bias-per-row-and-key",
            Self::PerKey => "bias-per-key",
            Self::PerRow => "bias-per-row",
            Self::Single => "bias-single",
            Self::Padded => "bias-padded",
            Self::KeyMajor => "bias-key-major",
            Self::FarRows => "bias-far-rows",
        }
    }

    fn strides(self, problem: &Problem) -> BiasStrides {
        let (heads, rows, keys) = (problem.query_heads, problem.query_length, problem.key_length);
        match self {
            Self::PerHead => BiasStrides { batch: 0, head: rows * keys, row: keys, key: 1 },
            Self::PerBatchAndHead => BiasStrides { batch: heads * rows * keys, head: rows * keys, row: keys, key: 1 },
            Self::PerRowAndKey => BiasStrides { batch: 0, head: 0, row: keys, key: 1 },
            Self::PerKey => BiasStrides { batch: keys, head: 0, row: 0, key: 1 },
            Self::PerRow => BiasStrides { batch: 0, head: rows, row: 1, key: 0 },
            Self::Single => BiasStrides { batch: 0, head: 0, row: 0, key: 0 },
            Self::Padded => BiasStrides { batch: 0, head: rows * (keys + 3) + 5, row: keys + 3, key: 1 },
            Self::KeyMajor => BiasStrides { batch: 0, head: rows * keys, row: 1, key: rows },
            Self::FarRows => BiasStrides { batch: 0, head: keys, row: FAR_BIAS_ROWS, key: 1 },
        }
    }

    /// Normal terms, and NaN in the padding between them.
    fn random(self, problem: &Problem, random: &mut SplitMix64) -> Bias {
        let strides = self.strides(problem);
        let BiasStrides { batch, head, row, key } = strides;
        // Terms that share a place are written once.
        let count = |stride: usize, size: usize| if stride == 0 { size.min(1) } else { size };
        let counts = [
            count(batch, problem.batch),
            count(head, problem.query_heads),
            count(row, problem.query_length),
            count(key, problem.key_length),
        ];
        let extent = match counts {
            [0, ..] | [_, 0, ..] | [_, _, 0, _] | [.., 0] => 0,
            [a, b, c, d] => strides.index(a - 1, b - 1, c - 1, d - 1) + 1,
        };
        let mut data = vec![f32::NAN; extent];
        let [batches, heads, rows, keys] = counts.map(|count| 0..count);
        for batch in batches {
            for head in heads.clone() {
                for row in rows.clone() {
                    for key in keys.clone() {
                        data[strides.index(batch, head, row, key)] = random.normal() as f32;
                    }
                }
            }
        }
        Bias { data, strides }
    }
}

/// Factors by which queries can be multiplied and keys divided, and by which values can be multiplied, so that no sum over some
/// thousand keys of products with weights up to 1 overflows.
fn large(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F16 => (256.0, 8192.0),
        DType::Bf16 | DType::F32 => (1e15, 1e33),
        DType::F64 => (1e100, 1e150),
        // Beyond these, numbers would saturate or vanish.
        DType::E4m3 => (4.0, 64.0),
        DType::E5m2 => (64.0, 4096.0),
    }
}

fn scale(tensor: &mut Tensor, (shape, strides): (Shape, Strides), factor: f64) {
    // Rows that share their place, as strides of 0 make them, are scaled once.
    let mut starts: Vec<usize> =
        shape.each_row().map(|(batch, head, row)| strides.row_start(batch, head, row)).collect();
    starts.sort_unstable();
    starts.dedup();
    for index in starts.into_iter().flat_map(|start| start..start + shape.columns) {
        tensor.set(index, tensor.get(index) * factor);
    }
}

/// Replaces one column of one row of every head, by each of `numbers`, cyclically.
fn plant_one_per_head(
    tensor: &mut Tensor,
    (shape, strides): (Shape, Strides),
    numbers: &[f64],
    random: &mut SplitMix64,
) {
    if shape.is_empty() {
        return;
    }
    for (count, (batch, head)) in
        (0..shape.batch).flat_map(|batch| (0..shape.heads).map(move |head| (batch, head))).enumerate()
    {
        let (row, column) = (random.below(shape.rows), random.below(shape.columns));
        tensor.set(strides.row_start(batch, head, row) + column, numbers[count % numbers.len()]);
    }
}

/// The keys of a sequence, of every key head, that some row attends as far as mask and lengths say, and those between
/// them: outside of this range no row looks at a key or a value, and they may hold anything.
pub fn attended_by_some_row(problem: &Problem, inputs: &Inputs, sequence: usize) -> Range<usize> {
    let sequence = inputs.views().sequence(problem, sequence);
    let rows = 0..sequence.query_length;
    let ranges = rows.map(|row| sequence.attended_keys(problem, row)).filter(|keys| !keys.is_empty());
    ranges.reduce(|left, right| left.start.min(right.start)..left.end.max(right.end)).unwrap_or(0..0)
}

/// NaN and infinities wherever no row of any sequence looks: what sequences share, all of them count for.
fn plant_unattended(problem: &Problem, inputs: &mut Inputs, random: &mut SplitMix64) {
    let keys_of = |index: usize| {
        let sequence = inputs.views().sequence(problem, index);
        attended_by_some_row(problem, inputs, index).map(move |key| sequence.key_row(key))
    };
    let attended: Vec<(usize, usize)> = (0..problem.batch).flat_map(keys_of).collect();
    let strides = problem.strides();
    for (tensor, shape, strides) in
        [(&mut inputs.key, problem.key_shape(), strides.key), (&mut inputs.value, problem.value_shape(), strides.value)]
    {
        let starts: HashSet<usize> = (0..shape.heads)
            .flat_map(|head| attended.iter().map(move |&(batch, row)| strides.row_start(batch, head, row)))
            .collect();
        for (batch, head, row) in shape.each_row() {
            let start = strides.row_start(batch, head, row);
            if !starts.contains(&start) {
                for index in start..start + shape.columns {
                    tensor.set(index, [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][random.below(3)]);
                }
            }
        }
    }
}

/// Scales of values for each token, powers of two from that of the first exponent to that of the last times numbers from 1
/// to 2. Scales of rows that are in no sequence are NaN.
fn plant_value_scales(problem: &Problem, inputs: &mut Inputs, random: &mut SplitMix64, [first, last]: [f64; 2]) {
    if inputs.v_scale.is_none() {
        return;
    }
    let strides = ScaleStrides::per_token(Operand::VScale, problem);
    let mut data = vec![f32::NAN; strides.extent(Operand::VScale, problem).expect("a tensor that exists")];
    for index in 0..problem.batch {
        let sequence = inputs.views().sequence(problem, index);
        for key in 0..sequence.key_length {
            let exponent = first + (last - first) * key as f64 / sequence.key_length as f64;
            for head in 0..problem.key_heads {
                let scale = exponent.floor().exp2() * (1.0 + random.below(128) as f64 / 128.0);
                data[strides.key_index(index, sequence.key_row(key), head)] = scale as f32;
            }
        }
    }
    inputs.v_scale = Some(Scale { data, strides });
}

/// A bias of minus infinity for every key of every seventh row.
fn plant_empty_rows(problem: &Problem, inputs: &mut Inputs) {
    let Some(bias) = &mut inputs.bias else { return };
    let has_rows_of_its_own = bias.strides.row != 0;
    if !has_rows_of_its_own {
        return;
    }
    let rows = Shape { batch: problem.batch, rows: problem.query_length, ..problem.output_shape() };
    for (batch, head, row) in rows.each_row().filter(|(_, _, row)| row % 7 == 3) {
        for key in 0..problem.key_length {
            bias.data[bias.strides.index(batch, head, row, key)] = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{Alignment, Mask};

    #[test]
    fn keys_that_no_row_attends_follow_from_mask_and_length() {
        let check = |mask: Mask, queries: usize, lengths: [u32; 2], expected: [Range<usize>; 2]| {
            let mut problem = Problem::new(2, 1, queries, 8, DType::F16);
            (problem.key_length, problem.mask, problem.seqused_k) = (10, mask, true);
            let mut inputs = Inputs::random(&problem, 0);
            inputs.seqused_k = Some(lengths.to_vec());
            let found = [0, 1].map(|batch| attended_by_some_row(&problem, &inputs, batch));
            assert_eq!(found, expected, "{mask}");
        };
        let window = |left, right, alignment| Mask::Window { left, right, alignment };
        check(Mask::None, 3, [10, 4], [0..10, 0..4]);
        check(Mask::Causal(Alignment::TopLeft), 3, [10, 2], [0..3, 0..2]);
        check(Mask::Causal(Alignment::BottomRight), 3, [10, 2], [0..10, 0..2]);
        check(window(Some(1), None, Alignment::BottomRight), 3, [10, 0], [6..10, 0..0]);
        check(window(Some(1), Some(0), Alignment::TopLeft), 3, [10, 1], [0..3, 0..1]);
    }
}
