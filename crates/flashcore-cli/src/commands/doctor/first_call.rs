//! Latency of a kernel's first call, on a machine that has never seen it and from the cache on disk.
//!
//! Each is measured in a process of its own, as a user meets it: the first with an empty cache folder, the second with
//! what the first left there. The driver's own cache is in a folder there, too.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use flashcore::{Device, Plan, PlanOptions, SelfCheckPolicy};
use flashcore_bench::testkit::bound::Bound;
use flashcore_bench::util::temporary_folder::TemporaryFolder;
use flashcore_cuda::Driver;
use flashcore_cuda::cache::Source;
use flashcore_problem::{Alignment, DType, Inputs, Mask, Problem};
use serde_json::{Value, json};

use super::finding::{Finding, Section, State};
use super::loaded;

const NEVER_SEEN_LIMIT: Duration = Duration::from_secs(1);
const FROM_DISK_LIMIT: Duration = Duration::from_millis(10);

pub(super) fn section() -> Section {
    let (host, mut findings) = loaded::host_findings();
    let (mut value, gpu_findings) = gpu_timings();
    value["host"] = host;
    findings.extend(gpu_findings);
    Section { key: "timings", value, findings }
}

fn gpu_timings() -> (Value, Vec<Finding>) {
    if let Err(error) = Driver::load() {
        let finding = Finding::new("first call", State::Absent, format!("not timed: {error}"));
        return (json!({ "reason": error.to_string() }), vec![finding]);
    }
    match measure() {
        Ok([never_seen, from_disk]) => {
            let (first, mut findings) = judge("never seen", &never_seen, "compiled", NEVER_SEEN_LIMIT);
            let (second, more) = judge("from disk", &from_disk, "disk", FROM_DISK_LIMIT);
            findings.extend(more);
            if std::env::var_os("CUDA_CACHE_DISABLE").is_some_and(|value| value == "1") {
                let text = "CUDA_CACHE_DISABLE switches the driver's own cache off, which keeps the machine code of `hopper` kernels; unset it";
                findings.push(Finding::new("from disk", State::Note, text));
            }
            findings.extend(loaded::judge(&second["loaded"]));
            (json!({ "never_seen": first, "from_disk": second }), findings)
        }
        Err(reason) => {
            let finding = Finding::new("first call", State::Unusable, reason.as_str());
            (json!({ "reason": reason }), vec![finding])
        }
    }
}

/// Measurements of two processes, one after the other.
fn measure() -> Result<[Value; 2], String> {
    let folder = TemporaryFolder::new("doctor").map_err(|error| error.to_string())?;
    Ok([run_probe(folder.path())?, run_probe(folder.path())?])
}

