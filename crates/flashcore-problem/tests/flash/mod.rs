//! Tiled attention as a kernel computes it, with a place for each mistake a kernel can make.
//!
//! It stands in for a backend when the gate is tested: without a mistake it must pass, with one it must not.

use flashcore_problem::{DType, Inputs, Outputs, Problem};

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// None: a correct kernel.
    None,
    /// The output is 5% too large.
    OutputScaled,
    /// One element in the middle is zero, as after a lost race.
    ElementZeroed,
    /// The last key tile is not visited.
    LastTileDropped,
    /// The keys of the ragged tail are not masked: the first keys are attended again in their place.
    TailNotMasked,
    /// Key and value are exchanged.
    KeyValueSwapped,
    /// Weights keep three mantissa bits, as in fp8 e4m3.
    WeightsInFp8,
    /// The sum of the weights misses the first tile.
    NormaliserMissesTile,
    /// The sum is not rescaled when the maximum grows.
    SumNotRescaled,
    /// The output is not rescaled when the maximum grows.
    OutputNotRescaled,
    /// Each row attends the keys of its neighbour.
    MaskShifted,
    /// The scale is `1 / head_dim`.
    ScaleNotRooted,
    /// `exp` of a score that was scaled for `exp2`.
    ExponentBase,
    /// Query heads read the key heads in turn instead of in groups.
    KeyHeadsInterleaved,
    /// The log-sum-exp is in base 2.
    LseInBase2,
    /// Two neighbouring columns are exchanged.
    ColumnsExchanged,
    /// Weights are truncated to the bits of the type instead of rounded.
    WeightsCut,
    /// The output is truncated to the bits of the type instead of rounded.
    OutputCut,
    /// The log-sum-exp is 3e-5 too large.
    LseShifted,
}

impl Mistake {
    /// Every mistake.
    pub(crate) const ALL: [Self; 18] = [
        Self::OutputScaled,
        Self::ElementZeroed,
        Self::LastTileDropped,
        Self::TailNotMasked,
        Self::KeyValueSwapped,
        Self::WeightsInFp8,
        Self::NormaliserMissesTile,
        Self::SumNotRescaled,
        Self::OutputNotRescaled,
        Self::MaskShifted,
        Self::ScaleNotRooted,
        Self::ExponentBase,
        Self::KeyHeadsInterleaved,
        Self::LseInBase2,
        Self::ColumnsExchanged,
        Self::WeightsCut,
        Self::OutputCut,
        Self::LseShifted,
    ];
}

struct Row {
    maximum: f32,
    sum: f32,
    output: Vec<f32>,
}

/// Attention in tiles of `tile` keys. Knows masks, grouped heads and nothing else.
pub(crate) fn flash(problem: &Problem, inputs: &Inputs, tile: usize, mistake: Mistake) -> Outputs {
    let strides = problem.strides();
    let narrow = |values: Vec<f64>| values.into_iter().map(|value| value as f32).collect::<Vec<f32>>();
    let query = narrow(inputs.query.dense(problem.query_shape(), strides.query));
    let mut key = narrow(inputs.key.dense(problem.key_shape(), strides.key));
    let mut value = narrow(inputs.value.dense(problem.value_shape(), strides.value));
    if mistake == Mistake::KeyValueSwapped {
        std::mem::swap(&mut key, &mut value);
    }

    let mut outputs = Outputs::poisoned(problem);
    let (head_dim, value_dim, key_length) = (problem.head_dim, problem.value_dim, problem.key_length);
    let tiles = key_length.div_ceil(tile) - usize::from(mistake == Mistake::LastTileDropped);
    for (index, (batch, head, row)) in problem.output_shape().each_row().enumerate() {
        let key_head = match mistake {
            Mistake::KeyHeadsInterleaved => head % problem.key_heads,
            _ => problem.key_head(head),
        };
        let first_key_row = (batch * problem.key_heads + key_head) * key_length;
        let query = &query[index * head_dim..(index + 1) * head_dim];
        let mut state = Row { maximum: f32::NEG_INFINITY, sum: 0.0, output: vec![0.0; value_dim] };
        for tile_index in 0..tiles {
            let key_tile = tile_index * tile..(tile_index + 1) * tile;
            let scores: Vec<f32> = key_tile
                .clone()
                .map(|j| {
                    let key = &key[(first_key_row + j % key_length) * head_dim..][..head_dim];
                    let dot = query.iter().zip(key).map(|(query, key)| query * key).sum();
                    score(problem, row, j, dot, mistake)
                })
                .collect();
            let values =
                |j: usize| &value[(first_key_row + (key_tile.start + j) % key_length) * value_dim..][..value_dim];
            update(problem, &mut state, &scores, values, tile_index, mistake);
        }
        finish(problem, &mut outputs, &state, (batch, head, row), index, mistake);
    }
    outputs
}

