//! The ladder in the report.

use serde::Deserialize;
use serde_json::Value;

use crate::lab::record::impossible_seconds;
use crate::timing::Times;

/// The steps of one problem.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct LadderView {
    /// The problem.
    pub shape: String,
    /// Element type.
    pub dtype: String,
    /// Mask.
    pub mask: String,
    /// Seconds that the problem takes at least.
    pub floor_seconds: Option<f64>,
    /// The steps.
    pub rungs: Vec<RungView>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RungView {
    /// Name of the step.
    pub name: String,
    /// The change from the step before.
    pub what: String,
    /// The step that it is compared with, if not the best before it.
    pub from: Option<usize>,
    /// Verdict of the gate: `passed`, or an object with a reason.
    pub standing: Value,
    /// Seconds of each run.
    pub hot_seconds: Vec<f64>,
}

/// Gain of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worth {
    /// It is faster.
    Gain,
    /// It is not.
    Nothing,
    /// It is wrong.
    Refused,
}

/// A step is a gain if it takes less than this part of the time before.
const GAIN: f64 = 0.98;

impl LadderView {
    /// All ladders in a JSON value: itself, or in its lists.
    pub fn find(value: &Value) -> Vec<Self> {
        if value.get("rungs").is_some() {
            return serde_json::from_value(value.clone()).into_iter().collect();
        }
        let content = value.get("content");
        let lists = [Some(value), value.get("ladders"), content, content.and_then(|content| content.get("ladders"))];
        lists.into_iter().flatten().filter_map(Value::as_array).flatten().filter_map(Self::find_one).collect()
    }

    fn find_one(value: &Value) -> Option<Self> {
        value.get("rungs").and_then(|_| serde_json::from_value(value.clone()).ok())
    }

    /// A time that nothing takes, in words.
    pub(super) fn impossible(&self) -> Option<String> {
        let times = self.rungs.iter().flat_map(|rung| &rung.hot_seconds).chain(&self.floor_seconds);
        let reason = times.copied().find_map(impossible_seconds)?;
        Some(format!("{} {} {}: {reason}", self.shape, self.dtype, self.mask))
    }

    /// Gain of a step over the one before.
    pub(super) fn worth(&self, number: usize) -> Worth {
        let rung = &self.rungs[number];
        let before = match rung.from {
            Some(from) => self.rungs.get(from).and_then(RungView::seconds),
            None => {
                self.rungs[..number].iter().filter(|rung| rung.passed()).filter_map(RungView::seconds).reduce(f64::min)
            }
        };
        match (rung.passed(), rung.seconds(), before) {
            (false, ..) => Worth::Refused,
            (true, Some(seconds), Some(before)) if seconds >= GAIN * before => Worth::Nothing,
            _ => Worth::Gain,
        }
    }
}

impl RungView {
    /// Median time.
    pub(super) fn seconds(&self) -> Option<f64> {
        (!self.hot_seconds.is_empty()).then(|| Times { seconds: self.hot_seconds.clone() }.quantile(0.5))
    }

    pub(super) fn passed(&self) -> bool {
        self.standing == "passed"
    }
}

#[cfg(test)]
pub(super) fn example() -> LadderView {
    let rung = |name: &str, standing: Value, seconds: f64| RungView {
        name: name.to_owned(),
        what: "a step".to_owned(),
        from: None,
        standing,
        hot_seconds: vec![seconds; 3],
    };
    LadderView {
        shape: "1x8x512x64".to_owned(),
        dtype: "f16".to_owned(),
        mask: "full".to_owned(),
        floor_seconds: Some(1e-6),
        rungs: vec![
            rung("scalar", "passed".into(), 1e-3),
            rung("tiles", "passed".into(), 5e-4),
            rung("swizzle", "passed".into(), 5e-4),
            rung("f16 sums", serde_json::json!({ "refused": "errors" }), 1e-4),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_brought_nothing_are_told_apart() {
        let ladder = example();
        let worths: Vec<Worth> = (0..4).map(|number| ladder.worth(number)).collect();
        assert_eq!(worths, [Worth::Gain, Worth::Gain, Worth::Nothing, Worth::Refused]);
    }

    #[test]
    fn ladders_are_found_where_they_are() {
        let one = serde_json::json!({
            "shape": "1x8x512x64", "dtype": "f16", "mask": "full", "floor_seconds": null,
            "rungs": [{"name": "scalar", "what": "", "from": null, "standing": "passed", "hot_seconds": [1.0]}],
        });
        assert_eq!(LadderView::find(&one).len(), 1);
        assert_eq!(LadderView::find(&serde_json::json!({ "ladders": [one, one] })).len(), 2);
        assert_eq!(LadderView::find(&serde_json::json!({ "content": { "ladders": [one] } })).len(), 1);
        assert_eq!(LadderView::find(&serde_json::json!([1, 2])).len(), 0);
    }
}
