//! Table of devices. Rates are those of data sheets: dense, accumulated in `f32`, at the boost clock.

use flashcore_ir::Arch;
use flashcore_problem::{DType, DTypes};

use crate::testkit::gpu::{EXPONENTIALS_PER_CLOCK, Gpu};
use crate::util::nearest::unknown;

/// Bytes that an SM can take from the L2 cache in a clock: the width of its port. No cache feeds it faster, so
/// a floor from it holds whatever the cache can do.
const PORT_BYTES_PER_CLOCK: f64 = 64.0;

/// Peak rates of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct RoofDevice {
    /// The name on the command line.
    pub key: String,
    /// The name that people know.
    pub name: String,
    /// Source of the figures.
    pub source: String,
    /// Operations per second of the units that multiply `f16` and `bf16` matrices.
    pub tensor_flops: f64,
    /// Operations per second of the units that multiply `e4m3` and `e5m2` matrices; none where there are no such units.
    pub fp8_flops: Option<f64>,
    /// Operations per second of `f32` multiply-adds.
    pub vector_flops: f64,
    /// Bytes per second of memory.
    pub dram_bytes: f64,
    /// Bytes per second from the L2 cache, at most; infinite where nothing is known of it.
    pub l2_bytes: f64,
    /// Bytes that the L2 cache holds; 0 where nothing is known of it.
    pub l2_size: f64,
    /// Exponentials per second; infinite where they are ordinary arithmetic.
    pub exponentials: f64,
    /// Seconds of the smallest launch in a replayed graph, where it was measured.
    pub launch_seconds: Option<f64>,
}

/// A row of the table.
struct Sheet {
    key: &'static str,
    name: &'static str,
    num_sms: f64,
    /// In GHz.
    clock: f64,
    /// In TFLOP/s.
    tensor: f64,
    /// Lanes of `f32` arithmetic of an SM.
    lanes: f64,
    /// In GB/s.
    dram: f64,
    /// In MB.
    l2: f64,
}

/// Dense rates; the doubled ones of data sheets are those of sparse matrices. `GeForce` parts accumulate in `f32` at half
/// the rate of `f16`, the others do not.
const SHEETS: [Sheet; 8] = [
    sheet("l4", "NVIDIA L4", 58.0, 2.04, 121.0, 128.0, 300.0, 48.0),
    sheet("l40s", "NVIDIA L40S", 142.0, 2.52, 362.0, 128.0, 864.0, 96.0),
    sheet("a100", "NVIDIA A100 SXM 80 GB", 108.0, 1.41, 312.0, 64.0, 2039.0, 40.0),
    sheet("h100", "NVIDIA H100 SXM", 132.0, 1.83, 989.0, 128.0, 3350.0, 50.0),
    sheet("h200", "NVIDIA H200", 132.0, 1.83, 989.0, 128.0, 4800.0, 60.0),
    sheet("b200", "NVIDIA B200", 148.0, 1.85, 2250.0, 128.0, 8000.0, 126.0),
    sheet("rtx-4090", "NVIDIA GeForce RTX 4090", 128.0, 2.52, 165.2, 128.0, 1008.0, 72.0),
    sheet("rtx-5090", "NVIDIA GeForce RTX 5090", 170.0, 2.407, 209.5, 128.0, 1792.0, 96.0),
];

#[expect(clippy::too_many_arguments, reason = "a row of a table, whose columns are named above")]
const fn sheet(
    key: &'static str,
    name: &'static str,
    num_sms: f64,
    clock: f64,
    tensor: f64,
    lanes: f64,
    dram: f64,
    l2: f64,
) -> Sheet {
    Sheet { key, name, num_sms, clock, tensor, lanes, dram, l2 }
}

/// The names of the devices of the table, and of those that are measured.
pub const DEVICES: [&str; SHEETS.len() + 2] = {
    let mut names = ["this-cpu"; SHEETS.len() + 2];
    let mut row = 0;
    while row < SHEETS.len() {
        names[row] = SHEETS[row].key;
        row += 1;
    }
    names[SHEETS.len() + 1] = "this-gpu";
    names
};

/// Reason why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No device has the name.
    #[error("{}", unknown("device", .0, &DEVICES))]
    Unknown(String),
    /// There is no GPU to measure.
    #[error("this-gpu: {0}")]
    NoGpu(#[from] flashcore::Error),
}

impl RoofDevice {
    /// The device of a name; those of this machine are measured now.
    pub fn named(key: &str) -> Result<Self, DeviceError> {
        match key {
            "this-cpu" => Ok(Self::this_cpu()),
            "this-gpu" => Ok(Self::this_gpu(&Gpu::open(0)?)?),
            _ => SHEETS
                .iter()
                .find(|sheet| sheet.key == key)
                .map(Self::of_sheet)
                .ok_or_else(|| DeviceError::Unknown(key.to_owned())),
        }
    }

    /// All devices of the table.
    pub fn table() -> Vec<Self> {
        SHEETS.iter().map(Self::of_sheet).collect()
    }

    fn of_sheet(sheet: &Sheet) -> Self {
        let clocks = sheet.num_sms * sheet.clock * 1e9;
        Self {
            key: sheet.key.to_owned(),
            name: sheet.name.to_owned(),
            source: "data sheet".to_owned(),
            tensor_flops: sheet.tensor * 1e12,
            // Twice the rate of 16 bits from Ada and Hopper on; Ampere has none.
            fp8_flops: (sheet.key != "a100").then_some(2.0 * sheet.tensor * 1e12),
            vector_flops: clocks * sheet.lanes * 2.0,
            dram_bytes: sheet.dram * 1e9,
            l2_bytes: clocks * PORT_BYTES_PER_CLOCK,
            l2_size: sheet.l2 * 1e6,
            exponentials: clocks * EXPONENTIALS_PER_CLOCK,
            launch_seconds: None,
        }
    }

