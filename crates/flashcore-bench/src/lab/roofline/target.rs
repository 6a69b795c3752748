//! Targets, and whether a device can meet them.

use core::fmt;
use core::str::FromStr;

use flashcore_problem::{DTypes, Problem};

use super::device::RoofDevice;
use super::floors::Floors;
use crate::testkit::{ShapeError, parse_workload, shape_text};

/// The part of the matrix units' rate beyond which a target is called implausible. Plain matrix products of 8192 cubed
/// reach 0.80 of an H200's data sheet; attention, which also has exponentials to wait for, has been seen at 0.75.
const PLAUSIBLE: f64 = 0.8;

/// A time or a rate for a shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// The problem.
    pub problem: Problem,
    /// The aim.
    pub aim: Aim,
}

/// Aim of a target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aim {
    /// To take no longer than these seconds.
    Seconds(f64),
    /// To do as many operations per second.
    Flops(f64),
}

/// Reason why a text is no target.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TargetError {
    /// No `@`.
    #[error("`{0}` is not a target; write SHAPE@TIME or SHAPE@RATE, such as 1x8x512x64@5us or 1x8x512x64@150tflops")]
    Form(String),
    /// A number or unit that is none.
    #[error("`{0}` is neither a time in ns, us, ms or s nor a rate in gflops or tflops")]
    Aim(String),
    /// The shape is none.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

impl FromStr for Aim {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let unknown = || TargetError::Aim(text.to_owned());
        let split = text.find(|letter: char| letter.is_ascii_alphabetic()).ok_or_else(unknown)?;
        let (number, unit) = text.split_at(split);
        let number: f64 = number.trim().parse().map_err(|_| unknown())?;
        if !(number.is_finite() && number > 0.0) {
            return Err(unknown());
        }
        Ok(match unit.to_lowercase().as_str() {
            "ns" => Self::Seconds(number / 1e9),
            "us" | "µs" => Self::Seconds(number / 1e6),
            "ms" => Self::Seconds(number / 1e3),
            "s" => Self::Seconds(number),
            "gflops" | "gflop/s" => Self::Flops(number * 1e9),
            "tflops" | "tflop/s" => Self::Flops(number * 1e12),
            _ => return Err(unknown()),
        })
    }
}

impl Target {
    /// Reads `SHAPE@TIME` or `SHAPE@RATE`.
    pub fn parse(text: &str, types: DTypes) -> Result<Self, TargetError> {
        let (shape, aim) = text.split_once('@').ok_or_else(|| TargetError::Form(text.to_owned()))?;
        Ok(Self { problem: parse_workload(shape.trim(), types)?.problem, aim: aim.trim().parse()? })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = shape_text(&self.problem);
        match self.aim {
            Aim::Seconds(seconds) => write!(formatter, "{shape} in {} us", crate::lab::svg::short(seconds * 1e6)),
            Aim::Flops(flops) => write!(formatter, "{shape} at {} TFLOP/s", crate::lab::svg::short(flops / 1e12)),
        }
    }
}

/// Verdict on a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Possibility {
    /// The physics allows it, from cold memory too.
    Possible,
    /// Only with the inputs in the cache.
    HotOnly,
    /// Allowed, and beyond what anything has been seen to reach.
    Implausible,
    /// Faster than the device is.
    Impossible,
}

impl fmt::Display for Possibility {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Possible => "possible",
            Self::HotOnly => "hot only",
            Self::Implausible => "IMPLAUSIBLE",
            Self::Impossible => "IMPOSSIBLE",
        })
    }
}

/// A target held against a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// Seconds that are allowed.
    pub seconds: f64,
    /// Operations per second that are needed.
    pub flops: f64,
    /// Of the rate of the arithmetic units.
    pub part_of_peak: f64,
    /// Of the bandwidth of memory, when nothing is cached.
    pub part_of_dram: f64,
    /// The verdict.
    pub possibility: Possibility,
    /// Reason for it.
    pub reason: String,
}

