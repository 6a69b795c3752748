//! Inputs to test with: random ones, and ones that stress a weak point.
//!
//! The numbers are part of the definition of a test, so the generator is written out here and does not change: a seed
//! in a failure report gives the same inputs next year. (Box-Muller goes through the platform's `ln`, `sin` and `cos`,
//! whose last bit in `f64` may differ between platforms; after rounding to the problem's type that is seen about once
//! in 2^29 elements of `f32` and practically never in 16 bits.)

use super::lengths::SequenceLengths;
use crate::{Bias, BiasStrides, DType, Inputs, Problem, Shape, Strides, Tensor, Value};
use std::f64::consts::TAU;

/// Sebastiano Vigna's `SplitMix64`: 64 bits of state, any seed is good, streams are cheap.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
    /// The second of the two normal numbers that Box-Muller makes at a time.
    spare: Option<f64>,
}

impl SplitMix64 {
    const INCREMENT: u64 = 0x9E37_79B9_7F4A_7C15;

    /// The generator that begins at `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed, spare: None }
    }

    /// One of several independent generators of the same seed.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self::new(mix(seed.wrapping_add(mix(stream.wrapping_add(Self::INCREMENT)))))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(Self::INCREMENT);
        mix(self.state)
    }

    /// Uniform in `[0, 1)`, from the upper 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Normal with mean 0 and variance 1, by Box-Muller: the cosine first, the sine next time.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        // 1 - uniform is in (0, 1], so the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let (sine, cosine) = (TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sine);
        radius * cosine
    }

    /// Uniform among `0..count`; 0 when `count` is 0. The bias of the remainder is below `count / 2^64`.
    pub fn below(&mut self, count: usize) -> usize {
        if count == 0 { 0 } else { (self.next_u64() % count as u64) as usize }
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Inputs that go where random ones do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stress {
    /// Query and key 50 times as large as usual: with the usual scale, scores to about 10,000. One key takes almost
    /// all the weight and `row_max` jumps.
    LargeScores,
    /// Each query matches the keys of one residue and nothing else; value rows are unit vectors.
    OneHot,
    /// All queries and keys are ones, all values 0.75: every output is 0.75, whatever the number of keys.
    Constant,
    /// Independent integers from -2 to 2: scores and unnormalised sums are exact.
    SmallIntegers,
    /// Scores that rise along the keys of each sequence, by 30, 300 or 1,000 in all: `row_max` comes last, and jumps from tile
    /// to tile and from split to split.
    Rising,
    /// Scores that fall as much: whatever comes after the first keys is as good as nothing.
    Falling,
    /// One score of 30, 300 or 1,000 among the first keys of each sequence.
    SpikeFirst,
    /// One among the last keys.
    SpikeLast,
    /// Scores of -30, -300 or -1,000 for all keys of a sequence but one, the first, the last or any: all but that one are
    /// masked.
    OneKey,
    /// Two elements in three are 0, -0, or a subnormal number of their type.
    ZerosAndSubnormals,
}

impl Stress {
    /// Every kind of stress.
    pub const ALL: [Self; 10] = [
        Self::LargeScores,
        Self::OneHot,
        Self::Constant,
        Self::SmallIntegers,
        Self::Rising,
        Self::Falling,
        Self::SpikeFirst,
        Self::SpikeLast,
        Self::OneKey,
        Self::ZerosAndSubnormals,
    ];

    /// The part of the largest score that a key of a sequence of so many keys has, where that follows from its place.
    fn share(self, key: usize, keys: usize, seed: u64) -> Option<f64> {
        /// First or last keys among which a spike is.
        const NEAR_AN_END: usize = 16;
        let place = |count: usize| mix(seed) as usize % count.max(1);
        let at = |place: usize| f64::from(u8::from(key == place));
        let along = (key + 1) as f64 / keys as f64;
        match self {
            Self::LargeScores | Self::OneHot | Self::Constant | Self::SmallIntegers | Self::ZerosAndSubnormals => None,
            Self::Rising => Some(along),
            Self::Falling => Some(1.0 - along),
            Self::SpikeFirst => Some(at(place(keys.min(NEAR_AN_END)))),
            Self::SpikeLast => Some(at(keys - 1 - place(keys.min(NEAR_AN_END)))),
            Self::OneKey => Some(at(one_key(keys, seed)) - 1.0),
        }
    }
}

/// The one key of a sequence of so many keys that [`Stress::OneKey`] leaves unmasked.
fn one_key(keys: usize, seed: u64) -> usize {
    let last = keys.saturating_sub(1);
    [0, last, mix(seed) as usize % keys.max(1)][(seed / 3 % 3) as usize]
}

// Each tensor draws from its own stream: operands that resemble one another hide swapped operands. The other streams
// are in the rows of the operands.
pub(crate) const QUERY: u64 = 0;
pub(crate) const KEY: u64 = 1;
pub(crate) const VALUE: u64 = 2;
pub(crate) const BIAS: u64 = 3;

/// The stream of [`SequenceLengths`], after those of the table of operands.
const LENGTHS_STREAM: u64 = 0x1e46;

/// The numbers of query, key and value by row and column.
type Fills<'a> = [&'a mut dyn FnMut(usize, usize) -> f64; 3];