    /// This machine's processor: its multiply-adds and its memory, measured.
    pub fn this_cpu() -> Self {
        let threads = crate::lab::peak::working_threads();
        let level = flashcore_cpu::Level::best();
        let machine = crate::lab::record::Machine::cpu(&level.to_string(), threads, None);
        // The best of windows that are some time apart: what else runs here makes each of them smaller.
        let mut peaks = [DType::Bf16, DType::F32].map(|dtype| crate::lab::peak::Peak::of_cpu(level, dtype));
        for _ in 0..2 {
            for peak in &mut peaks {
                peak.look();
            }
        }
        let [tensor_flops, vector_flops] = peaks.map(|peak| peak.flops());
        Self {
            key: "this-cpu".to_owned(),
            name: machine.device,
            source: format!("measured on {threads} thread{}", if threads == 1 { "" } else { "s" }),
            tensor_flops,
            fp8_flops: None,
            vector_flops,
            dram_bytes: crate::timing::measured_cpu_bandwidth(threads),
            l2_bytes: f64::INFINITY,
            l2_size: 0.0,
            exponentials: f64::INFINITY,
            launch_seconds: None,
        }
    }

    /// The GPU of this machine: its memory and its smallest launch, measured; the rest by its clock.
    pub fn this_gpu(gpu: &Gpu) -> Result<Self, flashcore::Error> {
        let ceilings = gpu.ceilings()?;
        let arch: Option<Arch> = gpu.device().context().and_then(|context| context.device().arch().ok());
        let attributes = gpu.device().context().map(|context| context.device().attributes);
        let (num_sms, clock_khz, l2) = attributes.map_or((0, 0, 0), |has| (has.num_sms, has.clock_khz, has.l2_bytes));
        let clocks = f64::from(num_sms) * f64::from(clock_khz) * 1e3;
        Ok(Self {
            key: "this-gpu".to_owned(),
            name: gpu.device().to_string(),
            source: "memory and launch measured, the rest by its clock".to_owned(),
            tensor_flops: ceilings.flops,
            fp8_flops: arch.filter(|arch| arch.compute() >= 89).map(|_| 2.0 * ceilings.flops),
            vector_flops: clocks * 128.0 * 2.0,
            dram_bytes: ceilings.bytes,
            l2_bytes: clocks * PORT_BYTES_PER_CLOCK,
            l2_size: f64::from(l2),
            exponentials: ceilings.exponentials,
            launch_seconds: gpu.smallest_launch().ok(),
        })
    }

    /// Operations per second for problems of some types, or nothing where the device cannot multiply them: 16-bit types have
    /// matrix units, and so do FP8 queries on some devices. Keys and values of 8 bits under a wider query are multiplied as
    /// the query; by a processor, as `f32`.
    pub fn flops(&self, types: DTypes) -> Option<f64> {
        let is_cpu = self.exponentials.is_infinite();
        match types.query {
            // A processor widens f16 and FP8, and computes in f32.
            DType::Bf16 if is_cpu && types.are_same() => Some(self.tensor_flops),
            _ if is_cpu => Some(self.vector_flops),
            DType::F16 | DType::Bf16 => Some(self.tensor_flops),
            DType::F32 | DType::F64 => Some(self.vector_flops),
            DType::E4m3 | DType::E5m2 => self.fp8_flops,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_the_table_is_a_device() {
        for key in DEVICES.into_iter().filter(|key| !key.starts_with("this")) {
            assert_eq!(RoofDevice::named(key).expect("a device").key, key);
        }
        assert_eq!(
            RoofDevice::named("l5").expect_err("no device").to_string(),
            "there is no device `l5`; did you mean `l4`? There are l4, l40s, a100, h100, h200, b200, rtx-4090, rtx-5090, this-cpu, this-gpu"
        );
    }

    #[test]
    fn rates_follow_the_types() {
        let rate = |key: &str, types: &str| {
            let rate = RoofDevice::named(key).expect("a device").flops(types.parse().expect("types"));
            rate.map(|rate| (rate / 1e12).round())
        };
        assert_eq!(rate("h200", "bf16"), Some(989.0));
        assert_eq!(rate("h200", "bf16 kv e4m3"), Some(989.0));
        assert_eq!(rate("h200", "e4m3 out bf16"), Some(1978.0));
        assert_eq!((rate("a100", "bf16 kv e4m3"), rate("a100", "e4m3 out bf16")), (Some(312.0), None));
        let cpu = RoofDevice {
            tensor_flops: 4.0,
            fp8_flops: None,
            vector_flops: 2.0,
            exponentials: f64::INFINITY,
            ..RoofDevice::named("l4").expect("a device")
        };
        let of = |types: &str| cpu.flops(types.parse().expect("types"));
        assert_eq!((of("bf16"), of("bf16 kv e4m3"), of("e4m3 out bf16")), (Some(4.0), Some(2.0), Some(2.0)));
    }

    #[test]
    fn tensor_rates_agree_with_clocks() {
        // Operations of an SM's tensor cores in a clock, by architecture: what the data sheets multiply.
        let per_clock = |key: &str| match key {
            "a100" => 2048.0,
            "h100" | "h200" => 4096.0,
            "b200" => 8192.0,
            // Ada; a GeForce has half of it with sums in f32.
            "rtx-4090" | "rtx-5090" => 512.0,
            _ => 1024.0,
        };
        for sheet in &SHEETS {
            let by_clock = sheet.num_sms * sheet.clock * per_clock(sheet.key) / 1e3;
            assert!((by_clock / sheet.tensor - 1.0).abs() < 0.02, "{}: {by_clock} TFLOP/s by clock", sheet.key);
        }
    }
}
