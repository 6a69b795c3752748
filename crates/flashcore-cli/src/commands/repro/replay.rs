//! Replays a bundle and prints the agreement.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use flashcore_bench::lab::repro::{
    Agreement, CaseEntry, Replayed, open, read_manifest, replay_cases, replay_kernels, replay_times,
};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::memory::read_file;
use flashcore_bench::util::printable::printable;

use super::machine;
use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

pub(super) fn run(file: &Path, seconds: f64, output: &Output) -> Result<Ending, Failure> {
    let shown = file.display();
    let bundle = read_file(file).map_err(|error| Failure::Usage(format!("{shown}: {error}")))?;
    let opened = open(&bundle).and_then(|files| read_manifest(&files).map(|record| (files, record)));
    let (files, record) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            output.line(format!("REFUSED {shown}: {}", printable(&error.to_string())))?;
            return Ok(Ending::Failed);
        }
    };
    let (origin, manifest) = (&record.origin, &record.content);
    output.line(format!(
        "{shown}: sealed, every file as the manifest says; made by flashcore {} at {} on {}, {}",
        printable(&origin.build.version),
        printable(&origin.build.short()),
        printable(&origin.machine.words()),
        printable(&origin.time)
    ))?;
    let gpu = Gpu::open(0).ok();
    let here = machine(gpu.as_ref().filter(|_| origin.machine.backend == "cuda"));
    let count = manifest.cases.len();
    let is_same_build = origin.build == super::build();
    let kept = Mutex::new(Vec::new());
    let work = || {
        let found = |replayed| interrupt::aside(&kept).push(replayed);
        replay_kernels(manifest, &files, is_same_build).into_iter().for_each(found);
        let go_on = |index: usize, case: &CaseEntry| {
            output.progress(index, count, &case.problem.to_string());
            !interrupt::requested()
        };
        replay_cases(manifest, &files, gpu.as_ref(), go_on, found);
        let budget = Duration::from_secs_f64(seconds);
        let go_on = || !interrupt::requested();
        replay_times(manifest, &origin.machine, &here, gpu.as_ref(), budget, go_on, found);
        Ok(())
    };
    interrupt::abandonable(output, work, |_| conclude(&interrupt::aside(&kept), output))
}

/// Shows what agrees.
fn conclude(replayed: &[Replayed], output: &Output) -> Result<Ending, Failure> {
    let mut table =
        Table::new(&[column("what", "what"), column("agrees", "agrees").verdict(), column("found", "found")]);
    for Replayed { what, agreement, found, .. } in replayed {
        table.push(vec![Cell::from(what.as_str()), Cell::from(agreement.word()), Cell::from(found.as_str())]);
    }
    output.table(&table, Format::Table)?;
    let tally = |wanted| replayed.iter().filter(|replayed| replayed.agreement == wanted).count();
    let disagree = tally(Agreement::No);
    // Times differ between runs of one machine; what was computed does not.
    let times = replayed.iter().filter(|replayed| replayed.is_time && replayed.agreement == Agreement::No);
    let only_times = times.count() == disagree;
    output.line(format!(
        "{} agree, {disagree} disagree, {} cannot be checked on this machine",
        tally(Agreement::Yes),
        tally(Agreement::Unknown)
    ))?;
    if disagree > 0 && only_times {
        output.line("only times disagree; this machine may be busy, or slower than that of the bundle")?;
    }
    if disagree > 0 && !only_times {
        return Ok(Ending::Failed);
    }
    if interrupt::requested() {
        return Ok(Ending::Interrupted);
    }
    // Times alone repeat nothing that was computed.
    if !replayed.iter().any(|replayed| !replayed.is_time && replayed.agreement == Agreement::Yes) {
        return Err(Failure::Environment("none of the computed results could be repeated on this machine".to_owned()));
    }
    Ok(Ending::Well)
}