impl Inputs {
    /// Independent normal query, key, value and bias, rounded to the problem's type; `ALiBi` slopes
    /// `2^(-8 (head + 1) / heads)`; sinks uniform in (-3, 3); ragged `seqused_k` of which the first is full and, from
    /// three batches on, the second is 0. A table of numbers is normal; one of integers counts runs of random length up
    /// to 150, or a quarter of the table, like documents in a sequence. Scales are from 1/4 to 2, of one of the forms of
    /// [`ScaleStrides`](crate::ScaleStrides), which the seed chooses.
    ///
    /// The logical values do not depend on the layout. What lies between the rows of a strided tensor is poison, so
    /// reading it shows.
    ///
    /// # Panics
    ///
    /// When `problem` does not validate.
    pub fn random(problem: &Problem, seed: u64) -> Self {
        Self::random_sequences(problem, SequenceLengths::Ragged, seed)
    }

    /// [`random`](Self::random) inputs, the lengths of the sequences by a pattern.
    ///
    /// # Panics
    ///
    /// When `problem` does not validate.
    pub fn random_sequences(problem: &Problem, lengths: SequenceLengths, seed: u64) -> Self {
        let normal = |stream: u64| {
            let mut random = SplitMix64::stream(seed, stream);
            move |_row: usize, _column: usize| random.normal()
        };
        let fills: Fills<'_> = [&mut normal(QUERY), &mut normal(KEY), &mut normal(VALUE)];
        Self::filled_by(problem, seed, lengths, fills)
    }

    /// Query, key and value that stress one weak point; everything else as in [`random`](Self::random).
    ///
    /// # Panics
    ///
    /// When `problem` does not validate.
    pub fn stress(problem: &Problem, stress: Stress, seed: u64) -> Self {
        let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
        let mut query = SplitMix64::stream(seed, QUERY);
        let mut key = SplitMix64::stream(seed, KEY);
        let mut value = SplitMix64::stream(seed, VALUE);
        let integer = |random: &mut SplitMix64| random.below(5) as f64 - 2.0;
        let unit = |row: usize, columns: usize, column: usize| f64::from(u8::from(row % columns == column));
        match stress {
            Stress::LargeScores => Self::filled(
                problem,
                seed,
                [&mut |_, _| 50.0 * query.normal(), &mut |_, _| 50.0 * key.normal(), &mut |_, _| value.normal()],
            ),
            Stress::OneHot => Self::filled(
                problem,
                seed,
                [
                    &mut |row, column| 64.0 * unit(row, head_dim, column),
                    &mut |row, column| 64.0 * unit(row, head_dim, column),
                    &mut |row, column| unit(row, value_dim, column),
                ],
            ),
            Stress::Constant => Self::filled(problem, seed, [&mut |_, _| 1.0, &mut |_, _| 1.0, &mut |_, _| 0.75]),
            Stress::SmallIntegers => Self::filled(
                problem,
                seed,
                [&mut |_, _| integer(&mut query), &mut |_, _| integer(&mut key), &mut |_, _| integer(&mut value)],
            ),
            Stress::Rising | Stress::Falling | Stress::SpikeFirst | Stress::SpikeLast | Stress::OneKey => {
                let mut inputs = Self::random(problem, seed);
                inputs.shape_scores(problem, stress, seed);
                inputs
            }
            Stress::ZerosAndSubnormals => {
                let types = problem.dtypes();
                Self::filled(
                    problem,
                    seed,
                    [
                        &mut |_, _| tiny(types.query, &mut query),
                        &mut |_, _| tiny(types.key_value, &mut key),
                        &mut |_, _| tiny(types.key_value, &mut value),
                    ],
                )
            }
        }
    }