/// The score times `log2(e)`.
fn score(problem: &Problem, row: usize, j: usize, dot: f32, mistake: Mistake) -> f32 {
    let row = if mistake == Mistake::MaskShifted { row + 1 } else { row };
    let tail = mistake == Mistake::TailNotMasked && j >= problem.key_length;
    if !tail && !problem.attends(problem.key_length, row, j) {
        return f32::NEG_INFINITY;
    }
    let scale = match mistake {
        Mistake::ScaleNotRooted => 1.0 / problem.head_dim as f32,
        Mistake::ExponentBase => problem.scale as f32,
        _ => problem.scale as f32 * std::f32::consts::LOG2_E,
    };
    dot * scale
}

fn update<'a>(
    problem: &Problem,
    state: &mut Row,
    scores: &[f32],
    values: impl Fn(usize) -> &'a [f32],
    tile_index: usize,
    mistake: Mistake,
) {
    let maximum = scores.iter().copied().fold(state.maximum, f32::max);
    if maximum == f32::NEG_INFINITY {
        return;
    }
    let rescale = (state.maximum - maximum).exp2();
    state.maximum = maximum;
    if mistake != Mistake::SumNotRescaled {
        state.sum *= rescale;
    }
    if mistake != Mistake::OutputNotRescaled {
        state.output.iter_mut().for_each(|element| *element *= rescale);
    }
    for (j, score) in scores.iter().enumerate() {
        let weight = (score - maximum).exp2();
        if mistake != Mistake::NormaliserMissesTile || tile_index != 0 {
            state.sum += weight;
        }
        let weight = match mistake {
            Mistake::WeightsInFp8 => f32::from_bits((weight.to_bits() + (1 << 19)) & !((1 << 20) - 1)),
            Mistake::WeightsCut => cut(problem.dtype, weight),
            // 256 is 1: weights from 2^-17 to 1 are numbers of 8 bits then.
            _ if problem.dtype.is_float8() => (problem.dtype.round(f64::from(weight) * 256.0) / 256.0) as f32,
            _ => problem.dtype.round(f64::from(weight)) as f32,
        };
        for (element, value) in state.output.iter_mut().zip(values(j)) {
            *element += weight * value;
        }
    }
}

fn finish(
    problem: &Problem,
    outputs: &mut Outputs,
    state: &Row,
    (batch, head, row): (usize, usize, usize),
    index: usize,
    mistake: Mistake,
) {
    let reciprocal = if state.sum == 0.0 { 0.0 } else { 1.0 / state.sum };
    let start = problem.strides().output.row_start(batch, head, row);
    for (column, element) in state.output.iter().enumerate() {
        let column = if mistake == Mistake::ColumnsExchanged { column ^ 1 } else { column };
        let element = match mistake {
            Mistake::OutputScaled => element * reciprocal * 1.05,
            Mistake::ElementZeroed if row == problem.query_length / 2 && column == 3 => 0.0,
            Mistake::OutputCut => cut(problem.dtypes().output, element * reciprocal),
            _ => element * reciprocal,
        };
        outputs.output.set(start + column, f64::from(element));
    }
    if let Some(lse) = &mut outputs.lse {
        let base_2 = state.maximum + state.sum.log2();
        lse[index] = match mistake {
            Mistake::LseInBase2 => base_2,
            Mistake::LseShifted => base_2 * std::f32::consts::LN_2 + 3e-5,
            _ => base_2 * std::f32::consts::LN_2,
        };
    }
}

/// The leading bits of a normal number, as many as the type has.
fn cut(dtype: DType, value: f32) -> f32 {
    let lost = match dtype {
        DType::F16 => 13,
        DType::Bf16 => 16,
        DType::F32 | DType::F64 => 0,
        DType::E4m3 => 20,
        DType::E5m2 => 21,
    };
    f32::from_bits(value.to_bits() >> lost << lost)
}
