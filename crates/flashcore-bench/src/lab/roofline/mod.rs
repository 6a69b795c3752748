//! Roofline: the floors of a problem on a device, below which no kernel can be, and the targets that they rule out.

mod device;
mod floors;
mod plot;
mod target;

pub use device::{DEVICES, DeviceError, RoofDevice};
pub use floors::{Floors, Limit};
pub use plot::{MeasuredPoint, plot};
pub use target::{Aim, HISTORIC_TARGETS, HistoricTarget, Judgement, Possibility, Target, TargetError};