    /// Gives the scores of each sequence a shape along its keys: the first column of each query row is one number, that of a
    /// key follows from its place.
    fn shape_scores(&mut self, problem: &Problem, stress: Stress, seed: u64) {
        let largest = [30.0, 300.0, 1000.0][(seed % 3) as usize];
        let scale = if problem.scale == 0.0 { 1.0 } else { problem.scale.abs() };
        let types = problem.dtypes();
        let factor = (largest / scale).sqrt().min(types.query.largest()).min(types.key_value.largest());
        let strides = problem.strides();
        for index in 0..problem.batch {
            let sequence = self.views().sequence(problem, index);
            let queries: Vec<_> = (0..sequence.query_length).map(|row| sequence.query_row(row)).collect();
            let keys: Vec<_> = (0..sequence.key_length).map(|key| sequence.key_row(key)).collect();
            for (batch, row) in queries {
                for head in 0..problem.query_heads {
                    self.query.set(strides.query.row_start(batch, head, row), factor);
                }
            }
            for (key, &(batch, row)) in keys.iter().enumerate() {
                let Some(share) = stress.share(key, keys.len(), seed) else { return };
                for head in 0..problem.key_heads {
                    self.key.set(strides.key.row_start(batch, head, row), share * factor);
                }
            }
        }
    }

    /// A bias of minus infinity for all keys but one of each sequence, the one that [`Stress::OneKey`] leaves. Terms that keys
    /// share stay.
    pub fn mask_but_one_key(&mut self, problem: &Problem, seed: u64) {
        for index in 0..problem.batch {
            let keys = self.views().sequence(problem, index).key_length;
            let Some(bias) = self.bias.as_mut().filter(|bias| bias.strides.key != 0) else { return };
            for (head, row) in
                (0..problem.query_heads).flat_map(|head| (0..problem.query_length).map(move |row| (head, row)))
            {
                for key in (0..keys).filter(|&key| key != one_key(keys, seed)) {
                    bias.data[bias.strides.index(index, head, row, key)] = f32::NEG_INFINITY;
                }
            }
        }
    }

    fn filled(problem: &Problem, seed: u64, fills: Fills<'_>) -> Self {
        Self::filled_by(problem, seed, SequenceLengths::Ragged, fills)
    }

    fn filled_by(problem: &Problem, seed: u64, lengths: SequenceLengths, fills: Fills<'_>) -> Self {
        assert_eq!(problem.validate(), Ok(()), "inputs are made for valid problems");
        let (strides, types) = (problem.strides(), problem.dtypes());
        let [query, key, value] = fills;
        let mut inputs = Self::new(
            fill(types.query, problem.query_shape(), strides.query, query),
            fill(types.key_value, problem.key_shape(), strides.key, key),
            fill(types.key_value, problem.value_shape(), strides.value, value),
        );
        inputs.fill_vectors(problem, seed);
        lengths.set(problem, &mut inputs, &mut SplitMix64::stream(seed, LENGTHS_STREAM));
        if problem.is_ragged() {
            inputs.reconcile_sequences(problem);
        }
        inputs.bias = problem.bias.then(|| random_bias(problem, seed));
        inputs.fill_scales(problem, seed);
        inputs
    }
}

