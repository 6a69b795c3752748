//! The processor: its features, the level that is used, its measured peak.

use flashcore_bench::lab::peak::{Peak, working_threads};
use flashcore_cpu::Level;
use flashcore_problem::DType;
use serde_json::json;

use super::finding::{Finding, Section, State};

pub(super) fn section() -> Section {
    let information = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = field(&information, "model name").unwrap_or(std::env::consts::ARCH).to_owned();
    let threads = working_threads();
    let logical = information.lines().filter(|line| line.starts_with("processor")).count().max(threads);
    let mut features = detected();
    // The standard library cannot tell of these; Linux lists them where it saves their registers.
    let flags: Vec<&str> = field(&information, "flags").unwrap_or_default().split_whitespace().collect();
    features.extend(["amx_tile", "amx_bf16", "amx_int8"].map(|name| (name, flags.contains(&name))));
    let names = |wanted: bool| -> Vec<&str> {
        features.iter().filter(|(_, usable)| *usable == wanted).map(|(name, _)| *name).collect()
    };
    let (usable, missing) = (names(true), names(false));
    let mut peak = Peak::of_cpu(Level::best(), DType::F32);
    // Another window, some time later: what else runs here makes each of them smaller.
    peak.look();
    let peak = peak.flops();
    let levels = Level::available().iter().map(ToString::to_string).collect::<Vec<_>>();
    let level = Level::default_level();
    let value = json!({
        "model": model,
        "threads": threads,
        "logical_processors": logical,
        "usable": usable,
        "missing": missing,
        "level": level.as_ref().ok().map(ToString::to_string),
        "levels": levels,
        "f32_flops": peak,
    });
    let listed = |names: &[&str]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let level = match &level {
        Ok(level) => {
            let text = format!("{level} is used; FLASHCORE_CPU_LEVEL chooses one of {}", levels.join(", "));
            Finding::new("cpu level", State::Well, text)
        }
        Err(error) => Finding::new("cpu level", State::Failed, error.to_string()),
    };
    let plural = if threads == 1 { "" } else { "s" };
    let findings = vec![
        Finding::new("cpu", State::Well, format!("{model}, {threads} of {logical} threads are used")),
        Finding::new(
            "cpu features",
            State::Well,
            format!("present: {}; absent: {}", listed(&usable), listed(&missing)),
        ),
        level,
        Finding::new(
            "cpu peak",
            State::Well,
            format!("{:.0} GFLOP/s in f32 multiply-adds on {threads} thread{plural}, measured", peak / 1e9),
        ),
    ];
    Section { key: "cpu", value, findings }
}

/// The first value of a field of `/proc/cpuinfo`.
fn field<'a>(information: &'a str, name: &str) -> Option<&'a str> {
    let values = information.lines().filter_map(|line| line.split_once(':'));
    values.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim()).next()
}

/// Features that processor and operating system together allow, asked of the processor.
#[cfg(target_arch = "x86_64")]
fn detected() -> Vec<(&'static str, bool)> {
    vec![
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512_vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512_bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512_fp16", is_x86_feature_detected!("avx512fp16")),
    ]
}

#[cfg(target_arch = "aarch64")]
fn detected() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected as has;
    vec![
        ("neon", has!("neon")),
        ("fp16", has!("fp16")),
        ("bf16", has!("bf16")),
        ("i8mm", has!("i8mm")),
        ("sve", has!("sve")),
    ]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detected() -> Vec<(&'static str, bool)> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_first_processor() {
        let information = "processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\n";
        assert_eq!(field(information, "model name"), Some("A: B"));
        assert_eq!(field(information, "flags"), Some("fpu amx_tile"));
        assert_eq!(field(information, "model"), None);
    }
}
