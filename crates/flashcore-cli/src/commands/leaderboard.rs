//! `flashcore leaderboard`: the best of each problem, and how it came to be.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use flashcore_bench::compare::{Comparison, Subject, slack};
use flashcore_bench::experiments;
use flashcore_bench::leaderboard::{Candidate, Leaderboard, Place, Promotion, Regression, check, plot, promote};
use flashcore_bench::printable::printable;
use flashcore_bench::record::{Kind, Machine, Measurements, Record, sniff};

use super::origin::{write_file, write_record};
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Show, extend and check the best verified times
///
/// The leaderboard keeps, for each problem on each machine, the best record that was verified, with its commit, config,
/// driver, clocks and the hash of its samples. A record enters by `promote`: the first of a place by a bench record,
/// every other by a comparison with the leader that is FASTER by 3 % on a shape and SLOWER on none of the canonical
/// shapes (--suite seeds). `check` holds a record against the leaders and fails on a regression.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore leaderboard\n  flashcore leaderboard promote bench.json\n  flashcore leaderboard promote compare.json\n  flashcore leaderboard check bench.json --tolerance 10\n  flashcore leaderboard history --svg history.svg"
)]
pub(crate) struct LeaderboardCommand {
    #[command(subcommand)]
    action: Option<Action>,
    /// The file of the leaderboard
    #[arg(long, global = true, value_name = "FILE", default_value = "results/leaderboard.json")]
    file: PathBuf,
    /// The folder of experiments, of which those that brought nothing are shown beside the leaders
    #[arg(long, global = true, value_name = "FOLDER", default_value = "experiments")]
    experiments: PathBuf,
    /// How tables are written
    #[arg(long, global = true, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show the leaders (what happens without a word)
    Show,
    /// Admit a record, or say every reason why not (exit code 1)
    #[command(after_help = "Example:\n  flashcore leaderboard promote compare.json")]
    Promote {
        /// A record of `flashcore bench` for places without a leader, or of `flashcore compare` with the leader as A
        record: PathBuf,
    },
    /// Hold a record against the leaders; exit code 1 for a regression
    #[command(after_help = "Example:\n  flashcore bench --record now.json && flashcore leaderboard check now.json")]
    Check {
        /// A record of `flashcore bench`
        record: PathBuf,
        /// The percent by which times of different runs may differ
        #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = super::parse_percent, allow_negative_numbers = true)]
        tolerance: f64,
    },
    /// Show how the leaders changed from commit to commit
    #[command(after_help = "Example:\n  flashcore leaderboard history --shape 1x8x512x64 --svg history.svg")]
    History {
        /// Only problems of this shape
        #[arg(long)]
        shape: Option<String>,
        /// A file for the picture
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
}

impl LeaderboardCommand {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let board = read(&self.file)?;
        match &self.action {
            None | Some(Action::Show) => self.show(&board, output),
            Some(Action::Promote { record }) => self.promote(board, record, output),
            Some(Action::Check { record, tolerance }) => self.check(&board, record, tolerance / 100.0, output),
            Some(Action::History { shape, svg }) => self.history(&board, shape.as_deref(), svg.as_deref(), output),
        }
    }

    fn show(&self, board: &Leaderboard, output: &mut Output) -> Result<Ending, Failure> {
        output.table(&promotions(&board.leaders()), self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            if board.promotions.is_empty() {
                output.line(format!("{} has no record yet; `promote` admits one", self.file.display()))?;
            }
            let tried = experiments::list(&self.experiments).map_err(|error| Failure::Usage(error.to_string()))?;
            if !tried.is_empty() {
                output.line("\nTried, whether it helped or not:")?;
                output.table(&super::experiments::table(&tried, &self.experiments), self.format)?;
            }
        }
        Ok(Ending::Well)
    }

    fn promote(&self, mut board: Leaderboard, file: &Path, output: &mut Output) -> Result<Ending, Failure> {
        refuse_overwriting(&[file], &[&self.file])?;
        let usage = |error: flashcore_bench::record::RecordError| Failure::Usage(error.to_string());
        let (candidate, machine) = if sniff(file) == Some(Kind::Comparison) {
            let record = Record::<Comparison>::read(file).map_err(usage)?;
            let machine = record.origin.machine.clone();
            (Candidate::Comparison(record), machine)
        } else {
            let record = Record::<Measurements>::read(file).map_err(usage)?;
            let machine = record.origin.machine.clone();
            (Candidate::Measurements(record), machine)
        };
        match promote(&board, &candidate, slack_of(&machine)) {
            Ok(new) => {
                output.table(&promotions(&new.iter().collect::<Vec<_>>()), self.format)?;
                let count = new.len();
                board.promotions.extend(new);
                write_record(&self.file, machine, board)?;
                output.note(&format!("{count} promoted; {} is written", self.file.display()));
                Ok(Ending::Well)
            }
            Err(refusals) => {
                for refusal in refusals {
                    output.line(printable(&format!("REFUSED {refusal}")))?;
                }
                Ok(Ending::Failed)
            }
        }
    }

