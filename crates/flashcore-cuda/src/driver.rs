//! The driver: its library, version and devices.

use core::ffi::{CStr, c_char, c_int};
use core::fmt;
use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::sync::{Mutex, OnceLock, Weak};

use flashcore_ir::target::ptx_of_cuda;
use libloading::Library;

use crate::api::{Api, Code};
use crate::context;
use crate::device::Device;
use crate::error::{CudaError, Failure, code};

/// The oldest driver that this crate works with: the first that compiles `sm_90a` (PTX 8.0) and has every function that
/// is called here. It came in December 2022.
pub const OLDEST_DRIVER: DriverVersion = DriverVersion(12_000);

/// The names the driver may have, in the order in which they are tried.
pub(crate) const LIBRARIES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// The version of CUDA that a driver implements, 13000 for 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverVersion(pub i32);

impl DriverVersion {
    /// The newest PTX version that drivers of this version compile.
    pub fn ptx(self) -> (u8, u8) {
        ptx_of_cuda(((self.0 / 1000) as u8, (self.0 % 1000 / 10) as u8))
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// NVIDIA's driver, loaded and initialised.
pub struct Driver {
    pub(crate) api: Api,
    /// One context per device, so that every user of the device learns of a sticky error.
    pub(crate) contexts: Mutex<HashMap<i32, Weak<context::Inner>>>,
    version: DriverVersion,
    release: Option<String>,
    devices: usize,
}

impl Driver {
    /// The driver of this machine. Loaded once; a machine without one returns [`CudaError::NoDriver`] each time.
    pub fn load() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        DRIVER.get_or_init(Self::load_now).as_ref().map_err(Clone::clone)
    }

    fn load_now() -> Result<Self, CudaError> {
        let library = open()?;
        // The version first: a function that an older driver lacks is not a defect of it.
        // SAFETY: the symbol is the function of this signature in every driver there is; see `api`.
        let get_version = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> Code>(b"cuDriverGetVersion\0") }
            .map_err(|_| CudaError::MissingSymbol { symbol: "cuDriverGetVersion" })?;
        let mut version = 0;
        // SAFETY: the function writes one integer and may be called before `cuInit`.
        let answer = unsafe { get_version(&raw mut version) };
        if answer == code::SUCCESS && DriverVersion(version) < OLDEST_DRIVER {
            return Err(CudaError::DriverTooOld { found: DriverVersion(version), needed: OLDEST_DRIVER });
        }
        let api = Api::resolve(&library).map_err(|symbol| CudaError::MissingSymbol { symbol })?;
        // The functions are called as long as the process lives, so the library is never unloaded.
        std::mem::forget(library);
        Self::initialise(api, release())
    }

    /// A driver from the table of its functions.
    pub(crate) fn initialise(api: Api, release: Option<String>) -> Result<Self, CudaError> {
        let mut driver = Self { api, contexts: Mutex::default(), version: DriverVersion(0), release, devices: 0 };
        // SAFETY: the function takes no pointers.
        match unsafe { (driver.api.cuInit)(0) } {
            code::SUCCESS => {}
            code::NO_DEVICE => return Err(CudaError::NoDevice),
            // The library that the toolkit gives to linkers on machines without a driver.
            code::STUB_LIBRARY => return Err(CudaError::NoDriver { reason: "only its stub is installed".to_owned() }),
            other => return Err(driver.failure("cuInit", other).into()),
        }
        // SAFETY: the functions write one integer each.
        let (version, count) = unsafe {
            let (mut version, mut count) = (0, 0);
            driver.check("cuDriverGetVersion", (driver.api.cuDriverGetVersion)(&raw mut version))?;
            driver.check("cuDeviceGetCount", (driver.api.cuDeviceGetCount)(&raw mut count))?;
            (version, count)
        };
        if count == 0 {
            return Err(CudaError::NoDevice);
        }
        driver.version = DriverVersion(version);
        driver.devices = count as usize;
        Ok(driver)
    }

    /// The version of CUDA that it implements.
    pub const fn version(&self) -> DriverVersion {
        self.version
    }

    /// The release of the driver, like `580.65.06`, where the system tells. Two releases can implement one version of
    /// CUDA with different compilers.
    pub fn release(&self) -> Option<&str> {
        self.release.as_deref()
    }

    /// Version and release in one text, part of the cache key of compiled kernels.
    pub fn fingerprint(&self) -> String {
        format!("{} {}", self.version.0, self.release().unwrap_or("unknown"))
    }

    /// The number of GPUs that it sees.
    pub const fn device_count(&self) -> usize {
        self.devices
    }

