//! `flashcore leaderboard`: the best verified time of each problem, with its history.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use flashcore_bench::lab::compare::{Comparison, Subject, slack};
use flashcore_bench::lab::experiments;
use flashcore_bench::lab::leaderboard::{Candidate, Leaderboard, Place, Promotion, Regression, check, plot, promote};
use flashcore_bench::lab::record::{Kind, Machine, Measurements, Record, sniff};
use flashcore_bench::util::printable::printable;

use super::origin::{write_file, write_record};
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, PROBLEM, Table, column, recorded_cells};
use crate::{Ending, Failure};

/// Show, extend and check the best verified times
///
/// For each problem on each machine the leaderboard keeps the fastest verified kernel, the leader, with its commit, config,
/// driver, clocks and the hash of its samples. `promote` admits a record: of `bench` if a problem has no leader yet, and
/// else of `compare` with the leader as A, FASTER by 3 % on some shape and SLOWER on no canonical shape (--suite seeds).
/// Records of a loaded or noisy machine are refused. `check` compares a record with the leaders and fails on a regression.
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
    /// The directory of experiments, which are listed below the leaders [default: experiments]
    #[arg(long, global = true, value_name = "DIR")]
    experiments: Option<PathBuf>,
    /// The output format
    #[arg(long, global = true, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show the leaders (default)
    Show,
    /// Admit a record, or give every reason why not (exit code 1)
    #[command(after_help = "Example:\n  flashcore leaderboard promote compare.json")]
    Promote {
        /// A record of `flashcore bench` for problems without a leader, or of `flashcore compare` with the leader as A
        record: PathBuf,
    },
    /// Compare a record with the leaders; exit code 1 for a regression
    #[command(after_help = "Example:\n  flashcore bench --record now.json && flashcore leaderboard check now.json")]
    Check {
        /// A record of `flashcore bench`
        record: PathBuf,
        /// Allowed slowdown against the leader, in percent
        #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = super::parse_percent, allow_negative_numbers = true)]
        tolerance: f64,
    },
    /// Show all leaders, past and present
    #[command(after_help = "Example:\n  flashcore leaderboard history --shape 1x8x512x64 --svg history.svg")]
    History {
        /// Only problems of this shape
        #[arg(long)]
        shape: Option<String>,
        /// Write a plot as SVG
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
}

impl LeaderboardCommand {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        if let (Some(folder), Some(Action::Promote { .. } | Action::Check { .. } | Action::History { .. })) =
            (&self.experiments, &self.action)
        {
            return Err(Failure::Usage(format!(
                "--experiments {}: experiments are listed below the leaders, by `flashcore leaderboard show`; leave it out",
                folder.display()
            )));
        }
        let board = read(&self.file)?;
        match &self.action {
            None | Some(Action::Show) => self.show(&board, output),
            Some(Action::Promote { record }) => self.promote(board, record, output),
            Some(Action::Check { record, tolerance }) => self.check(&board, record, tolerance / 100.0, output),
            Some(Action::History { shape, svg }) => self.history(&board, shape.as_deref(), svg.as_deref(), output),
        }
    }

    fn show(&self, board: &Leaderboard, output: &Output) -> Result<Ending, Failure> {
        output.table(&promotions(&board.leaders()), self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            if board.promotions.is_empty() {
                output.line(format!(
                    "{} has no record yet; `flashcore leaderboard promote FILE` admits one",
                    self.file.display()
                ))?;
            }
            let folder = self.experiments.as_deref().unwrap_or(Path::new("experiments"));
            let tried = experiments::list(folder).map_err(|error| Failure::Usage(error.to_string()))?;
            if !tried.is_empty() {
                output.line("\nExperiments:")?;
                output.table(&super::experiments::table(&tried, folder), self.format)?;
            }
        }
        Ok(Ending::Well)
    }

    fn promote(&self, mut board: Leaderboard, file: &Path, output: &Output) -> Result<Ending, Failure> {
        refuse_overwriting(&[file], &[&self.file])?;
        let usage = |error: flashcore_bench::lab::record::RecordError| Failure::Usage(error.to_string());
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
                output.note(&format!("{count} promoted; wrote {}", self.file.display()));
                Ok(Ending::Well)
            }
            Err(refusals) => {
                for refusal in refusals {
                    output.verdict(printable(&format!("REFUSED {refusal}")))?;
                }
                Ok(Ending::Failed)
            }
        }
    }

    fn check(&self, board: &Leaderboard, file: &Path, tolerance: f64, output: &Output) -> Result<Ending, Failure> {
        let record = Record::<Measurements>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
        let checked = check(board, &record, tolerance);
        if checked.is_empty() {
            let machine = record.origin.machine.words();
            return Err(Failure::Environment(format!(
                "nothing to check: {} has no leader on {machine} for any problem of {}",
                self.file.display(),
                file.display()
            )));
        }
        let columns = [
            column("leader", "leader").minor(),
            column("leader us", "leader_us"),
            column("kernel", "kernel"),
            column("now us", "now_us"),
            column("change %", "change_percent"),
            column("verdict", "verdict").verdict(),
        ];
        let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
        for row in &checked {
            let mut cells = recorded_cells(&row.leader.place.problem);
            cells.extend([
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
            table.push(cells);
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
        output: &Output,
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

/// Relative error of the ceilings of a machine.
fn slack_of(machine: &Machine) -> f64 {
    slack(if machine.backend == "cpu" { Subject::Cpu(None) } else { Subject::Cuda(None) })
}

fn promotions(shown: &[&Promotion]) -> Table {
    let columns = [
        column("device", "device"),
        column("kernel", "kernel"),
        column("p50 us", "p50_us"),
        column("p90 us", "p90_us").minor(),
        column("floor us", "floor_us").minor(),
        column("efficiency %", "efficiency_percent"),
        column("change", "change"),
        column("commit", "commit").minor(),
        column("measured", "measured").minor(),
    ];
    let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
    for promotion in shown {
        let Place { device, problem, .. } = &promotion.place;
        let mut cells = recorded_cells(problem);
        cells.extend([
            Cell::from(device.as_str()),
            Cell::from(promotion.kernel.as_str()),
            Cell::number(promotion.median_seconds * 1e6, 2),
            Cell::number(promotion.nine_tenths_seconds * 1e6, 2),
            Cell::precise(promotion.floor_seconds * 1e6, 2),
            Cell::number(100.0 * promotion.floor_seconds / promotion.median_seconds, 1),
            Cell::from(promotion.gain.map_or_else(|| "first".to_owned(), |gain| gain.percent())),
            Cell::from(promotion.build.short()),
            Cell::from(promotion.measured.as_str()),
        ]);
        table.push(cells);
    }
    table
}
