//! Arithmetic. PTX defines all of it exactly, down to the bits, except which NaN comes out.

use flashcore_ir::Type;
use flashcore_ir::forms::of_registers;

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, Form};
use crate::testkit::conformance::inputs::Fill;

const ROWS: [&str; 14] =
    ["Add", "Sub", "Mul", "MulHigh", "MulWide", "Mad", "MadWide", "Fma", "Div", "Rem", "Min", "Max", "Neg", "Abs"];

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for row in ROWS {
        for op in of_registers(row) {
            // What an integer divided by zero gives PTX leaves to the machine: that is a case of its own.
            let ty = op.type_choice().map(|(ty, _)| ty);
            let divides = matches!(row, "Div" | "Rem") && ty != Some(Type::F32);
            let divisor = |name: &str| (divides && name == "b").then_some(Fill::NonZero { operand: 1, of: 2 });
            elementwise::add(list, &Form { tolerance: Tolerance::Exact, fill: &divisor, ..Form::new(op) });
        }
    }
    by_zero(list);
    nearly_cancelling(list);
}

/// PTX: "Division by zero yields an unspecified, machine-specific value." Our table promises one, so it is asked for.
fn by_zero(list: &mut Vec<ConformanceCase>) {
    for row in ["Div", "Rem"] {
        for op in of_registers(row).into_iter().filter(|op| op.type_choice().is_some_and(|(ty, _)| ty == Type::U32)) {
            let zero = |name: &str| (name == "b").then_some(Fill::Among(&[0]));
            list.push(Form { modifiers: "u32 by zero".to_owned(), fill: &zero, ..Form::new(op) }.case());
        }
    }
}

/// Sums of numbers of like magnitude, where the rounding of a fused operation shows.
fn nearly_cancelling(list: &mut Vec<ConformanceCase>) {
    for op in of_registers("Fma") {
        let Some((ty, allowed)) = op.type_choice() else { continue };
        for (name, fill) in [("of normal numbers", Fill::Normal), ("of tiny numbers", Fill::Tiny)] {
            if allowed.contains(&ty) {
                let (modifiers, tolerance) = (format!("{ty} {name}"), Tolerance::Exact);
                list.push(Form { modifiers, tolerance, fill: &|_| Some(fill), ..Form::new(op.clone()) }.case());
            }
        }
    }
}
