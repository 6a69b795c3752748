//! Times beside those of others: the records of the scripts in `bench/peers`, each of a form of its own, converted to one.

use serde_json::Value;

use crate::lab::record::{impossible_seconds, kernel_words};

/// Times of flashcore beside others, from one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Peers {
    /// The machine, its software and its state.
    pub machine: String,
    /// The name of what is compared with the others: flashcore, or a build of it.
    pub ours: &'static str,
    /// One for each problem.
    pub rows: Vec<PeerRow>,
}

/// Times of one problem.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerRow {
    /// The problem.
    pub problem: String,
    /// Threads, the kernel, equality of bits: whatever the form has beside times.
    pub note: String,
    /// Seconds of flashcore.
    pub seconds: f64,
    /// Seconds of the others.
    pub others: Vec<(String, f64)>,
}

impl PeerRow {
    /// The fastest of the others.
    pub fn best(&self) -> Option<&(String, f64)> {
        self.others.iter().min_by(|one, other| one.1.total_cmp(&other.1))
    }

    /// Time of the fastest other over ours.
    pub fn ratio(&self) -> Option<f64> {
        self.best().map(|(_, seconds)| seconds / self.seconds)
    }
}

/// Conversion of a row of one form.
type Convert = fn(&Value) -> Result<PeerRow, String>;

impl Peers {
    /// The times of a file, if it is of a form with such times; a reason if a number in it is impossible.
    pub fn find(value: &Value) -> Option<Result<Self, String>> {
        let rows = value.get("rows")?.as_array()?;
        let first = rows.first()?;
        let (ours, convert): (_, Convert) = match first {
            row if row.get("ours_seconds").is_some() => ("flashcore", of_flex),
            row if row.pointer("/microseconds/after").is_some() => ("the later build", of_builds),
            row if row.pointer("/microseconds/flashcore").is_some() => ("flashcore", of_gpu),
            row if row.pointer("/seconds/flashcore").is_some() => ("flashcore", of_cpu),
            _ => return None,
        };
        Some(rows.iter().map(convert).collect::<Result<_, _>>().map(|rows| Self {
            machine: machine(value),
            ours,
            rows,
        }))
    }