    /// One GPU, by its number from 0.
    pub fn device(&'static self, ordinal: usize) -> Result<Device, CudaError> {
        Device::get(self, ordinal)
    }

    /// All GPUs.
    pub fn devices(&'static self) -> Result<Vec<Device>, CudaError> {
        (0..self.devices).map(|ordinal| self.device(ordinal)).collect()
    }

    /// The failure that a code stands for.
    pub(crate) fn failure(&self, call: &'static str, code: Code) -> Failure {
        let name = Self::describe(self.api.cuGetErrorName, code).unwrap_or_else(|| format!("CUDA error {code}"));
        let text = Self::describe(self.api.cuGetErrorString, code)
            .unwrap_or_else(|| "the driver has no words for it".to_owned());
        Failure { call, code, name, text, last_launch: None }
    }

    /// Ok or the failure, for calls outside of any context.
    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.failure(call, code).into()) }
    }

    fn describe(function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code, code: Code) -> Option<String> {
        let mut text = core::ptr::null();
        // SAFETY: the function takes any code and writes one pointer.
        let answer = unsafe { function(code, &raw mut text) };
        if answer != code::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: on success the pointer is to a text with a terminating zero that is never freed.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Driver")
            .field("version", &self.version)
            .field("release", &self.release)
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

fn open() -> Result<Library, CudaError> {
    let mut reason = String::new();
    for name in LIBRARIES {
        // SAFETY: loading NVIDIA's driver runs its initialisers, which are made to be run in any process.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            // The loader's message is the source of libloading's error, which only says that it failed.
            Err(error) => reason = error.source().map_or_else(|| error.to_string(), ToString::to_string),
        }
    }
    Err(CudaError::NoDriver { reason })
}

/// The release of the library that was loaded, else of the kernel module: they differ where a container brings its own
/// library, and the library holds the compiler.
fn release() -> Option<String> {
    let loaded = fs::read_to_string("/proc/self/maps").ok().and_then(|maps| release_in_maps(&maps));
    loaded.or_else(|| fs::read_to_string("/sys/module/nvidia/version").ok().map(|text| text.trim().to_owned()))
}

/// The release in the name of the mapped file, `libcuda.so.580.65.06`.
fn release_in_maps(maps: &str) -> Option<String> {
    let names = maps.lines().filter_map(|line| line.rsplit('/').next()?.trim().strip_prefix("libcuda.so."));
    names.filter(|release| release.contains('.')).map(str::to_owned).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so() {
        let loaded = Driver::load();
        // On a machine with a GPU this test checks nothing: everything else here is about that case.
        let Err(error) = loaded else { return };
        if cfg!(target_os = "linux") {
            let reason = "libcuda.so.1: cannot open shared object file: No such file or directory".to_owned();
            assert_eq!(error, CudaError::NoDriver { reason: reason.clone() });
            assert_eq!(
                error.to_string(),
                format!(
                    "no NVIDIA driver: {reason} (tried libcuda.so, libcuda.so.1); install one: only the cpu backend needs none"
                )
            );
        }
        assert_eq!(Driver::load().unwrap_err(), error);
    }

    #[test]
    fn the_release_is_in_the_name_of_the_library() {
        let maps = "7f00-7f01 r--p 00000000 fe:01 1  /usr/lib/libc.so.6\n\
                    7f10-7f11 r--p 00000000 fe:01 2  /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06\n\
                    7f20-7f21 rw-p 00000000 00:00 0\n";
        assert_eq!(release_in_maps(maps), Some("580.65.06".to_owned()));
        assert_eq!(release_in_maps("7f10-7f11 r--p 0 fe:01 2  /usr/lib/wsl/lib/libcuda.so.1\n"), None);
        assert_eq!(release_in_maps(""), None);
    }

    #[test]
    fn versions_read_like_nvidias() {
        assert_eq!(DriverVersion(13_000).to_string(), "13.0");
        assert_eq!(DriverVersion(12_080).to_string(), "12.8");
    }

    /// R535 is 12.2, R550 is 12.4; a driver newer than this crate compiles what older ones do.
    #[test]
    fn drivers_compile_ptx_of_their_release() {
        let versions = [12_000, 12_020, 12_040, 12_060, 12_080, 13_000, 14_010].map(|cuda| DriverVersion(cuda).ptx());
        assert_eq!(versions, [(8, 0), (8, 2), (8, 4), (8, 5), (8, 7), (9, 0), (9, 0)]);
        assert_eq!(OLDEST_DRIVER.ptx(), (8, 0));
    }
}