    fn check(&self, board: &Leaderboard, file: &Path, tolerance: f64, output: &mut Output) -> Result<Ending, Failure> {
        let record = Record::<Measurements>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
        let checked = check(board, &record, tolerance);
        if checked.is_empty() {
            let machine = record.origin.machine.words();
            return Err(Failure::Environment(format!(
                "nothing to check: {} has no leader for {machine} on the problems of {}",
                self.file.display(),
                file.display()
            )));
        }
        let mut table =
            Table::new(&["shape", "dtype", "mask", "leader", "leader us", "kernel", "now us", "change %", "verdict"]);
        for row in &checked {
            let Place { problem, .. } = &row.leader.place;
            table.push(vec![
                Cell::from(problem.shape.as_str()),
                Cell::from(problem.dtype.as_str()),
                Cell::from(problem.mask.as_str()),
                Cell::from(row.leader.kernel.as_str()),
                Cell::number(row.leader.median_seconds * 1e6, 2),
                Cell::from(row.kernel.as_str()),
                Cell::number(row.median_seconds * 1e6, 2),
                Cell::number(100.0 * row.change, 1),
                Cell::from(match row.regression {
                    None => "ok",
                    Some(Regression::Slower) => "REGRESSION",
                    Some(Regression::Wrong) => "WRONG",
                }),
            ]);
        }
        output.table(&table, self.format)?;
        let failed = checked.iter().filter(|row| row.regression.is_some()).count();
        if matches!(self.format, Format::Table | Format::Markdown) {
            output.line(format!("{} checked, {failed} regressed", checked.len()))?;
        }
        Ok(if failed == 0 { Ending::Well } else { Ending::Failed })
    }

    fn history(
        &self,
        board: &Leaderboard,
        shape: Option<&str>,
        svg: Option<&Path>,
        output: &mut Output,
    ) -> Result<Ending, Failure> {
        let mut places = board.places();
        places.retain(|place| shape.is_none_or(|shape| place.problem.shape == shape));
        let shown: Vec<&Promotion> = places.iter().flat_map(|place| board.history(place)).collect();
        output.table(&promotions(&shown), self.format)?;
        if let Some(file) = svg {
            refuse_overwriting(&[&self.file], &[file])?;
            write_file(file, plot(board, &places).file().as_bytes())?;
        }
        Ok(Ending::Well)
    }
}

/// The leaderboard of a file; one that is not there yet is empty.
pub(super) fn read(file: &Path) -> Result<Leaderboard, Failure> {
    if !file.exists() {
        return Ok(Leaderboard::default());
    }
    let record = Record::<Leaderboard>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
    Ok(record.content)
}

/// How far the ceilings of a machine may be off.
fn slack_of(machine: &Machine) -> f64 {
    slack(if machine.backend == "cpu" { Subject::Cpu(None) } else { Subject::Cuda(None) })
}

fn promotions(shown: &[&Promotion]) -> Table {
    let mut table = Table::new(&[
        "device",
        "shape",
        "dtype",
        "mask",
        "kernel",
        "p50 us",
        "p90 us",
        "floor us",
        "% of floor",
        "gain",
        "commit",
        "measured",
    ]);
    for promotion in shown {
        let Place { device, problem, .. } = &promotion.place;
        table.push(vec![
            Cell::from(device.as_str()),
            Cell::from(problem.shape.as_str()),
            Cell::from(problem.dtype.as_str()),
            Cell::from(problem.mask.as_str()),
            Cell::from(promotion.kernel.as_str()),
            Cell::number(promotion.median_seconds * 1e6, 2),
            Cell::number(promotion.nine_tenths_seconds * 1e6, 2),
            Cell::number(promotion.floor_seconds * 1e6, 2),
            Cell::number(100.0 * promotion.floor_seconds / promotion.median_seconds, 1),
            Cell::from(promotion.gain.map_or_else(|| "first".to_owned(), |gain| gain.percent())),
            Cell::from(promotion.build.short()),
            Cell::from(promotion.measured.as_str()),
        ]);
    }
    table
}
