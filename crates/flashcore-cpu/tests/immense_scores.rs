//! Scores so large that rounding one of them is more than an exponent can be: rows still are weighted means.

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{DType, Inputs, Outputs, Problem, Tensor};

/// Sixty-four numbers from 0 to 1, in some order, exact in every type.
fn part(index: usize) -> f64 {
    (index * 37 % 64) as f64 / 64.0
}

/// Queries from 1 to 2, keys from 1/2 to 1, of one sign or the other, a scale of `2^power`, and values of 1: every output is
/// 1, and every log-sum-exp the largest score, as far as either is rounded. Another head may have a NaN among its keys.
fn check(level: Level, dtype: DType, [rows, keys]: [usize; 2], power: i32, sign: f64, has_nan: bool) {
    let mut problem = Problem::new(1, 2, rows, 8, dtype);
    (problem.key_length, problem.scale, problem.lse) = (keys, f64::from(power).exp2(), true);
    let column = |rows: usize, number: &dyn Fn(usize) -> f64| {
        let element = |index: usize| if index.is_multiple_of(8) { number(index / 8) } else { 0.0 };
        Tensor::from_values(dtype, &(0..2 * rows * 8).map(|index| element(index % (rows * 8))).collect::<Vec<_>>())
    };
    let mut inputs = Inputs::random(&problem, 5);
    inputs.query = column(rows, &|row| 1.0 + part(row));
    inputs.key = column(keys, &|key| sign * (0.5 + part(key) / 2.0));
    if has_nan {
        inputs.key.set(keys * 8, f64::NAN);
    }
    inputs.value = Tensor::from_values(dtype, &vec![1.0; 2 * keys * 8]);
    let mut outputs = Outputs::poisoned(&problem);
    attend_with(level, &problem, &inputs, &mut outputs).unwrap();

    let scores = (0..keys).map(|key| sign * (0.5 + part(key) / 2.0));
    let largest = scores.fold(f64::NEG_INFINITY, f64::max) * problem.scale;
    let what = format!("{level} {dtype}, {rows} rows, {keys} keys, 2^{power}, sign {sign}, NaN {has_nan}");
    for (row, &found) in outputs.lse.as_deref().unwrap()[..rows].iter().enumerate() {
        let expected = largest * (1.0 + part(row));
        let most = expected.abs() * 1e-6 + (keys as f64).ln() + 1e-5;
        assert!((f64::from(found) - expected).abs() <= most, "{what}, row {row}: {found}, not {expected}");
    }
    for index in 0..rows * 8 {
        let found = outputs.output.get(index);
        assert!((found - 1.0).abs() <= 2.0 * dtype.unit_roundoff().max(1e-6), "{what}, element {index}: {found}");
    }
}

#[test]
fn rows_are_weighted_means() {
    for level in Level::available() {
        for dtype in DType::ALL {
            for sizes in [[1, 40], [40, 40], [64, 300], [33, 520]] {
                for power in [0, 20, 25, 27, 30, 31, 32, 36, 60, 100] {
                    for (sign, has_nan) in [(1.0, false), (-1.0, false), (1.0, true), (-1.0, true)] {
                        check(level, dtype, sizes, power, sign, has_nan);
                    }
                }
            }
        }
    }
}