    /// The geometric mean of the ratios, the least of them and its problem.
    pub fn summary(&self) -> Option<(f64, f64, &str)> {
        let ratios: Vec<(f64, &str)> =
            self.rows.iter().filter_map(|row| Some((row.ratio()?, row.problem.as_str()))).collect();
        let mean = (ratios.iter().map(|(ratio, _)| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let least = ratios.iter().min_by(|one, other| one.0.total_cmp(&other.0))?;
        Some((mean, least.0, least.1))
    }
}

/// A text, if the value is one.
fn text_of(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// Seconds of a number in a unit, or that they are impossible.
fn time(value: &Value, unit: f64, what: &str) -> Result<f64, String> {
    let seconds = value.as_f64().map(|number| number * unit).filter(|seconds| *seconds > 0.0);
    match seconds {
        Some(seconds) => impossible_seconds(seconds).map_or(Ok(seconds), |reason| Err(format!("{what}: {reason}"))),
        None => Err(format!("{what}: its time is {value}; a time is a number above 0")),
    }
}

/// The words of a machine, of whichever form.
fn machine(value: &Value) -> String {
    let machine = &value["machine"];
    let words = [
        text_of(&value["gpu"]),
        text_of(&machine["device"]),
        text_of(&machine["processor"]),
        machine["cores"].as_u64().map(|cores| format!("{cores} cores")),
        text_of(&machine["software"]),
        text_of(&value["torch"]).map(|version| format!("torch {version}")),
        text_of(&machine["state_after"]),
    ];
    let versions = machine["versions"].as_object().into_iter().flatten();
    let versions = versions.filter_map(|(name, version)| Some(format!("{name} {}", version.as_str()?)));
    words.into_iter().flatten().chain(versions).collect::<Vec<_>>().join(", ")
}

fn problem(row: &Value) -> String {
    let [name, shape, dtype, mask] = ["formula", "shape", "dtype", "mask"].map(|field| text_of(&row[field]));
    // A mask as keys before and after the row's own.
    let side = |side: &Value| side.as_u64().map_or_else(String::new, |keys| keys.to_string());
    let window = row.get("window").map(|window| match window.as_array().map(Vec::as_slice) {
        None => "full".to_owned(),
        Some([left, right]) if left.as_u64().is_none() && right.as_u64() == Some(0) => "causal".to_owned(),
        Some([left, right]) => format!("window:{},{}", side(left), side(right)),
        Some(_) => window.to_string(),
    });
    [name, shape, dtype, mask.or(window)].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Times under the names of their programs, in a unit, without ours.
fn others(times: &Value, ours: &str, unit: f64, what: &str) -> Result<Vec<(String, f64)>, String> {
    let times = times.as_object().into_iter().flatten().filter(|(name, time)| *name != ours && !time.is_null());
    times.map(|(name, value)| Ok((name.clone(), time(value, unit, &format!("{what}, {name}"))?))).collect()
}

/// `bench/peers/gpu.py`.
fn of_gpu(row: &Value) -> Result<PeerRow, String> {
    let problem = problem(row);
    let times = &row["microseconds"];
    let steady = text_of(&row["suite"]).map_or_else(String::new, |suite| format!("suite {suite}"));
    Ok(PeerRow {
        seconds: time(&times["flashcore"], 1e-6, &problem)?,
        others: others(times, "flashcore", 1e-6, &problem)?,
        problem,
        note: steady,
    })
}

/// `bench/peers/cpu.py`.
fn of_cpu(row: &Value) -> Result<PeerRow, String> {
    let problem = problem(row);
    let times = &row["seconds"];
    let threads = row["threads"].as_u64().map_or_else(String::new, |threads| format!("threads: {threads}"));
    Ok(PeerRow {
        seconds: time(&times["flashcore"], 1.0, &problem)?,
        others: others(times, "flashcore", 1.0, &problem)?,
        problem,
        note: threads,
    })
}

/// `bench/peers/builds.py`: the later build beside the earlier one.
fn of_builds(row: &Value) -> Result<PeerRow, String> {
    let problem = problem(row);
    let times = &row["microseconds"];
    let is_same = row["bits_equal"].as_bool();
    Ok(PeerRow {
        seconds: time(&times["after"], 1e-6, &problem)?,
        others: others(times, "after", 1e-6, &problem)?,
        problem,
        note: is_same.map_or("", |is_same| if is_same { "the same bits" } else { "OTHER BITS" }).to_owned(),
    })
}

/// `bench/peers/flex.py`: expressions beside `FlexAttention`.
fn of_flex(row: &Value) -> Result<PeerRow, String> {
    let problem = problem(row);
    Ok(PeerRow {
        seconds: time(&row["ours_seconds"], 1.0, &problem)?,
        others: vec![("FlexAttention".to_owned(), time(&row["flex_seconds"], 1.0, &problem)?)],
        note: row["kernel"].as_str().map_or_else(String::new, kernel_words),
        problem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_form_becomes_one() {
        let check = |value: &Value, ours: &str, seconds: f64, best: (&str, f64)| {
            let peers = Peers::find(value).expect("a form").expect("possible");
            assert_eq!((peers.ours, peers.rows[0].seconds), (ours, seconds));
            let found = peers.rows[0].best().expect("another");
            assert_eq!((found.0.as_str(), found.1), best);
        };
        let row = json!({"shape": "1x8x512x64", "dtype": "f16", "mask": "full",
            "microseconds": {"flashcore": 2.0, "flash2": 6.0, "cudnn": 4.0, "efficient": null}});
        check(&json!({"schema": 1, "machine": {"device": "H200"}, "rows": [row]}), "flashcore", 2e-6, ("cudnn", 4e-6));
        let row = json!({"shape": "1x8x512x64", "threads": 2, "seconds": {"flashcore": 0.5, "torch": 1.0}});
        check(&json!({"schema": 1, "rows": [row]}), "flashcore", 0.5, ("torch", 1.0));
        let row = json!({"shape": "1x8x512x64", "dtype": "f16", "window": [-1, 0], "bits_equal": true,
            "microseconds": {"before": 3.0, "after": 1.0}});
        let builds = json!({"gpu": "H200", "rows": [row]});
        check(&builds, "the later build", 1e-6, ("before", 3e-6));
        let peers = Peers::find(&builds).expect("a form").expect("possible");
        assert_eq!(
            (peers.rows[0].problem.as_str(), peers.rows[0].note.as_str()),
            ("1x8x512x64 f16 causal", "the same bits")
        );
        let row = json!({"formula": "relative", "shape": "1x8x512x64", "ours_seconds": 1.0, "flex_seconds": 2.5});
        check(&json!({"rows": [row]}), "flashcore", 1.0, ("FlexAttention", 2.5));
        assert_eq!(Peers::find(&json!({"rows": [{"registers": 3}]})), None);
    }

    #[test]
    fn an_impossible_time_is_no_row() {
        for time in [json!(0.0), json!(-1.0), json!(1e303), json!("x"), json!(null)] {
            let row = json!({"shape": "1x8x512x64", "seconds": {"flashcore": time, "torch": 1.0}});
            let found = Peers::find(&json!({"rows": [row]})).expect("a form");
            assert!(found.is_err_and(|reason| reason.starts_with("1x8x512x64: ")), "{time}");
        }
    }
}
