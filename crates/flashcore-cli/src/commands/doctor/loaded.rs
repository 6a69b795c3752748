//! The price of a plan and of a launch when the kernels are loaded: what an engine pays for each new shape and each call.

use std::time::{Duration, Instant};

use flashcore::{Device, Error, Plan};
use flashcore_bench::testkit::bound::{Bound, EmptyKernel, host_times};
use flashcore_kernels::{LaunchPlan, heuristics};
use flashcore_problem::{Alignment, DType, Inputs, Mask, Problem};
use serde_json::{Value, json};

use super::finding::{Finding, State};
use crate::commands::reference_gpu;

const PLAN_LIMIT: Duration = Duration::from_micros(30);
const LAUNCH_LIMIT: Duration = Duration::from_micros(3);
/// Plans and launches of which the median counts.
const RUNS: usize = 200;

/// The problem of a run.
type OfRun = fn(usize) -> Problem;

/// Prefill, causal prefill and split-KV decode. Each run has another length, as in generation.
fn problems() -> [(&'static str, OfRun); 3] {
    let prefill = |run: usize| Problem::new(4, 16, 2048 - run, 128, DType::Bf16);
    [
        ("prefill", prefill),
        ("causal prefill", |run| {
            Problem::new(4, 16, 2048 - run, 128, DType::Bf16).with_mask(Mask::Causal(Alignment::BottomRight))
        }),
        ("decode", |run| Problem::new(8, 32, 1, 128, DType::Bf16).with_key_heads(8).with_key_length(8192 + run)),
    ]
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The host's part of planning, which needs no GPU: config, grids, arguments.
pub(super) fn host_findings() -> (Value, Vec<Finding>) {
    let (mut values, mut findings) = (Vec::new(), Vec::new());
    for (name, problem) in problems() {
        let plan = |run: usize| {
            let problem = problem(run);
            let start = Instant::now();
            let config = heuristics::select(&problem, reference_gpu::TARGET);
            let planned = LaunchPlan::new(&problem, config, reference_gpu::TARGET);
            let time = start.elapsed();
            planned.map(|_| time)
        };
        let times: Result<Vec<_>, _> = (0..RUNS).map(plan).collect();
        match times {
            Ok(times) => {
                let time = microseconds(median(times));
                findings.push(Finding::new(
                    "plan, host part",
                    State::Well,
                    format!("{name}: {time:.1} us, median of new lengths"),
                ));
                values.push(json!({ "problem": name, "plan_us": time }));
            }
            Err(reasons) => {
                findings.push(Finding::new("plan, host part", State::Failed, format!("{name}: {reasons:?}")));
            }
        }
    }
    (Value::from(values), findings)
}

/// Plans and launches on the GPU, with the kernels loaded, beside the launch of a kernel that does nothing.
pub(super) fn probe(device: &Device) -> Result<Value, String> {
    let empty = EmptyKernel::new(device).map_err(|error| error.to_string())?;
    let floor = host_times(empty.stream(), RUNS, || empty.launch()).map_err(|error| error.to_string())?;
    let floor = floor.quantile(0.5) * 1e6;
    let measured = |(name, problem): (&str, OfRun)| {
        let mut case = measure(name, problem, device)?;
        case["empty_kernel_us"] = json!(floor);
        Ok(case)
    };
    problems().into_iter().map(measured).collect()
}

fn measure(name: &str, problem: OfRun, device: &Device) -> Result<Value, String> {
    let plan = |run: usize| Plan::new(&problem(run), device).map_err(|unsupported| unsupported.to_string());
    let first = plan(0)?;
    let mut plans = Vec::with_capacity(RUNS);
    let mut plan_times = Vec::with_capacity(RUNS);
    for run in 0..RUNS {
        let start = Instant::now();
        let planned = plan(run)?;
        plan_times.push(start.elapsed());
        plans.push(planned);
    }
    let error = |error: Error| error.to_string();
    let bound = Bound::new(&first, &Inputs::random(&problem(0), 0)).map_err(error)?;
    let launch_times = host_times(bound.stream(), RUNS, || bound.launch()).map_err(error)?;
    // Split-KV launches a second kernel, which costs what a launch costs.
    let kernels = if first.workspace_bytes() > 0 { 2 } else { 1 };
    Ok(json!({
        "problem": name,
        "kernels": first.report().kernel.as_ref().and_then(|kernel| kernel.config).map(|config| config.to_string()),
        "plan_us": microseconds(median(plan_times)),
        "launched_kernels": kernels,
        "launch_us": launch_times.quantile(0.5) * 1e6 / f64::from(kernels),
    }))
}

/// Holds the medians of a probe against their limits.
pub(super) fn judge(probe: &Value) -> Vec<Finding> {
    let mut findings = Vec::new();
    for case in probe.as_array().into_iter().flatten() {
        let name = case["problem"].as_str().unwrap_or_default();
        for (subject, field, limit) in
            [("plan, loaded", "plan_us", PLAN_LIMIT), ("launch of a kernel", "launch_us", LAUNCH_LIMIT)]
        {
            let (time, limit) = (case[field].as_f64().unwrap_or(f64::NAN), microseconds(limit));
            let passed = time <= limit;
            let floor = case["empty_kernel_us"].as_f64().filter(|_| field == "launch_us");
            let floor = floor.map(|floor| format!(", where a kernel that does nothing takes {floor:.1}"));
            let text = format!(
                "{name}: {} {time:.1} us of the host of at most {limit:.0}, median of {RUNS}{}",
                if passed { "pass," } else { "FAIL," },
                floor.unwrap_or_default()
            );
            findings.push(Finding::new(subject, if passed { State::Well } else { State::Failed }, text));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_decide() {
        let probe = json!([{ "problem": "p", "plan_us": 29.0, "launch_us": 3.5, "empty_kernel_us": 3.25 }]);
        let findings = judge(&probe);
        assert_eq!(findings[0].text, "p: pass, 29.0 us of the host of at most 30, median of 200");
        assert_eq!(
            findings[1].text,
            "p: FAIL, 3.5 us of the host of at most 3, median of 200, where a kernel that does nothing takes 3.2"
        );
        assert_eq!([findings[0].state, findings[1].state], [State::Well, State::Failed]);
        assert!(judge(&json!([{ "problem": "p" }])).iter().all(|finding| finding.state == State::Failed));
    }
}
