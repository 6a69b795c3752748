//! Devices: the CPU and the GPUs of this machine.

use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use flashcore_cuda::Driver;

use crate::Error;
#[cfg(feature = "cuda")]
use crate::gpu::Gpu;
#[cfg(feature = "cuda")]
use crate::process::CUDA;

/// A device that computes attention: the CPU, or one GPU. Clones are the same device.
///
/// ```
/// use flashcore::Device;
///
/// let best = Device::best_or_reason();
/// println!("{best}"); // "cpu (level avx512, 16 threads): no NVIDIA driver: ..."
/// let device = best.device;
/// # assert!(!device.to_string().is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct Device(pub(crate) Kind);

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Arc<Gpu>),
}

impl Device {
    /// The CPU, on all threads of rayon's pool. Plans for it need the cargo feature `cpu`.
    pub const fn cpu() -> Self {
        Self(Kind::Cpu)
    }

    /// The GPU of this number, from 0, among those that the process sees.
    ///
    /// The first call for a GPU makes its primary context, which everything else in the process shares and which takes
    /// the driver some hundred milliseconds. No driver, no GPU, a wrong number or a GPU that is too old are ordinary
    /// errors, and so are a process that was forked from one that uses CUDA, and a program that was built without the
    /// cargo feature `cuda`.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, clippy::missing_const_for_fn, reason = "no GPUs"))]
    pub fn cuda(ordinal: usize) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        return Ok(Self(Kind::Cuda(Gpu::open(driver()?, ordinal)?)));
        #[cfg(not(feature = "cuda"))]
        Err(Error::NotBuilt { backend: "cuda" })
    }

    /// The first GPU that can be used, else the CPU. [`best_or_reason`](Self::best_or_reason) says why it is no GPU.
    pub fn best() -> Self {
        Self::best_or_reason().device
    }

    /// The first GPU that can be used, else the CPU; with the reason.
    ///
    /// This is the only place where one device stands in for another, and it says so. A plan never changes its device.
    pub fn best_or_reason() -> Best {
        let mut refused = None;
        for ordinal in 0..gpu_count() {
            match Self::cuda(ordinal) {
                Ok(device) => return Best { device, no_gpu: None },
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Best { device: Self::cpu(), no_gpu: refused }
    }

    /// Every GPU that the driver sees, or the reason why there is none, and the CPU. Opens none of them.
    pub fn list() -> Devices {
        let (mut devices, no_gpu) = match gpus() {
            Ok(gpus) => (gpus, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        devices.push(DeviceInfo { ordinal: None, name: cpu_name(), compute: None, memory_bytes: None });
        Devices { devices, no_gpu }
    }

    /// True for a GPU.
    pub const fn is_cuda(&self) -> bool {
        match self.0 {
            Kind::Cpu => false,
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => true,
        }
    }

    /// The primary context of the GPU, to make streams and buffers in; `None` for the CPU.
    #[cfg(feature = "cuda")]
    pub fn context(&self) -> Option<&flashcore_cuda::Context> {
        match &self.0 {
            Kind::Cpu => None,
            Kind::Cuda(gpu) => Some(gpu.context()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Cpu => formatter.write_str(&cpu_name()),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => gpu.fmt(formatter),
        }
    }
}

/// GPUs to try; 1 where there is no telling, for the reason why that one cannot be had.
fn gpu_count() -> usize {
    #[cfg(feature = "cuda")]
    return driver().map_or(1, Driver::device_count);
    #[cfg(not(feature = "cuda"))]
    1
}

/// Every GPU that the driver sees.
fn gpus() -> Result<Vec<DeviceInfo>, Error> {
    #[cfg(feature = "cuda")]
    return Ok(driver()?
        .devices()?
        .into_iter()
        .map(|gpu| DeviceInfo {
            ordinal: Some(gpu.ordinal),
            name: gpu.name,
            compute: Some(gpu.compute),
            memory_bytes: Some(gpu.memory_bytes),
        })
        .collect());
    #[cfg(not(feature = "cuda"))]
    Err(Error::NotBuilt { backend: "cuda" })
}

#[cfg(feature = "cpu")]
fn cpu_name() -> String {
    let threads = flashcore_cpu::thread_count();
    let plural = if threads == 1 { "" } else { "s" };
    // A variable may ask for a level that this machine lacks; what computes then says so.
    flashcore_cpu::Level::default_level().map_or_else(
        |_| format!("cpu ({threads} thread{plural})"),
        |level| format!("cpu (level {level}, {threads} thread{plural})"),
    )
}

#[cfg(not(feature = "cpu"))]
fn cpu_name() -> String {
    "cpu".to_owned()
}

/// The driver, which belongs to this process from now on.
#[cfg(feature = "cuda")]
fn driver() -> Result<&'static Driver, Error> {
    CUDA.claim()?;
    Ok(Driver::load().inspect_err(|_| CUDA.release())?)
}

/// The device that [`Device::best_or_reason`] chose.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Best {
    /// The device.
    pub device: Device,
    /// Reason why it is not a GPU; `None` if it is one.
    pub no_gpu: Option<Error>,
}

impl fmt::Display for Best {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.no_gpu {
            None => write!(formatter, "{}", self.device),
            Some(reason) => write!(formatter, "{}: {reason}", self.device),
        }
    }
}

/// Devices that [`Device::list`] found.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Devices {
    /// The GPUs by number, then the CPU.
    pub devices: Vec<DeviceInfo>,
    /// Reason why there is no GPU among them; `None` if there is one.
    pub no_gpu: Option<Error>,
}

/// Facts about a device that are known without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The number for [`Device::cuda`]; `None` for the CPU.
    pub ordinal: Option<usize>,
    /// The name.
    pub name: String,
    /// The compute capability of a GPU, (9, 0) for 9.0.
    pub compute: Option<(u32, u32)>,
    /// Bytes of a GPU's memory.
    pub memory_bytes: Option<usize>,
}

impl DeviceInfo {
    /// Opens the device.
    pub fn open(&self) -> Result<Device, Error> {
        self.ordinal.map_or(Ok(Device::cpu()), Device::cuda)
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_says_its_level() {
        let level = flashcore_cpu::Level::default_level().expect("a level");
        let threads = flashcore_cpu::thread_count();
        let plural = if threads == 1 { "" } else { "s" };
        assert_eq!(Device::cpu().to_string(), format!("cpu (level {level}, {threads} thread{plural})"));
    }
}
