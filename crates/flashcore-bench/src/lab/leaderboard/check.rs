//! Regression check: new times against the leaderboard.

use super::{Leaderboard, Place, Promotion};
use crate::lab::record::{Measurements, Record};

/// Result of the check of one place.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked<'a> {
    /// The leader.
    pub leader: &'a Promotion,
    /// Kernel of the new time.
    pub kernel: String,
    /// The median now, in seconds.
    pub median_seconds: f64,
    /// The part by which it takes longer; negative for less.
    pub change: f64,
    /// The regression, if there is one.
    pub regression: Option<Regression>,
}

/// Kind of regression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Regression {
    /// It takes longer than the tolerance allows, and the middle halves of the samples do not meet.
    Slower,
    /// The gates complain.
    Wrong,
}

/// Holds a record against the leaders of its places. Two runs at different times differ by more than kernels do, so a
/// regression is more than `tolerance` and more than the spread of both.
pub fn check<'a>(board: &'a Leaderboard, record: &Record<Measurements>, tolerance: f64) -> Vec<Checked<'a>> {
    let mut checked = Vec::new();
    for row in &record.content.rows {
        let Some(leader) = board.leader(&Place::of(&record.origin.machine, &row.problem)) else { continue };
        let hot = row.hot();
        let median_seconds = hot.quantile(0.5);
        let change = median_seconds / leader.median_seconds - 1.0;
        let is_apart = hot.quantile(0.25) > leader.three_quarters_seconds;
        let regression = if !row.verified.passed {
            Some(Regression::Wrong)
        } else if change > tolerance && is_apart {
            Some(Regression::Slower)
        } else {
            None
        };
        checked.push(Checked { leader, kernel: row.kernel.clone(), median_seconds, change, regression });
    }
    checked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::leaderboard::{Candidate, promote};
    use crate::lab::record::{Measurement, Origin};

    fn record(seconds: f64) -> Record<Measurements> {
        let rows = vec![Measurement::for_tests("1x8x512x64", seconds), Measurement::for_tests("2x8x512x64", 1e-3)];
        Record::new(Origin::for_tests(), Measurements { rows })
    }

    #[test]
    fn a_planted_regression_is_found_and_noise_is_not() {
        let promotions = promote(&Leaderboard::default(), &Candidate::Measurements(record(1e-3)), 0.1);
        let board = Leaderboard { promotions: promotions.expect("nothing is wrong with it") };
        let regressions = |record: &Record<Measurements>| -> Vec<Option<Regression>> {
            check(&board, record, 0.05).into_iter().map(|checked| checked.regression).collect()
        };
        assert_eq!(regressions(&record(1.04e-3)), [None, None]);
        assert_eq!(regressions(&record(0.5e-3)), [None, None]);
        assert_eq!(regressions(&record(1.1e-3)), [Some(Regression::Slower), None]);
        let mut wrong = record(1e-3);
        wrong.content.rows[1].verified.passed = false;
        assert_eq!(regressions(&wrong), [None, Some(Regression::Wrong)]);
        let mut elsewhere = record(9.0);
        elsewhere.origin.machine.device = "Other processor".to_owned();
        assert_eq!(regressions(&elsewhere), []);
    }
}
