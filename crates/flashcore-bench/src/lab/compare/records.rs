//! Comparison of two records. Rounds are better: two records were made at different times.

use super::comparison::{ComparedRow, Comparison};
use super::rounds::Options;
use super::statistics::conclude_unpaired;
use crate::lab::record::{Measurement, Measurements, Record};

/// Reason why two records cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareRecordsError {
    /// They come from different machines.
    #[error("A was measured on {a} and B on {b}; times of different machines cannot be compared")]
    Machines {
        /// Machine of A.
        a: String,
        /// Machine of B.
        b: String,
    },
    /// They have no problem in common.
    #[error("the two records have no problem in common; A has {a}, B has {b}")]
    NothingInCommon {
        /// Problems of A.
        a: String,
        /// Problems of B.
        b: String,
    },
    /// The samples are not those that were hashed.
    #[error("{problem}: the samples do not match their hash; the record has been changed")]
    Changed {
        /// The problem.
        problem: String,
    },
}

/// Compares two records of the same machine, problem by problem.
pub fn compare_records(
    a: &Record<Measurements>,
    b: &Record<Measurements>,
    names: [String; 2],
    options: &Options,
    slack: f64,
) -> Result<Comparison, CompareRecordsError> {
    let (machine_a, machine_b) = (&a.origin.machine, &b.origin.machine);
    let same_device = (&machine_a.backend, &machine_a.device, machine_a.threads)
        == (&machine_b.backend, &machine_b.device, machine_b.threads);
    if !same_device {
        return Err(CompareRecordsError::Machines { a: machine_a.words(), b: machine_b.words() });
    }
    let mut rows = Vec::new();
    for of_a in &a.content.rows {
        for of_b in b.content.rows.iter().filter(|row| row.problem == of_a.problem) {
            for side in [of_a, of_b] {
                if !side.is_intact() {
                    return Err(CompareRecordsError::Changed { problem: side.problem.to_string() });
                }
            }
            let conclusion = conclude_unpaired(&of_a.hot(), &of_b.hot(), options);
            let mut row = ComparedRow { a: of_a.clone(), b: of_b.clone(), rounds: Vec::new(), conclusion };
            row.reject_the_impossible(slack);
            rows.push(row);
        }
    }
    if rows.is_empty() {
        let listed =
            |rows: &[Measurement]| rows.iter().map(|row| row.problem.to_string()).collect::<Vec<_>>().join(", ");
        return Err(CompareRecordsError::NothingInCommon { a: listed(&a.content.rows), b: listed(&b.content.rows) });
    }
    let [a, b] = names;
    Ok(Comparison { a, b, rows })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::compare::Finding;
    use crate::lab::record::Origin;

    fn record(shape: &str, seconds: f64) -> Record<Measurements> {
        Record::new(Origin::for_tests(), Measurements { rows: vec![Measurement::for_tests(shape, seconds)] })
    }

    fn compared(a: &Record<Measurements>, b: &Record<Measurements>) -> Result<Finding, String> {
        let options = Options { least_rounds: 10, ..Options::default() };
        let names = ["a.json".to_owned(), "b.json".to_owned()];
        let comparison = compare_records(a, b, names, &options, 0.1).map_err(|error| error.to_string())?;
        Ok(comparison.rows[0].conclusion.finding)
    }

    #[test]
    fn records_of_one_machine_are_compared() {
        let a = record("1x8x512x64", 1e-3);
        assert_eq!(compared(&a, &record("1x8x512x64", 2e-3)), Ok(Finding::Slower));
        assert_eq!(compared(&a, &record("1x8x512x64", 1e-3)), Ok(Finding::Same));
    }

    #[test]
    fn what_cannot_be_compared_says_why() {
        let a = record("1x8x512x64", 1e-3);
        let nothing = "the two records have no problem in common; A has 1x8x512x64 f32 full, B has 1x1x64x64 f32 full";
        assert_eq!(compared(&a, &record("1x1x64x64", 1e-3)), Err(nothing.to_owned()));
        let mut elsewhere = a.clone();
        elsewhere.origin.machine.device = "Other processor".to_owned();
        let machines = "A was measured on Test processor (avx2), 2 threads and B on Other processor (avx2), 2 threads; times of different machines cannot be compared";
        assert_eq!(compared(&a, &elsewhere), Err(machines.to_owned()));
        let mut changed = a.clone();
        changed.content.rows[0].hot_seconds[3] *= 0.9;
        let hash = "1x8x512x64 f32 full: the samples do not match their hash; the record has been changed";
        assert_eq!(compared(&a, &changed), Err(hash.to_owned()));
    }
}
