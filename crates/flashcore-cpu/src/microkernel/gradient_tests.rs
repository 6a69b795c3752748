//! Gradients of attention by the products of its forward pass, whose operands have no roles, against plain loops in `f64`.

use crate::microkernel::prefetch::PrefetchPlan;
use crate::microkernel::tests::{dense, head, with_every_kernel};
use crate::microkernel::{AccumulateArgs, LaneRows, Lse, MultiplyArgs, Operands, Products, Softmax, padded};
use flashcore_problem::{DType, Shape, Tensor};

/// A tensor of numbers between -1 and 1, in no order.
fn scattered(rows: usize, columns: usize, seed: usize) -> (Tensor, Shape) {
    let number = |index: usize| ((index * 7919 + seed * 613) % 1009) as f64 / 504.5 - 1.0;
    let values: Vec<f64> = (0..rows * columns).map(number).collect();
    (Tensor::from_values(DType::Bf16, &values), Shape { batch: 1, heads: 1, rows, columns })
}

/// `product[row][lane]`, packed and multiplied by a kernel.
fn multiplied<K: Products<Real = f32>>(kernel: &K, left: &(Tensor, Shape), right: &(Tensor, Shape)) -> Vec<f32> {
    let (rows, depth, lanes) = (left.1.rows, left.1.columns, padded(right.1.rows, K::LANE_BLOCK));
    let mut packed_left = vec![K::Packed::default(); K::left_size(depth, rows)];
    let mut packed_right = vec![K::Packed::default(); K::right_size(depth)];
    kernel.pack_left(head(left), 0..rows, &mut packed_left);
    kernel.pack_right(head(right), 0..right.1.rows, lanes, &mut packed_right);
    let mut product = vec![9.0; padded(rows, K::ROW_BLOCK) * lanes];
    kernel.multiply(MultiplyArgs {
        operands: &Operands { depth, rows: 0..rows, left: &packed_left, right: &packed_right },
        lanes,
        lane_rows: LaneRows::new(|_| rows),
        factor: 1.0,
        product: &mut product,
    });
    product.truncate(rows * lanes);
    product
}

/// `left^T weights` as rows of lanes, packed and accumulated by a kernel.
fn accumulated<K: Products<Real = f32>>(kernel: &K, left: &(Tensor, Shape), weights: &[f32]) -> Vec<f32> {
    let (rows, columns, lanes) = (left.1.rows, left.1.columns, weights.len() / left.1.rows);
    let mut packed = vec![K::Packed::default(); K::transposed_size(columns, rows)];
    kernel.pack_transposed(head(left), 0..rows, &mut packed);
    let mut packed_weights = vec![K::Packed::default(); K::weight_size(rows)];
    kernel.pack_weights(weights, lanes, &mut packed_weights);
    let mut sums = vec![f32::NAN; padded(columns, K::COLUMN_BLOCK) * lanes];
    kernel.accumulate(AccumulateArgs {
        columns,
        lanes,
        rows: 0..rows,
        lane_rows: LaneRows::new(|_| rows),
        left: &packed,
        weights,
        packed_weights: &packed_weights,
        lane_scale: &vec![1.0; lanes],
        sums: &mut sums,
        is_first: true,
        prefetch: PrefetchPlan::NOTHING,
    });
    let mut as_rows = vec![0.0; columns * lanes];
    kernel.transpose(&sums[..columns * lanes], &vec![1.0; lanes], &mut as_rows);
    as_rows
}