/// A normal number in a third, and else 0 or a subnormal number of the type, of either sign.
fn tiny(dtype: DType, random: &mut SplitMix64) -> f64 {
    let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
    match random.below(3) {
        0 => random.normal(),
        1 => 0.0 * sign,
        _ => sign * random.uniform() * dtype.smallest_normal(),
    }
}

/// Entries of a page table that no sequence may look at.
const GARBAGE: [i32; 4] = [i32::MAX, -1, i32::MIN, 2_147_480_000];

impl Inputs {
    /// Makes lengths, offsets and tables agree, and poisons what no sequence uses: rows of query, key and value, and
    /// entries of the page table.
    pub(crate) fn reconcile_sequences(&mut self, problem: &Problem) {
        let difference = |offsets: &Option<Vec<u32>>, index: usize, otherwise: usize| match offsets {
            Some(offsets) => offsets[index + 1] - offsets[index],
            None => otherwise as u32,
        };
        for index in 0..problem.batch {
            let queries = difference(&self.cu_seqlens_q, index, problem.query_length);
            let keys = difference(&self.cu_seqlens_k, index, problem.key_length);
            if let Some(used) = &mut self.seqused_q {
                used[index] = used[index].min(queries);
            }
            let keys = match &mut self.seqused_k {
                Some(used) => {
                    used[index] = used[index].min(keys);
                    used[index]
                }
                None => keys,
            };
            if let Some(pad) = &mut self.leftpad_k {
                pad[index] = pad[index].min(keys);
            }
        }
        let (query_shape, key_shape) = (problem.query_shape(), problem.key_shape());
        let mut used_queries = vec![false; query_shape.batch * query_shape.rows];
        let mut used_rows = vec![false; key_shape.batch * key_shape.rows];
        let mut used_entries = vec![false; problem.table_entries()];
        for sequence in self.views().sequences(problem) {
            for row in 0..sequence.query_length {
                let (batch, row) = sequence.query_row(row);
                used_queries[batch * query_shape.rows + row] = true;
            }
            for key in 0..sequence.key_length {
                let (batch, row) = sequence.key_row(key);
                used_rows[batch * key_shape.rows + row] = true;
            }
            let Some(paged) = problem.paged else { continue };
            let row = self.kv_batch_idx.as_ref().map_or(sequence.index, |batches| batches[sequence.index] as usize);
            let pad = self.leftpad_k.as_ref().map_or(0, |pad| pad[sequence.index] as usize);
            let entries = (pad + sequence.key_length).div_ceil(paged.page_size);
            used_entries[row * paged.table_stride..][..entries].fill(true);
        }
        for (index, entry) in
            self.page_table.iter_mut().flatten().enumerate().filter(|&(index, _)| !used_entries[index])
        {
            *entry = GARBAGE[index % GARBAGE.len()];
        }
        let strides = problem.strides();
        let tensors = [
            (&mut self.query, query_shape, strides.query, &used_queries),
            (&mut self.key, key_shape, strides.key, &used_rows),
            (&mut self.value, problem.value_shape(), strides.value, &used_rows),
        ];
        for (tensor, shape, strides, used) in tensors {
            let unused = shape.each_row().filter(|&(batch, _, row)| !used[batch * shape.rows + row]);
            for (batch, head, row) in unused {
                let start = strides.row_start(batch, head, row);
                (start..start + shape.columns).for_each(|index| tensor.set(index, f64::NAN));
            }
        }
    }
}

/// Numbers in every row of a tensor, poison between rows.
pub(crate) fn fill(
    dtype: DType,
    shape: Shape,
    strides: Strides,
    value_at: &mut dyn FnMut(usize, usize) -> f64,
) -> Tensor {
    let mut tensor = Tensor::poisoned(dtype, strides.extent(shape).unwrap_or(0));
    for (batch, head, row) in shape.each_row() {
        let start = strides.row_start(batch, head, row);
        for column in 0..shape.columns {
            tensor.set(start + column, value_at(row, column));
        }
    }
    tensor
}

