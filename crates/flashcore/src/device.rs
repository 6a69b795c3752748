//! Where attention is computed.

use std::fmt;
use std::sync::Arc;

use flashcore_cuda::{CudaError, Driver};

use crate::Error;
use crate::cuda_backend::Gpu;

/// Where attention is computed: the CPU, or one GPU. Clones are the same device.
///
/// ```
/// use flashcore::Device;
///
/// let best = Device::best();
/// println!("{best}"); // "cpu (16 threads): no NVIDIA driver: ..."
/// let device = best.device;
/// # assert!(!device.to_string().is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct Device(pub(crate) Kind);

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Cpu,
    Cuda(Arc<Gpu>),
}

impl Device {
    /// The CPU, on all threads of rayon's pool.
    pub const fn cpu() -> Self {
        Self(Kind::Cpu)
    }

    /// The GPU of this number, from 0, among those that the process sees.
    ///
    /// The first call for a GPU makes its primary context, which everything else in the process shares and which takes
    /// the driver some hundred milliseconds. No driver, no GPU, a wrong number or a GPU that is too old are ordinary
    /// errors.
    pub fn cuda(ordinal: usize) -> Result<Self, Error> {
        Ok(Self(Kind::Cuda(Gpu::open(ordinal)?)))
    }

    /// The first GPU that can be used, else the CPU; with the reason.
    ///
    /// This is the only place where one device stands in for another, and it says so. A plan never changes its device.
    pub fn best() -> Best {
        let mut refused = None;
        for ordinal in 0..Driver::load().map_or(1, Driver::device_count) {
            match Self::cuda(ordinal) {
                Ok(device) => return Best { device, no_gpu: None },
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Best { device: Self::cpu(), no_gpu: refused }
    }

    /// What there is: every GPU that the driver sees, or why there is none, and the CPU. Opens none of them.
    pub fn list() -> Devices {
        let (gpus, no_gpu) = match Driver::load().and_then(Driver::devices) {
            Ok(gpus) => (gpus, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let gpu = |gpu: flashcore_cuda::Device| DeviceInfo {
            ordinal: Some(gpu.ordinal),
            name: gpu.name,
            compute: Some(gpu.compute),
            memory_bytes: Some(gpu.memory_bytes),
        };
        let cpu = DeviceInfo { ordinal: None, name: cpu_name(), compute: None, memory_bytes: None };
        Devices { devices: gpus.into_iter().map(gpu).chain([cpu]).collect(), no_gpu }
    }

    /// Whether it is a GPU.
    pub const fn is_cuda(&self) -> bool {
        matches!(self.0, Kind::Cuda(_))
    }

    /// The primary context of the GPU, to make streams and buffers in; `None` for the CPU.
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
            Kind::Cuda(gpu) => gpu.fmt(formatter),
        }
    }
}

fn cpu_name() -> String {
    format!("cpu ({} threads)", rayon::current_num_threads())
}

/// The device that [`Device::best`] chose.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Best {
    /// The device.
    pub device: Device,
    /// Why it is not a GPU; `None` if it is one.
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

/// What [`Device::list`] found.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Devices {
    /// The GPUs by number, then the CPU.
    pub devices: Vec<DeviceInfo>,
    /// Why there is no GPU among them; `None` if there is one.
    pub no_gpu: Option<CudaError>,
}

/// What is known of a device without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The number for [`Device::cuda`]; `None` for the CPU.
    pub ordinal: Option<usize>,
    /// Its name.
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
