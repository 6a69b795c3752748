//! Admission to the leaderboard, and the reasons for refusal.

use flashcore_problem::DType;

use super::{Leaderboard, Place, Promotion};
use crate::lab::compare::{ComparedRow, Comparison, Finding};
use crate::lab::load::most_others;
use crate::lab::problems::BenchSuite;
use crate::lab::record::{Measurement, Measurements, Origin, ProblemKey, Record};

/// The part by which a new leader must be faster than the old one: registered here, before anything is measured.
pub const MINIMUM_GAIN: f64 = 0.03;

/// The spread of the middle half of the samples, as a part of their median, above which a machine was too noisy.
pub const MOST_SPREAD: f64 = 0.2;

/// The load average that a CPU may have while so many threads measure: their own, and a little for the system.
fn most_load(threads: usize) -> f64 {
    threads as f64 + most_others(threads)
}

/// A record that asks to be admitted.
#[derive(Debug, Clone, PartialEq)]
pub enum Candidate {
    /// Times: for places without a leader.
    Measurements(Record<Measurements>),
    /// The leader beside something new.
    Comparison(Record<Comparison>),
}

/// Reason why a record is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Refusal {
    #[error("{problem}: the correctness gate refuses {kernel}: {complaints}")]
    Unverified { problem: String, kernel: String, complaints: String },
    #[error(
        "{problem}: {kernel} took {median:.3} us, below its floor of {floor:.3} us, the least time that the machine's peak rate allows; the measurement is wrong"
    )]
    BelowFloor { problem: String, kernel: String, median: f64, floor: f64 },
    #[error("{problem}: the samples do not match their hash; the record has been changed")]
    Changed { problem: String },
    #[error("the record comes from a {profile} build; measure with `cargo build --release`")]
    Profile { profile: String },
    #[error(
        "the record comes from a build whose sources differ from commit {commit}; commit them, build, and measure again"
    )]
    Dirty { commit: String },
    #[error("the record does not say which commit it comes from; build in a checkout, and measure again")]
    NoCommit,
    #[error(
        "{problem} has a leader, {leader}; compare with it: flashcore compare {leader} NEW --suite seeds --minimum 3 --record FILE"
    )]
    HasLeader { problem: String, leader: String },
    #[error("{problem}: the leader is {leader}, and this was compared with {compared}; compare with the leader")]
    NotLeader { problem: String, leader: String, compared: String },
    #[error(
        "the comparison was made with --minimum {found:.1}; {} is required: compare with --minimum {}",
        100.0 * MINIMUM_GAIN, 100.0 * MINIMUM_GAIN
    )]
    Minimum { found: f64 },
    #[error("{problem}: SLOWER, {difference}; a new leader must not be slower on any canonical shape")]
    Regressing { problem: String, difference: String },
    #[error("{problem}: AMBIGUOUS, {reason}")]
    Ambiguous { problem: String, reason: String },
    #[error("no problem in the record is FASTER: {found}")]
    NothingFaster { found: String },
    #[error("the record lacks the canonical shapes {missing}; compare with --suite seeds")]
    Missing { missing: String },
    #[error(
        "the machine was loaded: its load average was {load:.2} with {threads} of its threads measuring, and {most:.2} is the most; measure again when nothing else runs"
    )]
    Loaded { load: f64, threads: usize, most: f64 },
    #[error(
        "{problem}: other programs kept {others:.1} CPUs busy while it was timed, and {most:.1} is the most; measure again when nothing else runs"
    )]
    Busy { problem: String, others: f64, most: f64 },
    #[error(
        "{problem}: the machine was noisy: half of the samples of {kernel} spread over {:.0} % of the median, and {:.0} % is the most; measure again when nothing else runs",
        100.0 * spread, 100.0 * MOST_SPREAD
    )]
    Noisy { problem: String, kernel: String, spread: f64 },
    #[error("the record holds no problem")]
    Empty,
}

