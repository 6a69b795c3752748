//! Devices by kind and number.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use api::Device;

use crate::status::Failure;

/// The CPU; the ordinal is ignored.
pub const FLASHCORE_DEVICE_CPU: i32 = 0;
/// The GPU of the ordinal, from 0.
pub const FLASHCORE_DEVICE_CUDA: i32 = 1;
/// The first GPU that can be used, else the CPU; the ordinal is ignored. flashcore_plan_describe() says which it is.
pub const FLASHCORE_DEVICE_BEST: i32 = 2;

/// The device of a kind and a number. GPUs stay open once they are: opening one takes some hundred milliseconds.
pub(crate) fn open(kind: i32, ordinal: i32) -> Result<Device, Failure> {
    static GPUS: Mutex<BTreeMap<i32, Device>> = Mutex::new(BTreeMap::new());
    match kind {
        FLASHCORE_DEVICE_CPU => Ok(Device::cpu()),
        FLASHCORE_DEVICE_CUDA => {
            let number = usize::try_from(ordinal)
                .map_err(|_| Failure::argument(format!("ordinal is {ordinal}; GPUs are numbered from 0")))?;
            // Opened before the lock, which is then never held for long and never taken in a forked child.
            let device = Device::cuda(number)?;
            GPUS.lock().unwrap_or_else(PoisonError::into_inner).insert(ordinal, device.clone());
            Ok(device)
        }
        FLASHCORE_DEVICE_BEST => match open(FLASHCORE_DEVICE_CUDA, 0) {
            Ok(device) => Ok(device),
            Err(_) => Ok(Device::best()),
        },
        other => Err(Failure::argument(format!("device_kind is {other}; it must be one of FLASHCORE_DEVICE_*"))),
    }
}
