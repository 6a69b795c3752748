//! The attention that anybody would write, in the precision of the problem: sums in `f32` (or `f64`) one after the other,
//! and for types of 16 bits the weights rounded to the type before they meet the values.

use super::case::Case;
use super::element::Element;
use super::reference::Place;
use super::tensors::Numbers;

/// Numbers as a type of sums rounds them: `f32` unless the problem is `f64`.
#[derive(Clone, Copy)]
struct Rounded(bool);

impl Rounded {
    fn of(self, value: f64) -> f64 {
        if self.0 { f64::from(value as f32) } else { value }
    }
}

/// The row, or `None` where it attends nothing.
///
/// An operation on two `f32` in `f64`, rounded to `f32`, is the operation in `f32`: 53 bits are more than twice 24 and two.
pub(crate) fn row(case: &Case, numbers: &Numbers, at: Place) -> Option<Vec<f64>> {
    let sum = Rounded(case.element != Element::F64);
    let key_head = at.head / (case.query_heads / case.key_heads);
    let start =
        |strides: [usize; 3], head: usize, row: usize| at.batch * strides[0] + head * strides[1] + row * strides[2];
    let query = &numbers.query[start(case.query_strides, at.head, at.row)..][..case.head_dim];
    let mut scores = Vec::new();
    for key in (0..case.key_length_of(at.batch)).filter(|&key| case.attends(at.batch, at.row, key)) {
        let keys = &numbers.key[start(case.key_strides, key_head, key)..][..case.head_dim];
        let mut product = 0.0;
        for (&q, &k) in query.iter().zip(keys) {
            product = sum.of(product + sum.of(q * k));
        }
        let mut score = sum.of(product * sum.of(case.scale));
        if let Some(softcap) = case.softcap.map(f64::from) {
            score = sum.of(softcap * sum.of(sum.of(score / softcap).tanh()));
        }
        if case.has_alibi {
            let distance = (case.position(at.batch, at.row) - key as i64).unsigned_abs() as f64;
            score = sum.of(score - sum.of(numbers.slopes[at.head] * distance));
        }
        if let Some(strides) = case.bias {
            let index = at.batch * strides[0] + at.head * strides[1] + at.row * strides[2] + key * strides[3];
            score = sum.of(score + numbers.bias[index]);
        }
        scores.push((key, score));
    }
    let sink = numbers.sinks.get(at.head).copied();
    let largest = scores.iter().map(|&(_, score)| score).chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if scores.iter().all(|&(_, score)| score == f64::NEG_INFINITY) {
        return None;
    }
    let weight = |score: f64| sum.of(sum.of(score - largest).exp());
    let mut total = sink.map_or(0.0, weight);
    for (_, score) in &mut scores {
        *score = weight(*score);
        total = sum.of(total + *score);
    }
    let is_narrow = matches!(case.element, Element::F16 | Element::Bf16);
    let mut output = vec![0.0; case.value_dim];
    for &(key, weight) in &scores {
        let share = sum.of(weight / total);
        let share = if is_narrow { case.element.round(share) } else { share };
        let values = &numbers.value[start(case.value_strides, key_head, key)..][..case.value_dim];
        for (output, &value) in output.iter_mut().zip(values) {
            *output = sum.of(*output + sum.of(share * value));
        }
    }
    for output in &mut output {
        *output = case.element.round(*output);
    }
    Some(output)
}