/// The promotions that a record earns, or every reason why it earns none. `slack` is how far a ceiling may be off.
pub fn promote(board: &Leaderboard, candidate: &Candidate, slack: f64) -> Result<Vec<Promotion>, Vec<Refusal>> {
    let mut refusals = Vec::new();
    let promotions = match candidate {
        Candidate::Measurements(record) => {
            origin_refusals(&record.origin, &mut refusals);
            for row in &record.content.rows {
                measurement_refusals(row, slack, &mut refusals);
                noise_refusal(row, &mut refusals);
                let most = most_others(record.origin.machine.threads.unwrap_or(1));
                if let Some(others) = row.other_cpus.filter(|others| *others > most) {
                    refusals.push(Refusal::Busy { problem: row.problem.to_string(), others, most });
                }
                let place = Place::of(&record.origin.machine, &row.problem);
                if let Some(leader) = board.leader(&place) {
                    let leader = leader.kernel.clone();
                    refusals.push(Refusal::HasLeader { problem: row.problem.to_string(), leader });
                }
            }
            record.content.rows.iter().map(|row| Promotion::new(&record.origin, row, None)).collect::<Vec<_>>()
        }
        Candidate::Comparison(record) => {
            origin_refusals(&record.origin, &mut refusals);
            comparison_refusals(board, record, slack, &mut refusals);
            let is_faster = |row: &&ComparedRow| row.conclusion.finding == Finding::Faster;
            record.content.rows.iter().filter(is_faster).for_each(|row| noise_refusal(&row.b, &mut refusals));
            let faster = record.content.rows.iter().filter(|row| row.conclusion.finding == Finding::Faster);
            faster.map(|row| Promotion::new(&record.origin, &row.b, Some(row.conclusion.difference))).collect()
        }
    };
    if promotions.is_empty() && refusals.is_empty() {
        refusals.push(Refusal::Empty);
    }
    if refusals.is_empty() { Ok(promotions) } else { Err(refusals) }
}

fn origin_refusals(origin: &Origin, refusals: &mut Vec<Refusal>) {
    if origin.build.profile != "release" {
        refusals.push(Refusal::Profile { profile: origin.build.profile.clone() });
    }
    match &origin.build.commit {
        None => refusals.push(Refusal::NoCommit),
        Some(commit) if origin.build.dirty => refusals.push(Refusal::Dirty { commit: commit.clone() }),
        Some(_) => {}
    }
    if let (Some(load), Some(threads)) = (origin.machine.load_average(), origin.machine.threads)
        && load > most_load(threads)
    {
        refusals.push(Refusal::Loaded { load, threads, most: most_load(threads) });
    }
}

fn noise_refusal(row: &Measurement, refusals: &mut Vec<Refusal>) {
    let spread = row.spread();
    if spread > MOST_SPREAD {
        refusals.push(Refusal::Noisy { problem: row.problem.to_string(), kernel: row.kernel.clone(), spread });
    }
}

fn measurement_refusals(row: &Measurement, slack: f64, refusals: &mut Vec<Refusal>) {
    let (problem, kernel) = (row.problem.to_string(), row.kernel.clone());
    if !row.verified.passed {
        let complaints = row.verified.complaints.join("; ");
        refusals.push(Refusal::Unverified { problem: problem.clone(), kernel: kernel.clone(), complaints });
    }
    if !row.is_intact() {
        refusals.push(Refusal::Changed { problem: problem.clone() });
    }
    if row.is_below_floor(slack) {
        let (median, floor) = (row.median() * 1e6, row.floor_seconds * 1e6);
        refusals.push(Refusal::BelowFloor { problem, kernel, median, floor });
    }
}

fn comparison_refusals(board: &Leaderboard, record: &Record<Comparison>, slack: f64, refusals: &mut Vec<Refusal>) {
    let rows = &record.content.rows;
    let problem = |row: &ComparedRow| row.b.problem.to_string();
    for row in rows {
        measurement_refusals(&row.b, slack, refusals);
        let place = Place::of(&record.origin.machine, &row.b.problem);
        if let Some(leader) = board.leader(&place).filter(|leader| leader.kernel != row.a.kernel) {
            let (leader, compared) = (leader.kernel.clone(), row.a.kernel.clone());
            refusals.push(Refusal::NotLeader { problem: problem(row), leader, compared });
        }
        if row.conclusion.finding == Finding::Slower {
            let difference = row.conclusion.difference.percent();
            refusals.push(Refusal::Regressing { problem: problem(row), difference });
        }
    }
    let least = rows.iter().map(|row| row.conclusion.minimum).fold(f64::INFINITY, f64::min);
    // A percent that went through a record is not exactly what was written.
    if least < MINIMUM_GAIN - 1e-9 {
        refusals.push(Refusal::Minimum { found: 100.0 * least });
    }
    if !rows.iter().any(|row| row.conclusion.finding == Finding::Faster) {
        let ambiguous = rows.iter().filter(|row| row.conclusion.finding == Finding::Ambiguous);
        let ambiguous: Vec<Refusal> = ambiguous
            .map(|row| Refusal::Ambiguous { problem: problem(row), reason: row.conclusion.reason.clone() })
            .collect();
        if ambiguous.is_empty() {
            let found = rows.iter().map(|row| format!("{} {}", problem(row), row.conclusion.finding));
            refusals.push(Refusal::NothingFaster { found: found.collect::<Vec<_>>().join(", ") });
        } else {
            refusals.extend(ambiguous);
        }
    }
    let missing = missing_shapes(rows);
    if !missing.is_empty() {
        refusals.push(Refusal::Missing { missing: missing.join(", ") });
    }
}

