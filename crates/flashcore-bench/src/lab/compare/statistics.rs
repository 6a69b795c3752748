//! Statistics of a comparison: block bootstrap and permutation test, from rounds to a verdict.

use core::fmt;

use flashcore_problem::SplitMix64;
use serde::{Deserialize, Serialize};

use super::rounds::Options;
use crate::timing::Times;

/// Times of one round: A, A once more, and B, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// A.
    pub a: f64,
    /// A once more, by itself, as if it were something else.
    pub again: f64,
    /// B.
    pub b: f64,
}

impl Round {
    /// The logarithms of B over A, for either A. If B is A too, each is as often above as below zero, whatever the noise
    /// looks like; their mean would not be: of two times of which one is disturbed, the mean is no time that occurs.
    fn differences(&self) -> [f64; 2] {
        [self.b.ln() - self.a.ln(), self.b.ln() - self.again.ln()]
    }

    /// The logarithm of A over A.
    fn controls(&self) -> [f64; 1] {
        [self.again.ln() - self.a.ln()]
    }
}

/// Verdict of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Finding {
    /// B takes less time than A.
    Faster,
    /// B takes more time than A.
    Slower,
    /// B takes as long as A.
    Same,
    /// The data cannot tell.
    Ambiguous,
    /// One of them is faster than the machine can be: the measurement is wrong.
    Rejected,
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Faster => "FASTER",
            Self::Slower => "SLOWER",
            Self::Same => "SAME",
            Self::Ambiguous => "AMBIGUOUS",
            Self::Rejected => "REJECTED",
        })
    }
}

/// A median and where it may lie, as parts by which a time differs from another: 0.05 is 5 % longer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The median.
    pub median: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    fn of_logarithms(low: f64, median: f64, high: f64) -> Self {
        Self { low: low.exp_m1(), median: median.exp_m1(), high: high.exp_m1() }
    }

    /// In percent, such as `+5.1 % [+4.2, +6.0]`.
    pub fn percent(&self) -> String {
        let Self { low, median, high } = self;
        format!("{:+.1} % [{:+.1}, {:+.1}]", 100.0 * median, 100.0 * low, 100.0 * high)
    }
}

/// Verdict on the rounds, with its statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conclusion {
    /// The verdict.
    pub finding: Finding,
    /// Reason for the verdict, in words.
    pub reason: String,
    /// B over A.
    pub difference: Interval,
    /// A over A.
    pub control: Interval,
    /// Part of random relabellings that differ as much; 0 where none were made.
    pub chance: f64,
    /// The effect that had to be exceeded.
    pub minimum: f64,
    /// The confidence of the intervals.
    pub confidence: f64,
    /// Number of rounds.
    pub rounds: usize,
}

/// Neighbouring rounds are resampled together: what disturbs a machine lasts longer than one of them.
const BLOCK: usize = 8;

/// Draws the conclusion from the rounds.
pub fn conclude(rounds: &[Round], options: &Options) -> Conclusion {
    judge(
        resampled(rounds, Round::differences, options, 1),
        resampled(rounds, Round::controls, options, 2),
        chance(rounds, options),
        options,
        rounds.len(),
    )
}

/// Part of random relabellings, in which B is any of the three runs of a round, that differ more than these rounds do.
///
/// If B is A, any of the three times of a round could be the one of B. Which it is, is drawn anew for each block of
/// adjacent rounds. Unlike an interval this holds for few rounds and for noise of any form: what a machine does to a whole
/// block, it does to all relabellings.
fn chance(rounds: &[Round], options: &Options) -> f64 {
    let logarithms: Vec<[f64; 3]> = rounds.iter().map(|round| [round.b, round.a, round.again].map(f64::ln)).collect();
    let mut random = SplitMix64::stream(options.seed, 3);
    let mut differences = Vec::with_capacity(2 * rounds.len());
    let mut effect = |lot: &mut dyn FnMut() -> usize| {
        differences.clear();
        for block in logarithms.chunks(BLOCK) {
            let b = lot();
            let of_round = |times: &[f64; 3]| [times[b] - times[(b + 1) % 3], times[b] - times[(b + 2) % 3]];
            differences.extend(block.iter().flat_map(of_round));
        }
        median_of(&mut differences).abs()
    };
    let found = effect(&mut || 0);
    // More than as much: without any noise, relabellings that leave B its times in most blocks have the same median.
    let larger = (0..options.resamples).filter(|_| effect(&mut || random.below(3)) > found).count();
    (larger + 1) as f64 / (options.resamples + 1) as f64
}

