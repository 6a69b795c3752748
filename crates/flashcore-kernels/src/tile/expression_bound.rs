//! An expression and its constants, which a kernel receives like its other parameters.

use flashcore_ir::types::{F32, S32};
use flashcore_ir::{Builder, Reg};
use flashcore_problem::expression::{Expression, Kind, MOST_CONSTANTS, Slot};

/// An expression with the registers of its constants.
#[derive(Debug, Clone, Copy)]
pub struct BoundExpression {
    pub(super) expression: &'static Expression,
    constants: [Option<Constant>; MOST_CONSTANTS],
}

/// The register of a constant.
#[derive(Debug, Clone, Copy)]
enum Constant {
    Number(Reg<F32>),
    Integer(Reg<S32>),
}

impl BoundExpression {
    /// Declares the constants as parameters and loads them, once for the whole kernel: they are the same for all threads.
    pub(crate) fn load(k: &mut Builder, field: &str, expression: &'static Expression) -> Self {
        let mut constants = [None; MOST_CONSTANTS];
        for (slot, kind) in expression.slots() {
            let name = format!("{field}_constant_{}", slot.index());
            constants[slot.index()] = Some(match kind {
                Kind::Number => Constant::Number(k.parameter(&name)),
                Kind::Integer | Kind::Truth => Constant::Integer(k.parameter(&name)),
            });
        }
        Self { expression, constants }
    }

    /// A number.
    pub(super) const fn number(&self, slot: Slot) -> Reg<F32> {
        match self.constants[slot.index()] {
            Some(Constant::Number(register)) => register,
            // `load` gives each slot of the expression a register of its kind.
            Some(Constant::Integer(_)) | None => unreachable!(),
        }
    }

    /// An integer.
    pub(super) const fn integer(&self, slot: Slot) -> Reg<S32> {
        match self.constants[slot.index()] {
            Some(Constant::Integer(register)) => register,
            Some(Constant::Number(_)) | None => unreachable!(),
        }
    }
}