/// Canonical shapes of the types in a comparison that it leaves out.
fn missing_shapes(rows: &[ComparedRow]) -> Vec<String> {
    let mut dtypes: Vec<DType> = rows.iter().filter_map(|row| row.b.problem.dtype.parse().ok()).collect();
    dtypes.dedup();
    let canonical = dtypes.into_iter().flat_map(|dtype| BenchSuite::Seeds.problems(dtype));
    canonical
        .map(|problem| ProblemKey::of(&problem))
        .filter(|key| !rows.iter().any(|row| row.b.problem == *key))
        .map(|key| key.to_string())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::compare::{Options, Round, conclude};

    fn measurements(kernel: &str, seconds: f64) -> Record<Measurements> {
        let problems = BenchSuite::Seeds.problems(DType::F32);
        let rows = problems.iter().map(|problem| {
            let key = ProblemKey::of(problem);
            let of = Measurement::for_tests(&key.shape, seconds);
            Measurement { kernel: kernel.to_owned(), problem: key, ..of }
        });
        Record::new(Origin::for_tests(), Measurements { rows: rows.collect() })
    }

    /// The kernel `new` beside `old`, whose times on the problem of a number are multiplied by a ratio.
    fn comparison(ratio: impl Fn(usize) -> f64) -> Record<Comparison> {
        let options = Options { minimum: MINIMUM_GAIN, resamples: 200, ..Options::default() };
        let rows = measurements("old", 1e-3).content.rows.into_iter().enumerate().map(|(index, a)| {
            let round = Round { a: 1e-3, again: 1e-3, b: 1e-3 * ratio(index) };
            let rounds = vec![round; 50];
            let b = Measurement { kernel: "new".to_owned(), ..a.clone() };
            ComparedRow::new(a, b, rounds.clone(), conclude(&rounds, &options), 0.1)
        });
        let content = Comparison { a: "old".to_owned(), b: "new".to_owned(), rows: rows.collect() };
        Record::new(Origin::for_tests(), content)
    }

    fn board() -> Leaderboard {
        let promotions = promote(&Leaderboard::default(), &Candidate::Measurements(measurements("old", 1e-3)), 0.1);
        Leaderboard { promotions: promotions.expect("nothing is wrong with it") }
    }

    fn refused(candidate: &Candidate) -> Vec<String> {
        let refusals = promote(&board(), candidate, 0.1).expect_err("something is wrong with it");
        refusals.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn times_of_a_loaded_machine_are_refused() {
        let refused = |record: Record<Measurements>| -> Vec<String> {
            let refusals = promote(&Leaderboard::default(), &Candidate::Measurements(record), 0.1);
            refusals.err().unwrap_or_default().iter().map(ToString::to_string).collect()
        };
        let with_load = |load: &str| {
            let mut record = measurements("avx2", 1e-3);
            record.origin.machine.state = vec![("load average".to_owned(), load.to_owned())];
            record
        };
        assert_eq!(refused(with_load("2.1")), [] as [&str; 0]);
        assert_eq!(
            refused(with_load("9.66")),
            [
                "the machine was loaded: its load average was 9.66 with 2 of its threads measuring, and 2.50 is the most; measure again when nothing else runs"
            ]
        );
        let mut busy = measurements("avx2", 1e-3);
        busy.content.rows[0].other_cpus = Some(0.9);
        busy.content.rows[1].other_cpus = Some(0.49);
        assert_eq!(
            refused(busy),
            [
                "1x2x64x64 f32 full: other programs kept 0.9 CPUs busy while it was timed, and 0.5 is the most; measure again when nothing else runs"
            ]
        );
        // Times that a neighbour stretches, though the load average has not risen yet.
        let mut noisy = measurements("avx2", 1e-3);
        let row = &mut noisy.content.rows[0];
        row.hot_seconds = (0..40).map(|sample| 1e-3 * (1.0 + f64::from(sample % 2))).collect();
        row.samples_sha256 = crate::util::digest::sha256_of_numbers(&row.hot_seconds);
        assert_eq!(
            refused(noisy),
            [
                "1x2x64x64 f32 full: the machine was noisy: half of the samples of avx2 spread over 67 % of the median, and 20 % is the most; measure again when nothing else runs"
            ]
        );
    }

    #[test]
    fn the_first_of_a_place_is_admitted_once() {
        assert_eq!(board().leaders().len(), 16);
        let again = refused(&Candidate::Measurements(measurements("old", 1e-3)));
        assert_eq!(
            (again.len(), again[0].as_str()),
            (
                16,
                "1x2x64x64 f32 full has a leader, old; compare with it: flashcore compare old NEW --suite seeds --minimum 3 --record FILE"
            )
        );
    }

    #[test]
    fn a_faster_one_takes_the_places_where_it_is_faster() {
        let good = comparison(|index| if index < 2 { 0.9 } else { 1.0 });
        let promotions = promote(&board(), &Candidate::Comparison(good), 0.1).expect("nothing is wrong with it");
        let mut board = board();
        board.promotions.extend(promotions);
        let kernels: Vec<&str> = board.leaders().iter().map(|leader| leader.kernel.as_str()).collect();
        assert_eq!(kernels.iter().filter(|kernel| **kernel == "new").count(), 2);
        assert_eq!(board.history(board.places()[0]).len(), 2);
        assert!(board.leaders()[0].gain.is_some_and(|gain| (gain.median + 0.1).abs() < 1e-9));
    }

    #[test]
    fn what_is_not_admitted_says_why() {
        let check = |record: Record<Comparison>, expected: &str| {
            assert_eq!(refused(&Candidate::Comparison(record)), [expected]);
        };
        let good = || comparison(|index| if index == 0 { 0.9 } else { 1.0 });
        let mut unverified = good();
        unverified.content.rows[3].b.verified.passed = false;
        unverified.content.rows[3].b.verified.complaints = vec!["7 output elements were never written".to_owned()];
        check(
            unverified,
            "1x4x128x64 f32 causal: the correctness gate refuses new: 7 output elements were never written",
        );
        check(
            comparison(|index| {
                if index == 0 {
                    0.9
                } else if index == 6 {
                    1.1
                } else {
                    1.0
                }
            }),
            "1x8x512x64 f32 full: SLOWER, +10.0 % [+10.0, +10.0]; a new leader must not be slower on any canonical shape",
        );
        let mut ambiguous = comparison(|_| 1.0);
        ambiguous.content.rows[0].conclusion.finding = Finding::Ambiguous;
        ambiguous.content.rows[0].conclusion.reason = "the interval reaches over 3.0 %".to_owned();
        check(ambiguous, "1x2x64x64 f32 full: AMBIGUOUS, the interval reaches over 3.0 %");
        let mut below = good();
        below.content.rows[0].b.floor_seconds = 2e-3;
        check(
            below,
            "1x2x64x64 f32 full: new took 900.000 us, below its floor of 2000.000 us, the least time that the machine's peak rate allows; the measurement is wrong",
        );
        let mut changed = good();
        changed.content.rows[0].b.hot_seconds[0] *= 0.5;
        check(changed, "1x2x64x64 f32 full: the samples do not match their hash; the record has been changed");
        let mut fewer = good();
        fewer.content.rows.truncate(15);
        check(fewer, "the record lacks the canonical shapes 4x16x2048x128 f32 causal; compare with --suite seeds");
        let mut other = good();
        other.content.rows[0].a.kernel = "older".to_owned();
        check(
            other,
            "1x2x64x64 f32 full: the leader is old, and this was compared with older; compare with the leader",
        );
        let mut small = good();
        small.content.rows[5].conclusion.minimum = 0.02;
        check(small, "the comparison was made with --minimum 2.0; 3 is required: compare with --minimum 3");
        let mut dirty = good();
        dirty.origin.build.dirty = true;
        check(
            dirty,
            "the record comes from a build whose sources differ from commit 0123456789abcdef0123456789abcdef01234567; commit them, build, and measure again",
        );
        let mut debug = good();
        debug.origin.build.profile = "debug".to_owned();
        check(debug, "the record comes from a debug build; measure with `cargo build --release`");
    }

    #[test]
    fn the_same_is_not_faster() {
        let refusals = refused(&Candidate::Comparison(comparison(|_| 1.0)));
        assert!(
            refusals[0].starts_with("no problem in the record is FASTER: 1x2x64x64 f32 full SAME, "),
            "{refusals:?}"
        );
    }
}
