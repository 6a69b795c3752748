//! Random cases through the C ABI, judged by a reference that shares nothing with the library.
//!
//! Every tensor lies against a page that cannot be touched, inputs cannot be written while the library runs, and what
//! nobody may look at holds poison. Each case runs twice, with different poison and different bytes in the outputs, and
//! must give the same bits. Then each row is held against [`reference`], and all of them together against the errors of
//! [`same_precision`].

pub(crate) mod calls;
pub(crate) mod case;
pub(crate) mod element;
pub(crate) mod real;
pub(crate) mod reference;
pub(crate) mod same_precision;
pub(crate) mod tensors;

use case::Case;
use element::Element;
use reference::{Column, Place, Truth};
use tensors::{Inputs, Numbers, Outputs, Poison};

use crate::abi::library::Library;
use crate::abi::random::Random;

/// A wrong result made of a right one, to see that it is noticed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sabotage {
    /// One row is off by 16 roundoffs of its type.
    Row,
    /// One column is zero everywhere.
    Column,
    /// The first and the last head are exchanged.
    Head,
    /// One log-sum-exp is off by 0.01.
    Lse,
}

/// Outcome of a case.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Errors found.
    pub(crate) complaints: Vec<String>,
    /// Rows that were judged by their columns.
    pub(crate) judged: usize,
    /// Rows of which nothing is said, because their scores overflow.
    pub(crate) unknown: usize,
    /// Elements that are infinite or NaN, where that is right.
    pub(crate) overflowed: usize,
    /// The largest error, over its bound.
    pub(crate) worst: f64,
}

/// No more complaints are kept of a case.
const MOST_COMPLAINTS: usize = 4;
/// No more rows are judged of a case: of large ones a sample.
const MOST_ROWS: usize = 3000;
/// Products, at most, that the reference of a case makes.
const MOST_PRODUCTS: usize = 1 << 24;

impl Verdict {
    fn complain(&mut self, words: String) {
        if self.complaints.len() < MOST_COMPLAINTS {
            self.complaints.push(words);
        }
    }
}

/// Runs a case and judges it.
pub(crate) fn try_case(library: &Library, case: &Case, sabotage: Option<Sabotage>) -> Verdict {
    let mut verdict = Verdict::default();
    let random = &mut Random::new(case.seed ^ 0x77);
    let plan = match library.create(&case.problem(library)) {
        Ok(plan) => plan,
        Err((status, words)) => {
            verdict.complain(format!("no plan: status {status}, {words}"));
            return verdict;
        }
    };
    let (mut inputs, mut outputs) = (Inputs::new(case), Outputs::new(case));
    let first = random.below(Poison::ALL.len());
    let second = (first + random.within(1, Poison::ALL.len() - 1)) % Poison::ALL.len();
    let mut results = Vec::new();
    for (salt, poison) in [(random.next(), Poison::ALL[first]), (random.next(), Poison::ALL[second])] {
        inputs.fill(case, poison);
        outputs.fill(salt);
        // SAFETY: the memory is there, and as long as it says.
        if let Err((status, words)) = unsafe { library.try_run(plan, &tensors::list(case, &inputs, &outputs)) } {
            verdict.complain(format!("refused: status {status}, {words}"));
            library.destroy(plan);
            return verdict;
        }
        let (rows, lse, changed) = outputs.take(case, salt);
        if let Some(index) = changed {
            verdict.complain(format!("byte {index} of the output, between its rows, was written"));
        }
        results.push((rows, lse, poison));
    }
    library.destroy(plan);
    let [(rows, lse, poison), (rows_again, lse_again, poison_again)] = &results[..] else { unreachable!("two runs") };
    if let Some(index) = (0..rows.len()).find(|&index| rows[index] != rows_again[index]) {
        verdict.complain(format!(
            "byte {index} of the output differs from {poison:?} to {poison_again:?}, or was not written"
        ));
    }
    if let Some(index) = (0..lse.len()).find(|&index| lse[index] != lse_again[index]) {
        verdict.complain(format!("byte {index} of the log-sum-exp differs from {poison:?} to {poison_again:?}"));
    }
    let read = |element: Element, bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(element.size()).map(|bytes| element.read(bytes)).collect()
    };
    let mut result = Result { rows: read(case.element, rows), lse: read(Element::F32, lse) };
    if let Some(sabotage) = sabotage {
        result.spoil(case, sabotage, random);
    }
    result.judge(case, &inputs.numbers(case), random, &mut verdict);
    verdict
}

