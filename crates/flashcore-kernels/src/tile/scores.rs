//! From products of query and key to scores in base 2.

use core::f32::consts::{LN_2, LOG2_E};

use flashcore_ir::types::{F32, S32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg};

use super::ROW_STEP;
use super::expression::ExpressionCode;
use super::fragment::Accumulator;

/// What is done with a product beyond scaling it: `softcap * tanh(product * scale / softcap) + slope * distance + bias`,
/// each term where there is one, and then by
/// an expression.
#[derive(Debug, Clone)]
pub struct ScoreTerms {
    /// `scale * log2(e)`; with a softcap, `2 * log2(e) * scale / softcap`.
    pub scale: Reg<F32>,
    /// What rounding took from the scale, where scores are to have all bits of an `f32`. Under a softcap, small ones are
    /// then computed in another way.
    pub scale_rest: Option<Reg<F32>>,
    /// `softcap * log2(e)`.
    pub softcap: Option<Reg<F32>>,
    /// Minus the slope of the head, times `log2(e)`.
    pub slope: Option<Reg<F32>>,
    /// The bias of the head.
    pub bias: Option<BiasTerms>,
    /// What becomes of scores after that.
    pub expression: Option<ExpressionCode>,
}

/// The bias of one head.
#[derive(Debug, Clone, Copy)]
pub struct BiasTerms {
    /// The address of row 0 and key 0.
    pub first: Reg<U64>,
    /// Bytes from one query row to the next.
    pub row_stride: Reg<U64>,
    /// Bytes from one key to the next.
    pub key_stride: Reg<U64>,
}

/// Where a lane's scores stand.
#[derive(Debug, Clone)]
pub struct ScorePlaces {
    /// The query row of each of the lane's rows, none past the last.
    pub rows: Vec<Reg<U32>>,
    /// The position of the first row among the keys; the others are [`ROW_STEP`] further on each.
    pub position: Reg<S32>,
    /// The lane's first column.
    pub column: Reg<S32>,
    /// The last key there is.
    pub last_key: Reg<S32>,
}

impl ScoreTerms {
    /// One score in base 2, before any expression. `distance` is that of the row's position from the key.
    pub fn score(
        &self,
        k: &mut Builder,
        product: Reg<F32>,
        distance: Option<Reg<F32>>,
        bias: Option<Reg<F32>>,
    ) -> Reg<F32> {
        let mut score = match self.scale_rest {
            Some(rest) => {
                let rest = k.mul(product, rest);
                k.fma(product, self.scale, rest)
            }
            None => k.mul(product, self.scale),
        };
        if let Some(softcap) = self.softcap {
            score = k.section("softcap", |k| {
                let tanh =
                    if self.scale_rest.is_some() { exact_tanh_of_half(k, score) } else { tanh_of_half(k, score) };
                k.mul(tanh, softcap)
            });
        }
        if let (Some(slope), Some(distance)) = (self.slope, distance) {
            let magnitude = k.abs(distance);
            score = k.fma(slope, magnitude, score);
        }
        if let Some(bias) = bias {
            score = k.fma(bias, LOG2_E, score);
        }
        score
    }

    /// Replaces the products of the tile that begins at `first_key` by scores.
    pub fn apply(&self, k: &mut Builder, scores: &Accumulator, places: &ScorePlaces, first_key: Reg<S32>) {
        let distance = self.slope.map(|_| {
            let first = k.add(first_key, places.column);
            let distance = k.sub(places.position, first);
            k.to_f32(distance)
        });
        let bias = self.bias.map(|bias| BiasOfTile::new(k, bias, places, first_key));
        let mut expression = self.expression.as_ref().map(|expression| {
            let key = k.add(first_key, places.column);
            expression.of_tile(key)
        });
        scores.each(|row, column, element| {
            let beyond = (row as u32 * ROW_STEP) as f32 - column as f32;
            let distance = distance.map(|distance| k.add(distance, beyond));
            let bias = bias.as_ref().map(|bias| bias.load(k, row, column));
            let mut score = self.score(k, element, distance, bias);
            if let Some(expression) = &mut expression {
                score = k.section("expression", |k| expression.score(k, row, column, score));
            }
            k.set(element, score);
        });
    }
}

/// `tanh(x / (2 * log2(e)))`, as `1 - 2 / (2^x + 1)`: the error of the approximate instruction for it, `2^-11`, is more
/// than a softcap can bear. This one is right to a few units in the last place of 1.
pub(super) fn tanh_of_half(k: &mut Builder, x: Reg<F32>) -> Reg<F32> {
    let power = k.exp2(x);
    let sum = k.add(power, 1.0f32);
    let inverse = k.reciprocal(sum);
    k.fma(inverse, -2.0f32, 1.0f32)
}

/// The same, right to a few units in the last place of the result: by a polynomial where the result is small.
pub(super) fn exact_tanh_of_half(k: &mut Builder, scaled: Reg<F32>) -> Reg<F32> {
    /// Up to here the polynomial is good to `7e-9`.
    const SMALL: f32 = 0.6;
    /// `(tanh(x) / x - 1) / x^2` in powers of `x^2`, the highest first: least squares at Chebyshev nodes.
    const COEFFICIENTS: [f32; 5] = [-0.005_893_945, 0.020_794_617, -0.053_783_294, 0.133_319_15, -0.333_333];
    let large = tanh_of_half(k, scaled);
    let x = k.mul(scaled, 0.5 * LN_2);
    let square = k.mul(x, x);
    let sum = k.copy(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        k.scale_add_to(sum, square, *coefficient);
    }
    let cube = k.mul(square, x);
    let small = k.fma(cube, sum, x);
    let magnitude = k.abs(x);
    let is_small = k.compare(Compare::Lt, magnitude, SMALL);
    k.select(is_small, small, large)
}

/// The bias of a lane's rows in one tile of keys. Keys and rows past the end read that of the last.
struct BiasOfTile {
    rows: Vec<Reg<U64>>,
    key_stride: Reg<U64>,
    first_key: Reg<S32>,
    last_key: Reg<S32>,
}

impl BiasOfTile {
    fn new(k: &mut Builder, bias: BiasTerms, places: &ScorePlaces, first_key: Reg<S32>) -> Self {
        let rows = places.rows.iter().map(|row| {
            let row = k.widen(*row);
            k.mad(row, bias.row_stride, bias.first)
        });
        let rows = rows.collect();
        let first_key = k.add(first_key, places.column);
        Self { rows, key_stride: bias.key_stride, first_key, last_key: places.last_key }
    }

    fn load(&self, k: &mut Builder, row: usize, column: u32) -> Reg<F32> {
        k.section("bias", |k| {
            let key = k.add(self.first_key, column as i32);
            let key = k.min(key, self.last_key);
            let key = k.reinterpret::<S32, U32>(key);
            let key = k.widen(key);
            let address = k.mad(key, self.key_stride, self.rows[row]);
            k.load_one::<F32>(GlobalAddress::from(address))
        })
    }
}
