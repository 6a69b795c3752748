//! Comparisons as records keep them.

use serde::{Deserialize, Serialize};

use super::rounds::Arm;
use super::statistics::{Conclusion, Finding, Round};
use crate::lab::record::{Content, Kind, Measurement, impossible_seconds};
use crate::util::digest::sha256_of_numbers;

/// Two things beside each other on some problems.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// The baseline.
    pub a: String,
    /// The candidate.
    pub b: String,
    /// One for each problem.
    pub rows: Vec<ComparedRow>,
}

impl Content for Comparison {
    const KIND: Kind = Kind::Comparison;

    fn impossible(&self) -> Option<String> {
        let of = |row: &ComparedRow| {
            let times = row.rounds.iter().flat_map(|round| [round.a, round.again, round.b]);
            let reason = times.into_iter().find_map(impossible_seconds);
            let reason = reason.map(|reason| format!("{}: {reason}", row.b.problem));
            reason.or_else(|| row.a.impossible()).or_else(|| row.b.impossible())
        };
        self.rows.iter().find_map(of)
    }
}

/// Two things on one problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComparedRow {
    /// A, with the times of its rounds.
    pub a: Measurement,
    /// B, with the times of its rounds.
    pub b: Measurement,
    /// The rounds, where they were made together.
    pub rounds: Vec<Round>,
    /// The verdict and its statistics.
    pub conclusion: Conclusion,
}

impl ComparedRow {
    /// From what is known of both sides without times, and the rounds. `slack` is how far a ceiling may be off.
    pub fn new(mut a: Measurement, mut b: Measurement, rounds: Vec<Round>, conclusion: Conclusion, slack: f64) -> Self {
        let times = |arm: Arm| -> Vec<f64> {
            let time = |round: &Round| match arm {
                Arm::A => round.a,
                Arm::Again => round.again,
                Arm::B => round.b,
            };
            rounds.iter().map(time).collect()
        };
        a.hot_seconds = times(Arm::A);
        b.hot_seconds = times(Arm::B);
        for side in [&mut a, &mut b] {
            side.samples_sha256 = sha256_of_numbers(&side.hot_seconds);
        }
        let mut row = Self { a, b, rounds, conclusion };
        row.reject_the_impossible(slack);
        row
    }

    /// A result below its floor is an error in measuring, whatever the interval says.
    pub(super) fn reject_the_impossible(&mut self, slack: f64) {
        for (name, side) in [("A", &self.a), ("B", &self.b)] {
            if side.is_below_floor(slack) {
                let (median, floor) = (side.median() * 1e6, side.floor_seconds * 1e6);
                self.conclusion.finding = Finding::Rejected;
                self.conclusion.reason = format!(
                    "{name} took {median:.2} us, below its floor of {floor:.2} us, the least time that this machine's peak rate allows: the measurement is wrong"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::compare::{Options, conclude};

    #[test]
    fn what_is_faster_than_the_machine_is_rejected() {
        let rounds: Vec<Round> = (0..50).map(|_| Round { a: 1e-3, again: 1e-3, b: 0.4e-3 }).collect();
        let conclusion = conclude(&rounds, &Options::default());
        assert_eq!(conclusion.finding, Finding::Faster);
        let measurement = || Measurement::for_tests("1x8x512x64", 1e-3);
        let row = ComparedRow::new(measurement(), measurement(), rounds, conclusion, 0.1);
        assert_eq!(row.conclusion.finding, Finding::Rejected);
        assert_eq!(
            row.conclusion.reason,
            "B took 400.00 us, below its floor of 500.00 us, the least time that this machine's peak rate allows: the measurement is wrong"
        );
        assert!(row.a.is_intact() && row.b.is_intact());
    }
}