/// One bias for all batches: `[query head, query row, key]`.
fn random_bias(problem: &Problem, seed: u64) -> Bias {
    let mut random = SplitMix64::stream(seed, BIAS);
    let strides =
        BiasStrides { batch: 0, head: problem.query_length * problem.key_length, row: problem.key_length, key: 1 };
    let data = (0..problem.query_heads * strides.head).map(|_| random.normal() as f32).collect();
    Bias { data, strides }
}

// One function for each row of the table of operands: problem, elements, and the stream of that operand.

/// Offsets of sequences of random lengths up to `longest`, several of them empty, `total` rows at most in all.
fn offsets(total: Option<usize>, longest: usize, entries: usize, random: &mut SplitMix64) -> Vec<u32> {
    let total = total.unwrap_or(0);
    let mut end = 0;
    let mut next = |index: usize| {
        let length = match (index, random.below(6)) {
            (0, _) => longest,
            (_, 0) => 0,
            _ => random.below(longest + 1),
        };
        end = (end + length).min(total);
        end as u32
    };
    std::iter::once(0).chain((1..entries).map(|index| next(index - 1))).collect()
}

pub(crate) fn cu_seqlens_q(problem: &Problem, entries: usize, random: &mut SplitMix64) -> Value {
    offsets(problem.total_q, problem.query_length, entries, random).into()
}

pub(crate) fn cu_seqlens_k(problem: &Problem, entries: usize, random: &mut SplitMix64) -> Value {
    offsets(problem.total_k, problem.key_length, entries, random).into()
}

/// Ragged query lengths, some 0.
pub(crate) fn seqused_q(problem: &Problem, batches: usize, random: &mut SplitMix64) -> Value {
    (0..batches).map(|_| random.below(problem.query_length + 1) as u32).collect::<Vec<u32>>().into()
}

/// A few keys of padding, none in some sequences.
pub(crate) fn leftpad_k(problem: &Problem, batches: usize, random: &mut SplitMix64) -> Value {
    let most = (problem.key_length / 2).min(100);
    (0..batches)
        .map(|batch| if batch % 4 == 3 { 0 } else { random.below(most + 1) as u32 })
        .collect::<Vec<u32>>()
        .into()
}

/// Any batches of the cache, some twice.
pub(crate) fn kv_batch_idx(problem: &Problem, batches: usize, random: &mut SplitMix64) -> Value {
    (0..batches).map(|_| random.below(problem.cache_batches()) as u32).collect::<Vec<u32>>().into()
}

/// Pages in random order, shared between sequences where the cache has too few.
pub(crate) fn page_table(problem: &Problem, entries: usize, random: &mut SplitMix64) -> Vec<i32> {
    let num_pages = problem.paged.map_or(0, |paged| paged.num_pages);
    let mut pages: Vec<i32> = (0..num_pages as i32).collect();
    for last in (1..num_pages).rev() {
        pages.swap(last, random.below(last + 1));
    }
    (0..entries).map(|entry| if num_pages == 0 { 0 } else { pages[entry % num_pages] }).collect()
}

/// Ragged `seqused_k`: the first full and, from three batches on, the second 0.
pub(crate) fn seqused_k(problem: &Problem, batches: usize, random: &mut SplitMix64) -> Value {
    let length = |batch: usize| {
        let ragged = (1 + random.below(problem.key_length)).min(problem.key_length);
        match batch {
            0 => problem.key_length as u32,
            1 if batches >= 3 => 0,
            _ => ragged as u32,
        }
    };
    (0..batches).map(length).collect::<Vec<u32>>().into()
}

/// `2^(-8 (head + 1) / heads)`.
pub(crate) fn alibi_slopes(_: &Problem, heads: usize, _: &mut SplitMix64) -> Value {
    (0..heads).map(|head| (-8.0 * (head + 1) as f64 / heads as f64).exp2() as f32).collect::<Vec<f32>>().into()
}

