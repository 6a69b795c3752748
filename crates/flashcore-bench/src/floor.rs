//! Lower bounds: FLOPs, bytes and exponentials of a problem, and the least time that a machine needs for them.

use core::fmt;

use std::collections::HashSet;

use flashcore_problem::{DType, DTypes, Inputs, Mask, Problem, Shape};
use serde::{Deserialize, Deserializer, Serialize};

/// The work of a problem that no implementation can avoid.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Floating-point operations: two products, each a multiplication and an addition. Masked keys do not count.
    pub flops: f64,
    /// Bytes: each input read once, each output written once.
    pub bytes: f64,
    /// Exponentials: one for each query and key that attends it.
    pub exponentials: f64,
}

impl Work {
    /// Work of a problem; zero under a mask expression, which may leave any number of keys.
    pub fn of(problem: &Problem) -> Self {
        // Products of sizes that nobody has allocated yet, so not in integers.
        let attended: f64 = match problem.mask {
            // The number of keys that a `mask_mod` keeps is not known before it has been evaluated for each.
            _ if problem.mask_mod.is_some() => 0.0,
            Mask::None => problem.query_length as f64 * problem.key_length as f64,
            Mask::Causal(_) | Mask::Window { .. } => {
                (0..problem.query_length).map(|row| problem.attended_keys(problem.key_length, row).len() as f64).sum()
            }
        };
        let heads = problem.batch as f64 * problem.query_heads as f64;
        let exponentials = heads * attended;
        let size = |shape: Shape| [shape.batch, shape.heads, shape.rows, shape.columns].map(|size| size as f64);
        let tensor_bytes = |shape: Shape, dtype: DType| size(shape).iter().product::<f64>() * dtype.size_bytes() as f64;
        let types = problem.dtypes();
        let bytes = tensor_bytes(problem.query_shape(), types.query)
            + tensor_bytes(problem.key_shape(), types.key_value)
            + tensor_bytes(problem.value_shape(), types.key_value)
            + tensor_bytes(problem.output_shape(), types.output);
        let lse = if problem.lse { 4.0 * heads * problem.query_length as f64 } else { 0.0 };
        Self {
            flops: 2.0 * exponentials * (problem.head_dim as f64 + problem.value_dim as f64),
            bytes: bytes + lse,
            exponentials,
        }
    }
}

impl Work {
    /// Work of a problem on its inputs: of the rows and keys that its sequences have. Keys that several sequences share are
    /// read once.
    pub fn of_inputs(problem: &Problem, inputs: &Inputs) -> Self {
        if !problem.is_ragged() && !problem.seqused_k || problem.mask_mod.is_some() {
            return Self::of(problem);
        }
        let (mut rows, mut attended) = (0.0, 0.0);
        let mut keys = HashSet::new();
        for sequence in inputs.views().sequences(problem) {
            let lengths = (0..sequence.query_length).map(|row| sequence.attended_keys(problem, row).len() as f64);
            attended += lengths.sum::<f64>();
            rows += sequence.query_length as f64;
            keys.extend(sequence.attended_range(problem).map(|key| sequence.key_row(key)));
        }
        let (query_heads, key_heads) = (problem.query_heads as f64, problem.key_heads as f64);
        let columns = problem.head_dim as f64 + problem.value_dim as f64;
        let types = problem.dtypes();
        let [query, key_value, output] = [types.query, types.key_value, types.output].map(|it| it.size_bytes() as f64);
        let of_rows = problem.head_dim as f64 * query + problem.value_dim as f64 * output;
        let bytes = query_heads * rows * of_rows + key_heads * keys.len() as f64 * columns * key_value;
        let lse = if problem.lse { 4.0 * query_heads * rows } else { 0.0 };
        Self { flops: 2.0 * query_heads * attended * columns, bytes: bytes + lse, exponentials: query_heads * attended }
    }
}

/// Peak rates of a machine, per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Floating-point operations of the units that multiply matrices.
    pub flops: f64,
    /// Bytes from and to memory; infinite where memory is not looked at.
    #[serde(deserialize_with = "infinite_if_null")]
    pub bytes: f64,
    /// Exponentials; infinite where they are not looked at.
    #[serde(deserialize_with = "infinite_if_null")]
    pub exponentials: f64,
}