/// The median of what rounds say, and its interval. Rounds are drawn whole, in blocks of adjacent ones.
fn resampled<const N: usize>(
    rounds: &[Round],
    values: fn(&Round) -> [f64; N],
    options: &Options,
    stream: u64,
) -> Interval {
    let all: Vec<[f64; N]> = rounds.iter().map(values).collect();
    let mut random = SplitMix64::stream(options.seed, stream);
    let mut sample = Vec::new();
    interval(median(all.as_flattened()), options, || {
        draw_blocks(&all, &mut sample, &mut random);
        median_of(sample.as_flattened_mut())
    })
}

/// Draws the conclusion from two series that were not measured together. The difference of each from itself, first half
/// against second half, takes the place of the A/A difference.
pub fn conclude_unpaired(a: &Times, b: &Times, options: &Options) -> Conclusion {
    let logarithms = |times: &Times| times.seconds.iter().map(|seconds| seconds.ln()).collect::<Vec<f64>>();
    let (a, b) = (logarithms(a), logarithms(b));
    let between = |one: &[f64], other: &[f64], stream| {
        let mut random = SplitMix64::stream(options.seed, stream);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        interval(median(other) - median(one), options, || {
            draw_blocks(one, &mut first, &mut random);
            draw_blocks(other, &mut second, &mut random);
            median_of(&mut second) - median_of(&mut first)
        })
    };
    let halves = |values: &[f64], stream| {
        let (first, second) = values.split_at(values.len() / 2);
        between(first, second, stream)
    };
    let (of_a, of_b) = (halves(&a, 2), halves(&b, 3));
    let control = if of_a.median.abs() >= of_b.median.abs() { of_a } else { of_b };
    judge(between(&a, &b, 1), control, 0.0, options, a.len().min(b.len()))
}

fn judge(difference: Interval, control: Interval, chance: f64, options: &Options, rounds: usize) -> Conclusion {
    let minimum = options.minimum;
    let noise = 2.0 * control.median.abs();
    let beyond = minimum.max(noise);
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let (finding, reason) = if rounds < options.least_rounds {
        let needed = options.least_rounds;
        (
            Finding::Ambiguous,
            format!("{rounds} rounds are too few, at least {needed} are needed; give it more --seconds"),
        )
    } else if control.low > minimum || control.high < -minimum {
        let by = percent(control.median);
        (Finding::Ambiguous, format!("too noisy: two runs of A differ by {by}"))
    } else if chance > 1.0 - options.confidence && (difference.high < -minimum || difference.low > minimum) {
        let percent = percent(chance);
        (Finding::Ambiguous, format!("as large a difference arises by chance in {percent} of random relabellings"))
    } else if difference.high < -beyond {
        (Finding::Faster, format!("the whole interval is more than {} faster", percent(beyond)))
    } else if difference.low > beyond {
        (Finding::Slower, format!("the whole interval is more than {} slower", percent(beyond)))
    } else if difference.low > -minimum && difference.high < minimum {
        (Finding::Same, format!("the whole interval is within {}", percent(minimum)))
    } else if difference.high < -minimum || difference.low > minimum {
        let twice = percent(noise);
        (Finding::Ambiguous, format!("the interval exceeds --minimum but not twice the A/A difference, {twice}"))
    } else {
        let minimum = percent(minimum);
        (
            Finding::Ambiguous,
            format!("the interval contains {minimum}; more --seconds or a quieter machine make it narrower"),
        )
    };
    Conclusion { finding, reason, difference, control, chance, minimum, confidence: options.confidence, rounds }
}

/// The percentile interval of what `resample` gives.
fn interval(median: f64, options: &Options, mut resample: impl FnMut() -> f64) -> Interval {
    let mut medians: Vec<f64> = (0..options.resamples).map(|_| resample()).collect();
    medians.sort_by(f64::total_cmp);
    let at = |part: f64| medians[((medians.len() - 1) as f64 * part).round() as usize];
    let tail = (1.0 - options.confidence) / 2.0;
    Interval::of_logarithms(at(tail), median, at(1.0 - tail))
}

/// Draws as many values as there are, in blocks of adjacent ones.
fn draw_blocks<T: Copy>(values: &[T], sample: &mut Vec<T>, random: &mut SplitMix64) {
    sample.clear();
    while sample.len() < values.len() && !values.is_empty() {
        let start = random.below(values.len());
        sample.extend((start..start + BLOCK).map(|index| values[index % values.len()]));
    }
    sample.truncate(values.len());
}

fn median(values: &[f64]) -> f64 {
    median_of(&mut values.to_vec())
}

