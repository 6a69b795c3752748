//! What no kernel can be faster than: the floors of a problem on a device, and what they say of targets.

mod device;
mod floors;
mod plot;
mod target;

pub use device::{DEVICES, DeviceError, RoofDevice};
pub use floors::{Floors, Limit};
pub use plot::{MeasuredPoint, plot};
pub use target::{Aim, HISTORIC_TARGETS, HistoricTarget, Judgement, Possibility, Target, TargetError};
