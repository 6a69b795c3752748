//! A GPU: what it is and what it has.

use core::ffi::{CStr, c_char};
use core::fmt;

use flashcore_ir::Arch;

use crate::arch;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::sys::{CUdevice, CUdevice_attribute as Attribute, CUuuid};

/// Room for the name of a device.
const NAME_BYTES: usize = 256;

/// A GPU that the driver sees. Asking for it creates nothing on it.
#[derive(Debug, Clone)]
pub struct Device {
    pub(crate) driver: &'static Driver,
    pub(crate) raw: CUdevice,
    /// Its number, from 0, among those that this process sees.
    pub ordinal: usize,
    /// Its name, like `NVIDIA H200`.
    pub name: String,
    /// Its identity, the same in every process and under every numbering.
    pub uuid: Uuid,
    /// Compute capability, (9, 0) for 9.0.
    pub compute: (u32, u32),
    /// Bytes of memory.
    pub memory_bytes: usize,
    /// What it has.
    pub attributes: Attributes,
}

/// What a GPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// SMs.
    pub num_sms: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u32,
    /// Bytes of shared memory that one CTA can have, if it asks for them.
    pub shared_bytes_per_cta: u32,
    /// Bytes of shared memory of one SM.
    pub shared_bytes_per_sm: u32,
    /// Registers of one SM.
    pub registers_per_sm: u32,
    /// The highest clock of the SMs, in kHz; like all below, 0 where the driver does not say.
    pub clock_khz: u32,
    /// The highest clock of the memory, in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
    /// Bytes of L2 that can be set aside for data that is to stay.
    pub persisting_l2_bytes: u32,
}

/// The identity of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(formatter, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl Device {
    pub(crate) fn get(driver: &'static Driver, ordinal: usize) -> Result<Self, CudaError> {
        let count = driver.device_count();
        if ordinal >= count {
            return Err(CudaError::UnknownDevice { ordinal, count });
        }
        let api = &driver.api;
        let mut raw = 0;
        // SAFETY: the function writes one handle.
        driver.check("cuDeviceGet", unsafe { (api.cuDeviceGet)(&raw mut raw, ordinal as i32) })?;
        let mut name = [0 as c_char; NAME_BYTES];
        // SAFETY: the function writes a text with a terminating zero of at most as many bytes as it is told.
        let answer = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr(), NAME_BYTES as i32 - 1, raw) };
        driver.check("cuDeviceGetName", answer)?;
        // SAFETY: the last byte of the array is zero whatever was written before it.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the function writes 16 bytes.
        driver.check("cuDeviceGetUuid_v2", unsafe { (api.cuDeviceGetUuid_v2)(&raw mut uuid, raw) })?;
        let mut memory_bytes = 0;
        // SAFETY: the function writes one size.
        let answer = unsafe { (api.cuDeviceTotalMem_v2)(&raw mut memory_bytes, raw) };
        driver.check("cuDeviceTotalMem_v2", answer)?;

        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: the function writes one integer.
            let answer = unsafe { (api.cuDeviceGetAttribute)(&raw mut value, attribute, raw) };
            driver.check("cuDeviceGetAttribute", answer).map(|()| value as u32)
        };
        // Figures for reports, without which everything works.
        let optional = |name| attribute(name).unwrap_or(0);
        Ok(Self {
            driver,
            raw,
            ordinal,
            name,
            uuid: Uuid(uuid.bytes.map(|byte| byte as u8)),
            compute: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            memory_bytes,
            attributes: Attributes {
                num_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
                shared_bytes_per_cta: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
                shared_bytes_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
                registers_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
                clock_khz: optional(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
                memory_clock_khz: optional(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
                memory_bus_bits: optional(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
                persisting_l2_bytes: optional(Attribute::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE),
            },
        })
    }

    /// The driver it belongs to.
    pub const fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The newest architecture to generate for, unless a kernel wants `sm_90a` and [`runs`](Self::runs) says yes.
    pub fn arch(&self) -> Result<Arch, CudaError> {
        arch::best(self.compute)
            .ok_or_else(|| CudaError::DeviceTooOld { name: self.name.clone(), compute: self.compute })
    }

    /// The architecture with everything that it has: kernels for it run on no other.
    pub fn specific_arch(&self) -> Result<Arch, CudaError> {
        arch::specific(self.compute)
            .ok_or_else(|| CudaError::DeviceTooOld { name: self.name.clone(), compute: self.compute })
    }

    /// Whether it runs kernels generated for `arch`.
    pub fn runs(&self, arch: Arch) -> bool {
        arch::runs(self.compute, arch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_read_like_nvidia_smis() {
        let bytes = core::array::from_fn(|index| 0x11 * index as u8);
        assert_eq!(Uuid(bytes).to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