/// Results of the library.
struct Result {
    /// `[batch, head, row, column]`.
    rows: Vec<f64>,
    lse: Vec<f64>,
}

/// Errors relative to `sum p |v|`, over all elements that are judged.
#[derive(Default)]
struct Errors {
    largest: f64,
    squares: f64,
}

impl Errors {
    fn add(&mut self, error: f64) {
        self.largest = self.largest.max(error);
        self.squares += error * error;
    }
}

impl Result {
    fn spoil(&mut self, case: &Case, sabotage: Sabotage, random: &mut Random) {
        let (columns, rows) = (case.value_dim, self.rows.len() / case.value_dim);
        if rows == 0 {
            return;
        }
        match sabotage {
            Sabotage::Row => {
                let row = random.below(rows);
                for element in &mut self.rows[row * columns..][..columns] {
                    *element *= 1.0 + 16.0 * case.element.roundoff();
                }
            }
            Sabotage::Column => {
                let column = random.below(columns);
                self.rows.iter_mut().skip(column).step_by(columns).for_each(|element| *element = 0.0);
            }
            Sabotage::Head => {
                let head = case.query_length * columns;
                let (first, last) = (0, (case.query_heads - 1) * head);
                for index in 0..head {
                    self.rows.swap(first + index, last + index);
                }
            }
            Sabotage::Lse => {
                if !self.lse.is_empty() {
                    self.lse[random.below(rows)] += 0.01;
                }
            }
        }
    }

    fn judge(&self, case: &Case, numbers: &Numbers, random: &mut Random, verdict: &mut Verdict) {
        let rows = case.batch * case.query_heads * case.query_length;
        let of_row = (case.key_length * (case.head_dim + 4 * case.value_dim)).max(1);
        let wide = if case.element == Element::F64 { 16 } else { 1 };
        let most = MOST_ROWS.min(MOST_PRODUCTS / of_row / wide).max(4);
        let chosen: Vec<usize> = if rows <= most {
            (0..rows).collect()
        } else {
            (0..most)
                .map(|index| match index {
                    0 => 0,
                    1 => rows - 1,
                    _ => random.below(rows),
                })
                .collect()
        };
        let is_random = case.query_range.is_random() && case.key_range.is_random() && case.value_range.is_random();
        let (mut found, mut usual, mut elements) = (Errors::default(), Errors::default(), 0);
        let (mut noise, mut most_keys) = (0.0_f64, 0);
        for index in chosen {
            let (row, rest) = (index % case.query_length, index / case.query_length);
            let at = Place { batch: rest / case.query_heads, head: rest % case.query_heads, row };
            let output = &self.rows[index * case.value_dim..][..case.value_dim];
            let lse = self.lse.get(index).copied();
            let truth = reference::truth(case, numbers, at);
            let name = || format!("batch {} head {} row {}", at.batch, at.head, at.row);
            judge_lse(&truth, lse, &name, verdict);
            match &truth {
                Truth::Unknown => verdict.unknown += 1,
                Truth::Nan => {
                    if let Some(column) = output.iter().position(|element| !element.is_nan()) {
                        verdict.complain(format!(
                            "{} column {column} is {}, and a NaN was attended",
                            name(),
                            output[column]
                        ));
                    }
                }
                Truth::Nothing { is_known, .. } => {
                    let is_wrong = |(&element, &is_known): (&f64, &bool)| is_known && element != 0.0;
                    if let Some(column) = output.iter().zip(is_known).position(is_wrong) {
                        verdict.complain(format!(
                            "{} column {column} is {}, and nothing is attended",
                            name(),
                            output[column]
                        ));
                    }
                }
                Truth::Row { columns, typical_noise, keys, .. } => {
                    verdict.judged += 1;
                    for (column, (truth, &element)) in columns.iter().zip(output).enumerate() {
                        judge_element(case, truth, element, &|| format!("{} column {column}", name()), verdict);
                    }
                    if is_random && let Some(same) = same_precision::row(case, numbers, at) {
                        (noise, most_keys) = (noise.max(*typical_noise), most_keys.max(*keys));
                        for ((truth, &element), &same) in columns.iter().zip(output).zip(&same) {
                            if truth.is_nan || truth.is_unknown || truth.is_lossy {
                                continue;
                            }
                            elements += 1;
                            found.add(truth.error(element) / truth.magnitude);
                            usual.add(truth.error(same) / truth.magnitude);
                        }
                    }
                }
            }
        }
        judge_together(case, &found, &usual, elements, (noise, most_keys), verdict);
    }
}

