//! Rounds of A, A again and B, until there is a verdict or no time left.

use std::time::{Duration, Instant};

use flashcore_problem::SplitMix64;

use super::statistics::{Conclusion, Finding, Round, conclude};

/// One of the runs of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// A.
    A,
    /// A once more.
    Again,
    /// B.
    B,
}

impl Arm {
    /// All three.
    pub const ALL: [Self; 3] = [Self::A, Self::Again, Self::B];
}

/// Settings of a comparison. Everything here is fixed before anything is measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The part by which times must differ to be called different.
    pub minimum: f64,
    /// The confidence of intervals.
    pub confidence: f64,
    /// Rounds before there can be a verdict.
    pub least_rounds: usize,
    /// Time for each problem.
    pub budget: Duration,
    /// Resamples of each bootstrap.
    pub resamples: usize,
    /// The seed of orders and resamples.
    pub seed: u64,
    /// The part by which each run of B is made longer, by waiting busily within it: a test of the instrument, on the CPU.
    pub slow_b: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            minimum: 0.02,
            confidence: 0.99,
            least_rounds: 40,
            budget: Duration::from_secs(20),
            resamples: 2000,
            seed: 0,
            slow_b: 0.0,
        }
    }
}

/// Progress of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Rounds so far.
    pub rounds: usize,
    /// Seconds so far.
    pub seconds: f64,
}

/// From one look at the data to the next, the rounds grow by this factor: few looks, few chances to stop at a whim.
const GROWTH: f64 = 1.6;
/// Rounds before the first look.
const FIRST_LOOK: usize = 100;
/// Part of the doubt that is allowed to a verdict before the time is over.
const EARLY_DOUBT: f64 = 0.1;

/// Makes rounds. `run` runs an arm and says how long it took; `go_on` hears of the progress and can stop everything.
///
/// Who looks often finds something at last, so an early verdict takes more confidence than one at the end.
pub fn rounds<E>(
    options: &Options,
    mut run: impl FnMut(Arm) -> Result<f64, E>,
    mut go_on: impl FnMut(Progress) -> bool,
) -> Result<(Vec<Round>, Conclusion), E> {
    let mut random = SplitMix64::stream(options.seed, 0);
    let begin = Instant::now();
    let mut rounds = Vec::new();
    // The first run of each warms caches and clocks.
    for arm in Arm::ALL {
        run(arm)?;
    }
    let early = Options { confidence: 1.0 - EARLY_DOUBT * (1.0 - options.confidence), ..options.clone() };
    let mut next_look = FIRST_LOOK.max(options.least_rounds);
    loop {
        let mut arms = Arm::ALL;
        for last in (1..arms.len()).rev() {
            arms.swap(last, random.below(last + 1));
        }
        let mut round = Round { a: 0.0, again: 0.0, b: 0.0 };
        for arm in arms {
            let seconds = run(arm)?;
            match arm {
                Arm::A => round.a = seconds,
                Arm::Again => round.again = seconds,
                Arm::B => round.b = seconds,
            }
        }
        rounds.push(round);
        let progress = Progress { rounds: rounds.len(), seconds: begin.elapsed().as_secs_f64() };
        let is_over = begin.elapsed() >= options.budget || !go_on(progress);
        if is_over || rounds.len() >= next_look {
            let conclusion = conclude(&rounds, if is_over { options } else { &early });
            if is_over || conclusion.finding != Finding::Ambiguous {
                return Ok((rounds, conclusion));
            }
            next_look = (rounds.len() as f64 * GROWTH) as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn clear_cases_end_at_the_first_look() {
        let run = |b: f64| {
            let mut order = Vec::new();
            let time = |arm| {
                order.push(arm);
                Ok::<_, Infallible>(if arm == Arm::B { b } else { 1.0 })
            };
            let (rounds, conclusion) = rounds(&Options::default(), time, |_| true).expect("nothing fails");
            (rounds.len(), conclusion.finding, order)
        };
        let (count, finding, order) = run(1.5);
        assert_eq!((count, finding), (100, Finding::Slower));
        // Each round has all three; which comes first changes.
        let firsts: Vec<Arm> = order[3..].chunks(3).map(|round| round[0]).collect();
        for arm in Arm::ALL {
            assert_eq!(order.iter().filter(|run| **run == arm).count(), 101);
            assert!(firsts.iter().filter(|first| **first == arm).count() > 5, "{arm:?} comes first too seldom");
        }
        assert_eq!(run(1.0).1, Finding::Same);
    }

    #[test]
    fn somebody_who_has_enough_stops_it() {
        let time = |_| Ok::<_, Infallible>(1.0);
        let (made, conclusion) =
            rounds(&Options::default(), time, |progress| progress.rounds < 7).expect("nothing fails");
        assert_eq!((made.len(), conclusion.finding), (7, Finding::Ambiguous));
    }
}