fn run_probe(cache: &Path) -> Result<Value, String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let output = Command::new(program)
        .args(["doctor", "--first-call-probe"])
        .env("FLASHCORE_CACHE_DIR", cache)
        .env_remove("FLASHCORE_CACHE")
        .env("CUDA_CACHE_PATH", cache.join("driver"))
        .output()
        .map_err(|error| format!("cannot start a process to time: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("the timed process printed no JSON: {error}"))
}

/// Holds each call of a probe against the limit.
fn judge(subject: &str, probe: &Value, source: &str, limit: Duration) -> (Value, Vec<Finding>) {
    let limit = limit.as_secs_f64() * 1e3;
    let number = |value: &Value, name: &str| value[name].as_f64().unwrap_or(f64::NAN);
    let mut probe = probe.clone();
    let mut findings = Vec::new();
    for call in probe["calls"].as_array_mut().into_iter().flatten() {
        let total = number(call, "total_ms");
        // A time of something else is no time of this.
        let right_source = call["source"] == source;
        let passed = right_source && total <= limit;
        let found = call["source"].as_str().unwrap_or_default();
        let unexpected =
            if right_source { String::new() } else { format!("; the kernel came from `{found}`, not `{source}`") };
        let text = format!(
            "{}: {total:.1} ms of at most {limit:.0}: {} {:.1} print, {:.1} {}, {:.1} load, {:.1} generate and \
             self-check ({}), {:.2} first launch{unexpected}",
            call["problem"].as_str().unwrap_or_default(),
            if passed { "pass," } else { "FAIL," },
            number(call, "print_ms"),
            number(call, "compile_ms"),
            if source == "disk" { "cache" } else { "JIT and cache" },
            number(call, "load_ms"),
            number(call, "other_ms"),
            call["self_check"].as_str().unwrap_or_default(),
            number(call, "launch_ms"),
        );
        call["limit_ms"] = json!(limit);
        call["passed"] = json!(passed);
        findings.push(Finding::new(subject, if passed { State::Well } else { State::Failed }, text));
    }
    if findings.is_empty() {
        findings.push(Finding::new(subject, State::Failed, "the timed process reported no times"));
    }
    findings.push(Finding::new(
        subject,
        State::Well,
        format!("not counted: {:.0} ms for driver and context, and tensors to the GPU", number(&probe, "open_ms")),
    ));
    (probe, findings)
}

/// Measures and prints, in a process of its own.
pub(super) fn probe() -> Result<Value, String> {
    let start = Instant::now();
    let device = Device::cuda(0).map_err(|error| error.to_string())?;
    let open_ms = milliseconds(start.elapsed());
    let mut wide = Problem::new(1, 8, 512, 128, DType::Bf16);
    wide.mask = Mask::Causal(Alignment::BottomRight);
    let problems = [Problem::new(1, 8, 512, 64, DType::F16), wide];
    let calls: Vec<Value> = problems.iter().map(|problem| call(problem, &device)).collect::<Result<_, _>>()?;
    let loaded = loaded::probe(&device)?;
    Ok(json!({ "device": device.to_string(), "open_ms": open_ms, "calls": calls, "loaded": loaded }))
}

fn call(problem: &Problem, device: &Device) -> Result<Value, String> {
    let inputs = Inputs::random(problem, 0);
    let options = PlanOptions::default().with_self_check(SelfCheckPolicy::On);
    let start = Instant::now();
    let plan = Plan::with_options(problem, device, options).map_err(|unsupported| unsupported.to_string())?;
    let planned = start.elapsed();
    let bound = Bound::new(&plan, &inputs).map_err(|error| error.to_string())?;
    let start = Instant::now();
    bound.launch().map_err(|error| error.to_string())?;
    bound.stream().synchronize().map_err(|error| error.to_string())?;
    let launched = start.elapsed();
    let kernel = plan.report().kernel.as_ref().ok_or("the plan has no kernel")?;
    let timings = kernel.timings;
    let other = planned.saturating_sub(timings.print + timings.compile + timings.load);
    Ok(json!({
        "problem": problem.to_string(),
        "kernel": kernel.name,
        "source": match kernel.source {
            Source::Compiled => "compiled",
            Source::Disk => "disk",
            Source::Memory => "memory",
        },
        "self_check": kernel.self_check.to_string(),
        "print_ms": milliseconds(timings.print),
        "compile_ms": milliseconds(timings.compile),
        "load_ms": milliseconds(timings.load),
        "other_ms": milliseconds(other),
        "launch_ms": milliseconds(launched),
        "total_ms": milliseconds(planned + launched),
    }))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, total: f64, expected: &str, state: State) {
        let call = json!({
            "problem": "p", "source": source, "self_check": "passed now", "print_ms": 1.0, "compile_ms": 2.0,
            "load_ms": 3.0, "other_ms": 4.0, "launch_ms": 0.5, "total_ms": total,
        });
        let (value, findings) = judge("s", &json!({ "open_ms": 200.0, "calls": [call] }), "disk", FROM_DISK_LIMIT);
        assert_eq!((findings[0].text.as_str(), findings[0].state), (expected, state));
        assert_eq!(value["calls"][0]["passed"], state == State::Well);
    }

    #[test]
    fn limits_decide() {
        let rest = "1.0 print, 2.0 cache, 3.0 load, 4.0 generate and self-check (passed now), 0.50 first launch";
        check("disk", 9.9, &format!("p: 9.9 ms of at most 10: pass, {rest}"), State::Well);
        check("disk", 10.5, &format!("p: 10.5 ms of at most 10: FAIL, {rest}"), State::Failed);
        let other = format!("p: 9.9 ms of at most 10: FAIL, {rest}; the kernel came from `compiled`, not `disk`");
        check("compiled", 9.9, &other, State::Failed);
    }

    #[test]
    fn a_probe_without_calls_fails() {
        let (_, findings) = judge("s", &json!({}), "disk", FROM_DISK_LIMIT);
        assert_eq!(findings[0].state, State::Failed);
    }
}