impl Column {
    fn error(&self, element: f64) -> f64 {
        ((element - self.high) - self.low).abs()
    }
}

fn judge_lse(truth: &Truth, found: Option<f64>, name: &dyn Fn() -> String, verdict: &mut Verdict) {
    let Some(found) = found else { return };
    let (expected, bound) = match *truth {
        Truth::Unknown => return,
        Truth::Nan => {
            if !found.is_nan() {
                verdict.complain(format!("{} has log-sum-exp {found}, and a NaN was attended", name()));
            }
            return;
        }
        Truth::Nothing { lse, bound, .. } => (lse, bound),
        Truth::Row { lse, lse_bound, .. } => (lse, lse_bound),
    };
    let is_right = found == expected || (found - expected).abs() <= bound;
    if bound.is_finite() && bound > 0.0 {
        verdict.worst = verdict.worst.max((found - expected).abs() / bound);
    }
    if !is_right || found.is_nan() {
        verdict.complain(format!("{} has log-sum-exp {found}, not {expected} within {bound:e}", name()));
    }
}

fn judge_element(case: &Case, truth: &Column, element: f64, name: &dyn Fn() -> String, verdict: &mut Verdict) {
    if truth.is_unknown {
        return;
    }
    if truth.is_nan {
        if !element.is_nan() {
            verdict.complain(format!("{} is {element}, and a NaN was attended", name()));
        }
        return;
    }
    if !element.is_finite() && truth.may_overflow {
        verdict.overflowed += 1;
        return;
    }
    let error = truth.error(element);
    let is_within = truth.bound.is_infinite() || error <= truth.bound;
    if truth.bound.is_finite() {
        verdict.worst = verdict.worst.max(error / truth.bound);
    }
    if !is_within || !element.is_finite() {
        let (expected, bound) = (truth.high, truth.bound);
        let roundoffs = error / case.element.roundoff() / expected.abs();
        verdict.complain(format!(
            "{} is {element:e}, not {expected:e} within {bound:e}: {roundoffs:.1} roundoffs",
            name()
        ));
    } else if element < truth.hull.0 || element > truth.hull.1 {
        verdict.complain(format!("{} is {element:e}, outside of the attended values {:?}", name(), truth.hull));
    }
}

/// Elements, at least, of which the mean square says something.
const ENOUGH: usize = 256;

/// Errors of random numbers, against twice those of plain code in the same precision.
///
/// To these are added: two roundings of the output, one more of 16-bit weights (1.6 roundoffs of bf16), because the plain code
/// may be lucky; sums of `n` random numbers in another order, which differ by a normally distributed number of at most
/// `sqrt(n)` roundoffs (Higham and Mary, 2019), of which three times is exceeded once in 400; and what errors of scores, by
/// the same rule, make of weights. Elements that lose something below the least number are left out. In the mean over many, three quarters of a rounding (its mean square is 0.58) and one third of the others.
fn judge_together(
    case: &Case,
    found: &Errors,
    usual: &Errors,
    elements: usize,
    (noise, keys): (f64, usize),
    verdict: &mut Verdict,
) {
    if elements == 0 {
        return;
    }
    let weights = if case.element == Element::Bf16 { 1.6 } else { 0.0 };
    let sums = 3.0 * (keys as f64).sqrt() * case.element.sum_roundoff() + noise;
    let limit = 2.0 * usual.largest + (2.0 + weights) * case.element.roundoff() + sums;
    if found.largest > limit {
        let found = found.largest;
        verdict.complain(format!(
            "the largest error is {found:e} of sum p |v|; twice that of plain code allows {limit:e}"
        ));
    }
    if elements >= ENOUGH {
        let mean = |errors: &Errors| (errors.squares / elements as f64).sqrt();
        let limit = 2.0 * mean(usual) + (0.75 + weights / 3.0) * case.element.roundoff() + sums / 3.0;
        if mean(found) > limit {
            let found = mean(found);
            verdict.complain(format!("the mean square error is {found:e}; twice that of plain code allows {limit:e}"));
        }
    }
}