/// The gradients of attention by the products of its forward pass: with keys as lanes those of key and value, with queries as
/// lanes that of the query.
#[test]
fn products_with_other_roles() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let (dim, factor) = (40, 0.3_f32);
        for (queries, keys) in [(13, K::PANEL_LANES - 3), (K::PANEL_LANES, 11), (5, 3)] {
            let [query, output_gradient] = [1, 2].map(|seed| scattered(queries, dim, seed));
            let [key, value] = [3, 4].map(|seed| scattered(keys, dim, seed));
            let [q, k, v, d_o] = [&query, &key, &value, &output_gradient].map(dense);
            let dot = |left: &[f64], row: usize, right: &[f64], other: usize| -> f64 {
                (0..dim).map(|at| left[row * dim + at] * right[other * dim + at]).sum()
            };
            let score = |row: usize, key: usize| f64::from(factor) * dot(&q, row, &k, key);
            let lse: Vec<f64> =
                (0..queries).map(|row| (0..keys).map(|key| score(row, key).exp2()).sum::<f64>().log2()).collect();
            let weight = |row: usize, key: usize| (score(row, key) - lse[row]).exp2();
            let delta: Vec<f64> =
                (0..queries).map(|row| (0..keys).map(|key| weight(row, key) * dot(&d_o, row, &v, key)).sum()).collect();
            let score_gradient = |row: usize, key: usize| weight(row, key) * (dot(&d_o, row, &v, key) - delta[row]);
            let is_close = |actual: f32, terms: &[f64]| {
                // A weight that is rounded to `bf16` is wrong by up to 2^-8.
                let unit = if K::weight_size(1) > 0 { 1.0 / 128.0 } else { 1e-5 };
                (f64::from(actual) - terms.iter().sum::<f64>()).abs()
                    <= unit * (1e-6 + terms.iter().map(|term| term.abs()).sum::<f64>())
            };

            // Keys are lanes, and each row has its log-sum-exp.
            let lanes = padded(keys, K::LANE_BLOCK);
            let of_rows: Vec<f32> = lse.iter().map(|&lse| lse as f32).collect();
            let mut weights = multiplied(kernel, &query, &key);
            kernel.exp2_minus_lse(&mut weights, lanes, factor, Lse::OfRows(&of_rows));
            let mut gradients = multiplied(kernel, &output_gradient, &value);
            for (index, gradient) in gradients.iter_mut().enumerate() {
                *gradient = weights[index] * (*gradient - delta[index / lanes] as f32);
            }
            let value_gradient = accumulated(kernel, &output_gradient, &weights);
            let key_gradient = accumulated(kernel, &query, &gradients);
            for (key, column) in (0..keys).flat_map(|key| (0..dim).map(move |column| (key, column))) {
                let of_queries = |term: &dyn Fn(usize) -> f64| (0..queries).map(term).collect::<Vec<_>>();
                let at = key * dim + column;
                let terms = of_queries(&|row| weight(row, key) * d_o[row * dim + column]);
                assert!(is_close(value_gradient[at], &terms), "{name} dV {key} {column}: {}", value_gradient[at]);
                let terms = of_queries(&|row| score_gradient(row, key) * q[row * dim + column]);
                assert!(is_close(key_gradient[at], &terms), "{name} dK {key} {column}: {}", key_gradient[at]);
            }

            // Queries are lanes, and each has its log-sum-exp.
            let lanes = padded(queries, K::LANE_BLOCK);
            let of_lanes: Vec<f32> = (0..lanes).map(|lane| lse.get(lane).map_or(0.0, |&lse| lse as f32)).collect();
            let mut weights = multiplied(kernel, &key, &query);
            kernel.exp2_minus_lse(&mut weights, lanes, factor, Lse::OfLanes(&of_lanes));
            let mut gradients = multiplied(kernel, &value, &output_gradient);
            for (index, gradient) in gradients.iter_mut().enumerate() {
                let delta = delta.get(index % lanes).map_or(0.0, |&delta| delta as f32);
                *gradient = weights[index] * (*gradient - delta);
            }
            let query_gradient = accumulated(kernel, &key, &gradients);
            for (row, column) in (0..queries).flat_map(|row| (0..dim).map(move |column| (row, column))) {
                let terms: Vec<f64> = (0..keys).map(|key| score_gradient(row, key) * k[key * dim + column]).collect();
                let actual = query_gradient[row * dim + column];
                assert!(is_close(actual, &terms), "{name} dQ {row} {column}: {actual}");
            }
        }
    }
    with_every_kernel!(check);
}

/// A log-sum-exp of minus infinity, where all scores are, gives no weights and no NaN.
#[test]
fn nothing_attended_has_no_weights() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        for lse in [Lse::OfRows(&[f32::NEG_INFINITY; 2]), Lse::OfLanes(&vec![f32::NEG_INFINITY; K::LANE_BLOCK])] {
            let mut scores = vec![f32::NEG_INFINITY; 2 * K::LANE_BLOCK];
            kernel.exp2_minus_lse(&mut scores, K::LANE_BLOCK, 0.5, lse);
            assert!(scores.iter().all(|&weight| weight == 0.0), "{name}: {scores:?}");
        }
    }
    with_every_kernel!(check);
}
