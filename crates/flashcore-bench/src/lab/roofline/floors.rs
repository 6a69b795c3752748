//! Floors of one problem on one device, by resource.

use core::fmt;

use flashcore_problem::Problem;
use serde::Serialize;

use super::device::RoofDevice;
use crate::floor::Work;

/// Seconds that a problem takes at least, by each thing that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Floors {
    /// The work.
    pub work: Work,
    /// Multiplying matrices.
    pub tensor: f64,
    /// Every input read from memory and every output written to it, once.
    pub dram: f64,
    /// Every input read from memory, with the output left in a cache.
    pub dram_reads: f64,
    /// Every byte through the ports of the SMs once.
    pub l2: f64,
    /// Exponentials.
    pub exponentials: f64,
    /// Starting a kernel at all, where that was measured.
    pub launch: Option<f64>,
}

/// The resource that bounds a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Multiplying matrices.
    Tensor,
    /// Memory.
    Dram,
    /// The cache.
    L2,
    /// Exponentials.
    Exponentials,
    /// The launch.
    Launch,
}

impl fmt::Display for Limit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            // Of tensor cores, or of the vector units of a CPU.
            Self::Tensor => "products",
            Self::Dram => "DRAM",
            Self::L2 => "L2",
            Self::Exponentials => "exp",
            Self::Launch => "launch",
        })
    }
}

impl Floors {
    /// Floors of a problem on a device.
    pub fn of(problem: &Problem, device: &RoofDevice) -> Self {
        let work = Work::of(problem);
        let output = problem.output_shape().elements().unwrap_or(0) * problem.dtypes().output.size_bytes();
        let reads = work.bytes - output as f64;
        Self {
            work,
            // A rate that a device lacks is no lower bound.
            tensor: device.flops(problem.dtypes()).map_or(0.0, |rate| work.flops / rate),
            dram: work.bytes / device.dram_bytes,
            dram_reads: reads / device.dram_bytes,
            l2: work.bytes / device.l2_bytes,
            exponentials: work.exponentials / device.exponentials,
            launch: device.launch_seconds,
        }
    }

    /// With everything in the cache: the floor and what it is.
    pub fn hot(&self) -> (f64, Limit) {
        largest(&[
            (self.tensor, Limit::Tensor),
            (self.l2, Limit::L2),
            (self.exponentials, Limit::Exponentials),
            (self.launch.unwrap_or(0.0), Limit::Launch),
        ])
    }

    /// With nothing in the cache: the floor and what it is.
    pub fn cold(&self) -> (f64, Limit) {
        let (hot, limit) = self.hot();
        largest(&[(hot, limit), (self.dram, Limit::Dram)])
    }

    /// Operations for each byte of memory.
    pub fn intensity(&self) -> f64 {
        self.work.flops / self.work.bytes
    }
}

fn largest(times: &[(f64, Limit)]) -> (f64, Limit) {
    times.iter().copied().fold((0.0, Limit::Tensor), |largest, time| if time.0 > largest.0 { time } else { largest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::parse_shape;
    use flashcore_problem::DType;

    #[test]
    fn the_floors_of_the_seed_shapes_on_an_l4() {
        let device = RoofDevice::named("l4").expect("a device");
        // Microseconds, in hundredths: tensor, DRAM cold, exponentials.
        let check = |shape: &str, expected: [f64; 3]| {
            let floors = Floors::of(&parse_shape(shape, DType::F16).expect("a shape"), &device);
            let found = [floors.tensor, floors.dram, floors.exponentials].map(|time| (time * 1e8).round() / 100.0);
            assert_eq!(found, expected, "{shape}");
        };
        check("1x8x512x64", [4.44, 6.99, 1.11]);
        check("2x8x256x64", [2.22, 6.99, 0.55]);
        check("2x8x512x64", [8.87, 13.98, 2.22]);
        check("8x8x512x64", [35.5, 55.92, 8.86]);
        check("4x16x2048x128", [1135.86, 447.39, 141.8]);
    }

    #[test]
    fn a_cpu_has_no_tensor_cores_to_be_bound_by() {
        let device = RoofDevice { dram_bytes: 1e10, ..RoofDevice::named("h200").expect("a device") };
        let cpu = RoofDevice {
            key: "this-cpu".to_owned(),
            l2_bytes: f64::INFINITY,
            exponentials: f64::INFINITY,
            launch_seconds: None,
            ..device
        };
        let floors = Floors::of(&parse_shape("1x8x512x64", DType::F32).expect("a shape"), &cpu);
        assert_eq!(floors.hot().1.to_string(), "products");
    }

    #[test]
    fn cold_is_never_faster_than_hot() {
        for device in RoofDevice::table() {
            let floors = Floors::of(&parse_shape("1x8x512x64", DType::F16).expect("a shape"), &device);
            assert!(floors.cold().0 >= floors.hot().0 && floors.dram > floors.dram_reads, "{}", device.key);
        }
    }
}
