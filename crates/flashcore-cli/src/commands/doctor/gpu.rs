//! Driver and GPUs.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use flashcore_cuda::{Context, CudaError, Device, Driver};
use serde_json::{Value, json};

use super::finding::{Finding, Section, State};

/// Timeout of nvidia-smi, which hangs with a GPU that does.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn sections() -> [Section; 2] {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(error) => {
            let state = match error {
                CudaError::NoDriver { .. } | CudaError::NoDevice => State::Absent,
                _ => State::Unusable,
            };
            let text = error.to_string();
            let value = json!({ "version": Value::Null, "reason": text });
            let findings = vec![Finding::new("driver", state, text)];
            let gpus = Section { key: "gpus", value: json!([]), findings: Vec::new() };
            return [Section { key: "driver", value, findings }, gpus];
        }
    };
    let (version, release) = (driver.version().to_string(), driver.release());
    let text = format!("CUDA {version}, release {}", release.unwrap_or("unknown"));
    let value = json!({ "version": version, "release": release });
    let driver_section = Section { key: "driver", value, findings: vec![Finding::new("driver", State::Well, text)] };
    let states = current_states();
    let (mut values, mut findings) = (Vec::new(), Vec::new());
    for ordinal in 0..driver.device_count() {
        let subject = format!("gpu {ordinal}");
        match driver.device(ordinal) {
            Ok(device) => {
                let current = states.iter().find(|state| state.uuid == device.uuid.to_string());
                let (value, found) = examine(&subject, &device, current);
                values.push(value);
                findings.extend(found);
            }
            Err(error) => {
                values.push(json!({ "ordinal": ordinal, "reason": error.to_string() }));
                findings.push(Finding::new(subject, State::Unusable, error.to_string()));
            }
        }
    }
    [driver_section, Section { key: "gpus", value: Value::Array(values), findings }]
}

fn examine(subject: &str, device: &Device, current: Option<&CurrentState>) -> (Value, Vec<Finding>) {
    let has = device.attributes;
    let (major, minor) = device.compute;
    let kib = |bytes: u32| bytes / 1024;
    let mhz = |khz: u32| khz / 1000;
    let mut findings = vec![Finding::new(
        subject,
        State::Well,
        format!(
            "{}, compute capability {major}.{minor}, {} SMs, {:.1} GiB memory, {} KiB L2, {} KiB shared \
             memory per CTA, clocks up to {} MHz, memory up to {} MHz",
            device.name,
            has.num_sms,
            device.memory_bytes as f64 / f64::from(1 << 30),
            kib(has.l2_bytes),
            kib(has.shared_bytes_per_cta),
            mhz(has.clock_khz),
            mhz(has.memory_clock_khz),
        ),
    )];
    // Asking for free memory takes a context, and a context is what everything else needs.
    let opened = Context::new(device).and_then(|context| context.memory());
    let (kernels, free) = match (device.arch(), &opened) {
        (_, Err(error)) => (Finding::new(subject, State::Unusable, error.to_string()), None),
        (Err(too_old), Ok((free, _))) => (Finding::new(subject, State::Note, too_old.to_string()), Some(*free)),
        (Ok(arch), Ok((free, _))) => {
            let free_gib = *free as f64 / f64::from(1 << 30);
            (
                Finding::new(subject, State::Well, format!("runs kernels for {arch}, {free_gib:.1} GiB free")),
                Some(*free),
            )
        }
    };
    findings.push(kernels);
    findings.push(match current {
        Some(now) => Finding::new(subject, State::Well, now.words()),
        None => {
            Finding::new(subject, State::Absent, "clocks, temperature and power are unknown: nvidia-smi reports none")
        }
    });
    let value = json!({
        "ordinal": device.ordinal,
        "name": device.name,
        "uuid": device.uuid.to_string(),
        "compute": format!("{major}.{minor}"),
        "num_sms": has.num_sms,
        "memory_bytes": device.memory_bytes,
        "free_bytes": free,
        "l2_bytes": has.l2_bytes,
        "shared_bytes_per_cta": has.shared_bytes_per_cta,
        "clock_mhz": mhz(has.clock_khz),
        "memory_clock_mhz": mhz(has.memory_clock_khz),
        "usable": opened.is_ok(),
        "reason": opened.err().map(|error| error.to_string()),
        "now": current.map(CurrentState::value),
    });
    (value, findings)
}

/// State of a GPU in nvidia-smi's own words: a number, or that it has none.
#[derive(Debug, PartialEq, Eq)]
struct CurrentState {
    uuid: String,
    clock_mhz: String,
    memory_clock_mhz: String,
    celsius: String,
    watts: String,
    most_watts: String,
}

const QUERY: &str = "--query-gpu=uuid,clocks.sm,clocks.mem,temperature.gpu,power.draw,power.limit";

impl CurrentState {
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<String> = line.split(',').map(|field| field.trim().to_owned()).collect();
        let [uuid, clock_mhz, memory_clock_mhz, celsius, watts, most_watts] = fields.try_into().ok()?;
        Some(Self { uuid, clock_mhz, memory_clock_mhz, celsius, watts, most_watts })
    }

    fn words(&self) -> String {
        let Self { clock_mhz, memory_clock_mhz, celsius, watts, most_watts, .. } = self;
        format!("now at {clock_mhz} MHz, memory {memory_clock_mhz} MHz, {celsius} °C, {watts} of {most_watts} W")
    }

    fn value(&self) -> Value {
        let number = |text: &str| text.parse::<f64>().ok();
        json!({
            "clock_mhz": number(&self.clock_mhz),
            "memory_clock_mhz": number(&self.memory_clock_mhz),
            "celsius": number(&self.celsius),
            "watts": number(&self.watts),
            "most_watts": number(&self.most_watts),
        })
    }
}

/// States by nvidia-smi; none where it is missing, fails or hangs.
fn current_states() -> Vec<CurrentState> {
    let mut command = Command::new("nvidia-smi");
    command.args([QUERY, "--format=csv,noheader,nounits"]);
    let Ok(mut child) = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn() else {
        return Vec::new();
    };
    let start = Instant::now();
    while let Ok(None) = child.try_wait() {
        if start.elapsed() > PATIENCE {
            // It may have ended by itself meanwhile; then there is nothing to end.
            let _ = child.kill();
            let _ = child.wait();
            return Vec::new();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let said = child.wait_with_output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&said).lines().filter_map(CurrentState::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_nvidia_smi() {
        let state = CurrentState::parse("GPU-1, 1980, 3201, 31, 76.52, 700.00").unwrap();
        assert_eq!(state.words(), "now at 1980 MHz, memory 3201 MHz, 31 °C, 76.52 of 700.00 W");
        let silent = CurrentState::parse("GPU-1, 1980, 3201, 31, [N/A], [N/A]").unwrap();
        assert_eq!(silent.value()["watts"], Value::Null);
        assert_eq!(CurrentState::parse("No devices were found"), None);
    }
}