impl Ceilings {
    /// The peak rates of a GPU for tensors of these types, from those for 16-bit ones: tensor cores multiply 8-bit floats at
    /// twice the rate. Keys and values of 8 bits under a wider query are multiplied as the query.
    #[must_use]
    pub fn of_types(self, types: DTypes) -> Self {
        Self { flops: if types.query.is_float8() { 2.0 * self.flops } else { self.flops }, ..self }
    }
}

/// JSON has no infinity; it is written as null.
fn infinite_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

/// The resource that bounds a problem on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Multiplying matrices.
    Arithmetic,
    /// Moving bytes.
    Memory,
    /// Exponentials.
    Exponentials,
}

impl fmt::Display for Bound {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Arithmetic => "arithmetic",
            Self::Memory => "memory",
            Self::Exponentials => "exponentials",
        })
    }
}

impl Ceilings {
    /// Seconds that the work takes at least, and what binds it.
    pub fn floor(&self, work: Work) -> (f64, Bound) {
        let times = [
            (work.flops / self.flops, Bound::Arithmetic),
            (work.bytes / self.bytes, Bound::Memory),
            (work.exponentials / self.exponentials, Bound::Exponentials),
        ];
        times
            .into_iter()
            .fold((0.0, Bound::Arithmetic), |largest, time| if time.0 > largest.0 { time } else { largest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{Alignment, PagedKv};

    #[test]
    fn queries_of_8_bits_are_multiplied_at_twice_the_rate() {
        let ceilings = Ceilings { flops: 10.0, bytes: 1.0, exponentials: 2.0 };
        let of = |types: &str| ceilings.of_types(types.parse().expect("types"));
        assert_eq!(of("bf16 kv e4m3"), ceilings);
        assert_eq!(of("e4m3 out bf16"), Ceilings { flops: 20.0, ..ceilings });
    }

    #[test]
    fn masked_keys_are_no_work() {
        let mut problem = Problem::new(1, 2, 4, 8, DType::F32);
        let expected = Work { flops: 4.0 * 2.0 * 16.0 * 8.0, bytes: 4.0 * 4.0 * 64.0, exponentials: 32.0 };
        assert_eq!(Work::of(&problem), expected);
        problem.mask = Mask::Causal(Alignment::BottomRight);
        assert_eq!(Work::of(&problem), Work { flops: 4.0 * 2.0 * 10.0 * 8.0, exponentials: 20.0, ..expected });
    }

    /// Two sequences of 2 rows that share one of the pages of 4 keys: 6 and 3 keys, of which 7 rows are read.
    #[test]
    fn sequences_are_counted_by_their_lengths() {
        let mut problem = Problem::new(2, 4, 3, 8, DType::F16);
        (problem.key_heads, problem.key_length, problem.lse) = (2, 8, true);
        (problem.seqused_q, problem.seqused_k) = (true, true);
        problem.paged = Some(PagedKv::new(4, 3, 2));
        let mut inputs = Inputs::random(&problem, 0);
        (inputs.seqused_q, inputs.seqused_k) = (Some(vec![2, 2]), Some(vec![6, 3]));
        inputs.page_table = Some(vec![2, 0, 0, -1]);
        let expected = Work {
            flops: 4.0 * 4.0 * (2.0 * 6.0 + 2.0 * 3.0) * 8.0,
            // Two rows of the page that is the second of one sequence are the first of the other.
            bytes: 2.0 * 16.0 * (4.0 * 4.0 + 2.0 * 7.0) + 4.0 * 4.0 * 4.0,
            exponentials: 4.0 * (2.0 * 6.0 + 2.0 * 3.0),
        };
        assert_eq!(Work::of_inputs(&problem, &inputs), expected);
        let plain = Problem::new(2, 4, 3, 8, DType::F16);
        assert_eq!(Work::of_inputs(&plain, &Inputs::random(&plain, 0)), Work::of(&plain));
    }

    #[test]
    fn the_floor_is_the_largest_of_three_times() {
        let work = Work { flops: 100.0, bytes: 10.0, exponentials: 1.0 };
        let check = |flops, bytes, exponentials, expected| {
            assert_eq!(Ceilings { flops, bytes, exponentials }.floor(work), expected);
        };
        check(10.0, 10.0, 10.0, (10.0, Bound::Arithmetic));
        check(100.0, 2.0, 10.0, (5.0, Bound::Memory));
        check(100.0, f64::INFINITY, 0.25, (4.0, Bound::Exponentials));
    }
}