impl Judgement {
    /// Of a target on a device.
    pub fn of(target: &Target, device: &RoofDevice) -> Self {
        let floors = Floors::of(&target.problem, device);
        let seconds = match target.aim {
            Aim::Seconds(seconds) => seconds,
            Aim::Flops(flops) => floors.work.flops / flops,
        };
        let us = |time: f64| crate::lab::svg::short(time * 1e6);
        let (hot, limit) = floors.hot();
        let part_of_peak = floors.tensor / seconds;
        let cold = if seconds < floors.dram_reads.max(hot) {
            Some(format!("cold, reading the inputs alone takes {} us", us(floors.dram_reads)))
        } else if seconds < floors.dram {
            Some(format!("cold, it takes {} us unless the output stays in the cache", us(floors.dram)))
        } else {
            None
        };
        let (possibility, reason) = if seconds < hot {
            (Possibility::Impossible, format!("the {limit} floor is {} us", us(hot)))
        } else if part_of_peak > PLAUSIBLE {
            let needs = format!("needs {:.0} % of the arithmetic peak", 100.0 * part_of_peak);
            (Possibility::Implausible, cold.map_or_else(|| needs.clone(), |cold| format!("{needs}; {cold}")))
        } else if let Some(cold) = cold {
            (Possibility::HotOnly, cold)
        } else {
            (Possibility::Possible, format!("the floor is {} us", us(floors.cold().0)))
        };
        Self {
            seconds,
            flops: floors.work.flops / seconds,
            part_of_peak,
            part_of_dram: floors.dram / seconds,
            possibility,
            reason,
        }
    }
}

/// A target of the project's history, set before anybody had computed a floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoricTarget {
    /// The target, as [`Target::parse`] reads it.
    pub target: &'static str,
    /// Name of the target.
    pub name: &'static str,
}

/// The targets of the project's history, all for an L4.
pub const HISTORIC_TARGETS: [HistoricTarget; 11] = [
    HistoricTarget { target: "1x8x512x64@5us", name: "mission shape under 5 us" },
    HistoricTarget { target: "1x8x512x64@1.73us", name: "15 times faster than 25.9 us" },
    HistoricTarget { target: "1x8x512x64@15us", name: "realistic, 15 to 30 us" },
    HistoricTarget { target: "1x8x512x64@40us", name: "under 40 us" },
    HistoricTarget { target: "1x8x512x64@150tflops", name: "effective rate above 150 TFLOP/s" },
    HistoricTarget { target: "1x8x512x64@80tflops", name: "effective rate above 80 TFLOP/s" },
    HistoricTarget { target: "2x8x256x64@5us", name: "mission shape under 5 us" },
    HistoricTarget { target: "2x8x512x64@12us", name: "under 12 us" },
    HistoricTarget { target: "2x8x512x64@25us", name: "under 25 us" },
    HistoricTarget { target: "8x8x512x64@80us", name: "under 80 us" },
    HistoricTarget { target: "4x16x2048x128@30us", name: "under 30 us" },
];

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::DType;

    fn f16() -> DTypes {
        Problem::new(1, 1, 1, 8, DType::F16).dtypes()
    }

    #[test]
    fn the_historic_targets_on_an_l4() {
        let device = RoofDevice::named("l4").expect("a device");
        let found: Vec<(&str, Possibility)> = HISTORIC_TARGETS
            .iter()
            .map(|historic| {
                let target = Target::parse(historic.target, f16()).expect("a target");
                (historic.target, Judgement::of(&target, &device).possibility)
            })
            .collect();
        let expected = [
            ("1x8x512x64@5us", Possibility::Implausible),
            ("1x8x512x64@1.73us", Possibility::Impossible),
            ("1x8x512x64@15us", Possibility::Possible),
            ("1x8x512x64@40us", Possibility::Possible),
            ("1x8x512x64@150tflops", Possibility::Impossible),
            ("1x8x512x64@80tflops", Possibility::HotOnly),
            ("2x8x256x64@5us", Possibility::HotOnly),
            ("2x8x512x64@12us", Possibility::HotOnly),
            ("2x8x512x64@25us", Possibility::Possible),
            ("8x8x512x64@80us", Possibility::Possible),
            ("4x16x2048x128@30us", Possibility::Impossible),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn reasons_name_the_floor() {
        let check = |device: &str, target: &str, expected: &str| {
            let device = RoofDevice::named(device).expect("a device");
            let target = Target::parse(target, f16()).expect("a target");
            assert_eq!(Judgement::of(&target, &device).reason, expected);
        };
        check(
            "l4",
            "1x8x512x64@5us",
            "needs 89 % of the arithmetic peak; cold, reading the inputs alone takes 5.24 us",
        );
        check("l4", "2x8x512x64@12us", "cold, it takes 14.0 us unless the output stays in the cache");
        check("h200", "4x16x2048x128@30us", "the products floor is 139 us");
        check("h200", "1x8x512x64@5us", "the floor is 0.54 us");
    }

    #[test]
    fn targets_that_are_none_say_why() {
        let check = |text: &str, expected: TargetError| {
            assert_eq!(Target::parse(text, f16()), Err(expected), "{text}");
        };
        check("1x8x512x64", TargetError::Form("1x8x512x64".to_owned()));
        check("1x8x512x64@5", TargetError::Aim("5".to_owned()));
        check("1x8x512x64@-5us", TargetError::Aim("-5us".to_owned()));
        check("1x8x512x64@5 parsecs", TargetError::Aim("5 parsecs".to_owned()));
    }
}
