//! Bottleneck of a kernel, in words, with the numbers that show it.

use serde::{Deserialize, Serialize};

use super::metrics::Metric;
use crate::lab::roofline::{Floors, RoofDevice};
use crate::lab::svg::short;

/// The resource that bounds a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bottleneck {
    /// Multiplying matrices.
    Tensor,
    /// Exponentials.
    Exp,
    /// Memory, or the caches.
    Memory,
    /// Shared memory.
    Shared,
    /// Waiting: there is too little to do at once.
    Latency,
    /// Starting at all.
    Launch,
}

impl Bottleneck {
    /// Name of the bottleneck.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Tensor => "tensor-bound",
            Self::Exp => "exp-bound",
            Self::Memory => "memory-bound",
            Self::Shared => "shared-memory-bound",
            Self::Latency => "latency-bound",
            Self::Launch => "launch-bound",
        }
    }
}

/// A pipe that is this busy is what binds: those that are said to be full rarely pass 90 %.
const BUSY_PERCENT: f64 = 60.0;
/// A launch that takes no more than so many times the smallest is mostly launch.
const LAUNCHES: f64 = 2.0;

/// Evidence for a verdict.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// Counters of the launch.
    pub metrics: &'a [Metric],
    /// Floors of the problem on the device.
    pub floors: &'a Floors,
    /// The device.
    pub device: &'a RoofDevice,
    /// Seconds of a launch, where it was timed.
    pub seconds: Option<f64>,
    /// CTAs of the launch, and SMs, where they are known.
    pub ctas: Option<(u32, u32)>,
}

/// Names the bottleneck of a kernel, and the reason.
pub fn classify(evidence: &Evidence<'_>) -> (Bottleneck, String) {
    let hardware =
        |name: &str| evidence.metrics.iter().find(|metric| metric.name == name).and_then(|metric| metric.hardware);
    if let (Some(seconds), Some(launch)) = (evidence.seconds, evidence.device.launch_seconds)
        && seconds < LAUNCHES * launch
    {
        let (us, least) = (short(seconds * 1e6), short(launch * 1e6));
        return (Bottleneck::Launch, format!("the kernel takes {us} us, and an empty launch takes {least} us"));
    }
    let pipes = [
        (Bottleneck::Tensor, "tensor pipe", hardware("tensor pipe")),
        (Bottleneck::Exp, "exp pipe", hardware("exp pipe")),
        (Bottleneck::Memory, "DRAM", hardware("DRAM throughput")),
        (Bottleneck::Memory, "L2 cache", hardware("L2 throughput")),
        (Bottleneck::Shared, "shared-memory pipe", hardware("shared pipe")),
    ];
    let measured: Vec<(Bottleneck, &str, f64)> =
        pipes.iter().filter_map(|(bottleneck, name, value)| value.map(|value| (*bottleneck, *name, value))).collect();
    if !measured.is_empty() {
        return by_counters(evidence, &measured);
    }
    by_floors(evidence)
}

fn by_counters(evidence: &Evidence<'_>, pipes: &[(Bottleneck, &str, f64)]) -> (Bottleneck, String) {
    let listed: Vec<String> = pipes.iter().map(|(_, name, value)| format!("{name} {value:.0} %")).collect();
    let listed = listed.join(", ");
    let busiest = pipes.iter().copied().fold(pipes[0], |most, pipe| if pipe.2 > most.2 { pipe } else { most });
    if busiest.2 >= BUSY_PERCENT {
        return (busiest.0, format!("the {} is busiest: {listed}", busiest.1));
    }
    let stall = evidence
        .metrics
        .iter()
        .filter(|metric| metric.name.starts_with("stall: "))
        .filter_map(|metric| metric.hardware.map(|value| (&metric.name["stall: ".len()..], value)))
        .fold(None, |most: Option<(&str, f64)>, stall| match most {
            Some(most) if most.1 >= stall.1 => Some(most),
            _ => Some(stall),
        });
    let stall =
        stall.map_or(String::new(), |(name, value)| format!("; warps wait most for: {name} ({value:.1} warps)"));
    (Bottleneck::Latency, format!("no pipe is busy: {listed}{}{stall}", few_ctas(evidence)))
}

