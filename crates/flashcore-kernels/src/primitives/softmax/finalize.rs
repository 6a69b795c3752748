//! End of the softmax: sums over the row, attention sinks, and the division by the row sum.

use flashcore_ir::types::F32;
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::{LseBase, LseForm};

use super::lse::lse_log2;
use super::online::{OnlineSoftmax, reduce_row};
use crate::primitives::Accumulator;

/// Row max, in base 2, and row sum of each of a lane's rows, over all columns.
#[derive(Debug, Clone)]
pub struct RowStats {
    pub(crate) row_max: Vec<Reg<F32>>,
    pub(crate) row_sum: Vec<Reg<F32>>,
}

impl RowStats {
    /// The log-sum-exp of each row; minus infinity for an empty one.
    pub fn lse(&self, k: &mut Builder, base: LseBase) -> Vec<Reg<F32>> {
        self.row_max.iter().zip(&self.row_sum).map(|(row_max, row_sum)| lse_log2(k, *row_max, *row_sum, base)).collect()
    }
}

/// Rows whose output is divided by their sums.
#[derive(Debug, Clone)]
pub struct FinishedRows {
    /// With the sink.
    stats: RowStats,
    /// The log-sum-exp without the sink, where that is wanted: afterwards the sums include it.
    lse_of_keys: Option<Vec<Reg<F32>>>,
    base: LseBase,
}

impl FinishedRows {
    /// The log-sum-exp of each row in the form that is wanted; minus infinity for an empty one.
    pub fn lse(&self, k: &mut Builder) -> Vec<Reg<F32>> {
        self.lse_of_keys.clone().unwrap_or_else(|| self.stats.lse(k, self.base))
    }
}

impl OnlineSoftmax {
    /// Sums over the lanes of each row, and returns the statistics of the keys so far.
    pub fn row_stats(&self, k: &mut Builder) -> RowStats {
        for sum in &self.row_sum {
            reduce_row(k, *sum, |k, sum, other| k.add_to(sum, other));
        }
        let rows = self.row_max.iter().enumerate();
        let row_max = rows.map(|(row, row_max)| self.scaled(k, row, *row_max)).collect();
        RowStats { row_max, row_sum: self.row_sum.clone() }
    }

    /// Divides `output` by the row sums. A sink, in base 2, is one more score that has no value.
    pub fn finish(&self, k: &mut Builder, output: &Accumulator, sink: Option<Reg<F32>>, form: LseForm) -> FinishedRows {
        let stats = self.row_stats(k);
        let lse_of_keys = (!form.includes_sink).then(|| stats.lse(k, form.base));
        let RowStats { row_max, .. } = stats;
        let (row_max, factors) = match sink {
            None => (row_max, None),
            Some(sink) => {
                let rows = row_max.iter().zip(&self.row_sum).map(|(row_max, sum)| add_sink(k, *row_max, *sum, sink));
                let (row_max, factors) = rows.unzip::<_, _, Vec<_>, Vec<_>>();
                (row_max, Some(factors))
            }
        };
        let rows = self.row_sum.iter().enumerate();
        let inverse: Vec<_> =
            rows.map(|(row, sum)| inverse_row_sum(k, *sum, factors.as_ref().map(|factors| factors[row]))).collect();
        output.scale_rows(k, &inverse);
        FinishedRows { stats: RowStats { row_max, row_sum: self.row_sum.clone() }, lse_of_keys, base: form.base }
    }
}

/// Adds a sink, in base 2 like the row max, to the sum of a row; returns the new row max and the factor of the output.
pub fn add_sink(k: &mut Builder, row_max: Reg<F32>, row_sum: Reg<F32>, sink: Reg<F32>) -> (Reg<F32>, Reg<F32>) {
    k.section("sink", |k| {
        let new_max = k.max(row_max, sink);
        // Where both are minus infinity, the difference would be a NaN.
        let none = k.compare(Compare::Eq, new_max, f32::NEG_INFINITY);
        let finite = k.select(none, 0.0f32, new_max);
        let lost = k.sub(row_max, finite);
        let factor = k.exp2(lost);
        let exponent = k.sub(sink, finite);
        let weight = k.exp2(exponent);
        k.scale_add_to(row_sum, factor, weight);
        (new_max, factor)
    })
}

/// One over a row sum, times the factor that a sink brought; zero for an empty row.
fn inverse_row_sum(k: &mut Builder, row_sum: Reg<F32>, factor: Option<Reg<F32>>) -> Reg<F32> {
    let empty = k.compare(Compare::Eq, row_sum, 0.0f32);
    let inverse = k.reciprocal(row_sum);
    let inverse = k.select(empty, 0.0f32, inverse);
    match factor {
        Some(factor) => k.mul(inverse, factor),
        None => inverse,
    }
}

/// Ends the softmax of one row: adds the sink, if there is one; returns the row max and what the output is multiplied by.
pub(crate) fn normalize_row(
    k: &mut Builder,
    row_max: Reg<F32>,
    row_sum: Reg<F32>,
    sink: Option<Reg<F32>>,
) -> (Reg<F32>, Reg<F32>) {
    let (row_max, factor) = match sink {
        Some(sink) => {
            let (row_max, factor) = add_sink(k, row_max, row_sum, sink);
            (row_max, Some(factor))
        }
        None => (row_max, None),
    };
    (row_max, inverse_row_sum(k, row_sum, factor))
}