fn median_of(values: &mut [f64]) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    let middle = values.len() / 2;
    let (below, &mut upper, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    if below.len() == middle && values.len() % 2 == 1 {
        return upper;
    }
    let lower = values[..middle].iter().copied().fold(f64::NEG_INFINITY, f64::max);
    f64::midpoint(lower, upper)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A quarter of the usual resamples, because there are many comparisons here.
    fn options() -> Options {
        Options { resamples: 500, ..Options::default() }
    }

    /// Rounds on a noisy machine: a tenth of all runs take up to three times as long, the rest vary by a few percent, and
    /// the whole machine becomes slower and faster again.
    fn noisy(rounds: usize, ratio: f64, seed: u64) -> Vec<Round> {
        let mut random = SplitMix64::new(seed);
        let mut time = |round: usize, factor: f64| {
            let drift = 1.0 + 0.3 * (round as f64 / 50.0).sin();
            let disturbed = if random.below(10) == 0 { 1.0 + 2.0 * random.uniform() } else { 1.0 };
            1e-3 * drift * disturbed * factor * (0.05 * random.normal()).exp()
        };
        (0..rounds).map(|round| Round { a: time(round, 1.0), again: time(round, 1.0), b: time(round, ratio) }).collect()
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn noise_makes_no_verdict_and_five_percent_do() {
        const SEEDS: u64 = 16;
        let findings = |ratio: f64| -> Vec<Finding> {
            (0..SEEDS).map(|seed| conclude(&noisy(400, ratio, 100 + seed), &options()).finding).collect()
        };
        let count = |findings: &[Finding], finding| findings.iter().filter(|found| **found == finding).count();
        let same = findings(1.0);
        let found = [
            count(&same, Finding::Faster) + count(&same, Finding::Slower),
            count(&same, Finding::Same),
            count(&findings(1.05), Finding::Slower),
            count(&findings(1.0 / 1.05), Finding::Faster),
        ];
        assert!(found[0] == 0 && found[1] >= 12 && found[2] >= 14 && found[3] >= 14, "{found:?}");
    }

    #[test]
    fn two_modes_make_no_verdict() {
        // Every other run waits for a processor: times are around one value or around twice that.
        let rounds = |seed| -> Vec<Round> {
            let mut random = SplitMix64::new(seed);
            let mut time = || (1 + random.below(2)) as f64 * (0.01 * random.normal()).exp();
            (0..200).map(|_| Round { a: time(), again: time(), b: time() }).collect()
        };
        let verdicts = (0..40).filter(|seed| {
            let finding = conclude(&rounds(*seed), &options()).finding;
            matches!(finding, Finding::Faster | Finding::Slower)
        });
        assert_eq!(verdicts.count(), 0);
    }

    #[test]
    fn what_cannot_be_told_is_ambiguous() {
        let options = Options::default();
        let check = |rounds: &[Round], finding, reason: &str| {
            let conclusion = conclude(rounds, &options);
            assert_eq!((conclusion.finding, conclusion.reason.as_str()), (finding, reason));
        };
        check(
            &noisy(10, 1.5, 1),
            Finding::Ambiguous,
            "10 rounds are too few, at least 40 are needed; give it more --seconds",
        );
        // A machine that makes the second of two equal things 10 % slower.
        let biased: Vec<Round> = (0..100).map(|_| Round { a: 1.0, again: 1.1, b: 2.0 }).collect();
        check(&biased, Finding::Ambiguous, "too noisy: two runs of A differ by 10.0 %");
        // An effect of 3 %, where A differs from itself by 1.9 %.
        let close: Vec<Round> = (0..100).map(|_| Round { a: 1.0, again: 1.019, b: 1.04 }).collect();
        check(&close, Finding::Ambiguous, "the interval exceeds --minimum but not twice the A/A difference, 3.8 %");
    }

    #[test]
    fn series_that_were_measured_apart() {
        let options = Options::default();
        let mut random = SplitMix64::new(7);
        let mut series =
            |factor: f64| Times { seconds: (0..100).map(|_| factor * (0.05 * random.normal()).exp()).collect() };
        let mut finding = |a: f64, b: f64| conclude_unpaired(&series(a), &series(b), &options).finding;
        assert_eq!(finding(1.0, 2.0), Finding::Slower);
        assert_eq!(finding(2.0, 1.0), Finding::Faster);
        assert_eq!(finding(1.0, 1.02), Finding::Ambiguous);
        // A machine that becomes slower tells nothing.
        let drifting = Times { seconds: (0..100).map(|run| 1.0 + 0.01 * f64::from(run)).collect() };
        assert_eq!(conclude_unpaired(&drifting, &drifting, &options).finding, Finding::Ambiguous);
    }
}
