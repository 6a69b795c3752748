//! Operations as text, for dumps, errors and fault reports.

use core::fmt;

use crate::operation::{Op, Role};

impl fmt::Display for Op {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.entry().name)?;
        let mut result = Ok(());
        self.modifiers(&mut |name, value| {
            if result.is_ok() {
                result = write!(formatter, " {name}={value:?}");
            }
        });
        result?;
        let mut separator = " ";
        let mut result = Ok(());
        self.slots(&mut |slot| {
            if result.is_ok() && slot.role != Role::Base {
                result = write!(formatter, "{separator}{}={}", slot.name, slot.operand);
                separator = ", ";
            }
        });
        self.addresses(&mut |name, _, address| {
            if result.is_ok() {
                result = write!(formatter, "{separator}{name}={address}");
                separator = ", ";
            }
        });
        result
    }
}