/// Uniform in (-3, 3).
pub(crate) fn per_head(_: &Problem, heads: usize, random: &mut SplitMix64) -> Value {
    (0..heads).map(|_| (random.uniform() * 6.0 - 3.0) as f32).collect::<Vec<f32>>().into()
}

/// Normal numbers.
pub(crate) fn aux_f32(_: &Problem, entries: usize, random: &mut SplitMix64) -> Value {
    (0..entries).map(|_| random.normal() as f32).collect::<Vec<f32>>().into()
}

/// Counted runs of random length, like documents in a sequence: longer ones in long tables, so that there are a few.
pub(crate) fn aux_i32(_: &Problem, entries: usize, random: &mut SplitMix64) -> Value {
    let longest_run = (entries / 4).max(150);
    let (mut run, mut left) = (0, 1 + random.below(longest_run));
    let mut next = || {
        if left == 0 {
            (run, left) = (run + 1, 1 + random.below(longest_run));
        }
        left -= 1;
        run
    };
    (0..entries).map(|_| next()).collect::<Vec<i32>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    /// The published outputs of `SplitMix64` for seed 1234567.
    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64::new(1_234_567);
        let outputs = [(); 3].map(|()| random.next_u64());
        assert_eq!(outputs, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn normal_numbers_have_the_moments_of_a_normal() {
        let mut random = SplitMix64::stream(5, 0);
        let count = 100_000;
        let values: Vec<f64> = (0..count).map(|_| random.normal()).collect();
        let moment = |power: i32| values.iter().map(|value| value.powi(power)).sum::<f64>() / f64::from(count);
        // Five standard errors: sqrt(1, 2, 96) / sqrt(count).
        assert!(moment(1).abs() < 0.016, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.023, "variance {}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.16, "fourth moment {}", moment(4));
    }

    #[test]
    fn operands_are_independent() {
        let problem = Problem::new(1, 1, 64, 64, DType::F64);
        let inputs = Inputs::random(&problem, 9);
        let correlation = |left: &Tensor, right: &Tensor| {
            (0..left.len()).map(|index| left.get(index) * right.get(index)).sum::<f64>() / left.len() as f64
        };
        assert!(correlation(&inputs.query, &inputs.key).abs() < 0.08);
        assert!(correlation(&inputs.query, &inputs.value).abs() < 0.08);
        assert!(correlation(&inputs.key, &inputs.value).abs() < 0.08);
        assert_ne!(inputs, Inputs::random(&problem, 10), "another seed gives other inputs");
        assert_eq!(inputs, Inputs::random(&problem, 9), "the same seed gives the same inputs");
    }

    #[test]
    fn gaps_between_rows_are_poison() {
        let mut problem = Problem::new(1, 2, 3, 4, DType::Bf16);
        problem.layout = Layout::PackedQkv;
        let inputs = Inputs::random(&problem, 1);
        let poisoned: Vec<usize> = (0..inputs.query.len()).filter(|&index| inputs.query.is_poisoned(index)).collect();
        let gaps: Vec<usize> = (8..24).chain(32..48).collect();
        assert_eq!(poisoned, gaps);
    }

    #[test]
    fn optional_inputs_follow_their_definitions() {
        let mut problem = Problem::new(4, 4, 5, 8, DType::F16);
        problem.alibi = true;
        problem.sinks = true;
        problem.seqused_k = true;
        let inputs = Inputs::random(&problem, 2);
        assert_eq!(inputs.alibi_slopes, Some(vec![0.25, 0.0625, 0.015_625, 0.003_906_25]));
        assert!(inputs.sinks.iter().flatten().all(|sink| sink.abs() < 3.0));
        let lengths = inputs.seqused_k.unwrap_or_default();
        assert_eq!(lengths[..2], [5, 0]);
        assert!(lengths[2..].iter().all(|&length| (1..=5).contains(&length)), "{lengths:?}");
    }
}