/// A launch that leaves SMs without work cannot keep any pipe busy.
fn few_ctas(evidence: &Evidence<'_>) -> String {
    evidence
        .ctas
        .filter(|(ctas, num_sms)| ctas < num_sms)
        .map_or(String::new(), |(ctas, num_sms)| format!("; {ctas} CTAs on {num_sms} SMs"))
}

/// Without counters: which floor is nearest.
fn by_floors(evidence: &Evidence<'_>) -> (Bottleneck, String) {
    let floors = evidence.floors;
    let needs = [
        (Bottleneck::Tensor, "products", floors.tensor),
        (Bottleneck::Exp, "exponentials", floors.exponentials),
        (Bottleneck::Memory, "bytes from memory", floors.dram),
    ];
    let listed: Vec<String> = needs.iter().map(|(_, name, time)| format!("{name} {} us", short(time * 1e6))).collect();
    let listed = listed.join(", ");
    let largest = needs.iter().copied().fold(needs[0], |most, need| if need.2 > most.2 { need } else { most });
    match evidence.seconds {
        Some(seconds) if 100.0 * largest.2 / seconds < BUSY_PERCENT => {
            let us = short(seconds * 1e6);
            (Bottleneck::Latency, format!("it takes {us} us, more than its floors: {listed}{}", few_ctas(evidence)))
        }
        Some(seconds) => (largest.0, format!("it takes {} us; floors: {listed}", short(seconds * 1e6))),
        None => (largest.0, format!("the largest floor on {}: {listed}", evidence.device.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::parse_shape;
    use flashcore_problem::DType;

    fn metric(name: &str, hardware: f64) -> Metric {
        let (name, unit) = (name.to_owned(), String::new());
        Metric { name, unit, hardware: Some(hardware), simulator: None, difference: None, gate: None }
    }

    #[test]
    fn verdicts_follow_from_numbers() {
        let device = RoofDevice { launch_seconds: Some(2e-6), ..RoofDevice::named("h200").expect("a device") };
        let floors = Floors::of(&parse_shape("4x16x2048x128", DType::F16).expect("a shape"), &device);
        let check = |metrics: &[Metric], seconds, ctas, expected: (Bottleneck, &str)| {
            let evidence = Evidence { metrics, floors: &floors, device: &device, seconds, ctas };
            let (bottleneck, reason) = classify(&evidence);
            assert_eq!((bottleneck, reason.as_str()), expected);
        };
        let pipes = [metric("tensor pipe", 71.0), metric("exp pipe", 30.0), metric("DRAM throughput", 5.0)];
        check(
            &pipes,
            Some(2e-4),
            None,
            (Bottleneck::Tensor, "the tensor pipe is busiest: tensor pipe 71 %, exp pipe 30 %, DRAM 5 %"),
        );
        let idle = [metric("tensor pipe", 20.0), metric("stall: barrier", 1.5), metric("stall: wait", 0.5)];
        check(
            &idle,
            Some(2e-4),
            Some((64, 132)),
            (
                Bottleneck::Latency,
                "no pipe is busy: tensor pipe 20 %; 64 CTAs on 132 SMs; warps wait most for: barrier (1.5 warps)",
            ),
        );
        check(
            &pipes,
            Some(3e-6),
            None,
            (Bottleneck::Launch, "the kernel takes 3.00 us, and an empty launch takes 2.00 us"),
        );
        check(
            &[],
            None,
            None,
            (
                Bottleneck::Tensor,
                "the largest floor on NVIDIA H200: products 139 us, exponentials 69.5 us, bytes from memory 28.0 us",
            ),
        );
        check(
            &[],
            Some(1e-3),
            None,
            (
                Bottleneck::Latency,
                "it takes 1000 us, more than its floors: products 139 us, exponentials 69.5 us, bytes from memory 28.0 us",
            ),
        );
    }
}
