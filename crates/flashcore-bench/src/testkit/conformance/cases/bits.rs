//! Bitwise logic, shifts, bit fields: exact.

use flashcore_ir::Op;
use flashcore_ir::forms::of_registers;

use crate::testkit::conformance::case::ConformanceCase;
use crate::testkit::conformance::elementwise::{self, Form};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::THREADS;

/// Shifts reach past 64 bits, fields past 32.
const MOST_SHIFT: u64 = 70;
const MOST_FIELD: u64 = 36;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for row in ["And", "Or", "Xor", "Not"] {
        elementwise::add_row(list, row);
    }
    for op in ["Shl", "Shr"].into_iter().flat_map(of_registers) {
        let count = |name: &str| (name == "b").then_some(Fill::Count(MOST_SHIFT));
        elementwise::add(list, &Form { fill: &count, ..Form::new(op) });
    }
    truth_tables(list);
    for op in
        ["BitFieldExtract", "BitFieldInsert", "Permute", "PopCount", "LeadingZeros"].into_iter().flat_map(of_registers)
    {
        let fields = |name: &str| matches!(name, "position" | "length").then_some(Fill::Count(MOST_FIELD));
        elementwise::add(list, &Form { fill: &fields, ..Form::new(op) });
    }
}

/// All 256 functions of three bits, 32 of them in a kernel.
fn truth_tables(list: &mut Vec<ConformanceCase>) {
    const TABLES_PER_KERNEL: u8 = 32;
    for op in of_registers("Lop3") {
        for first in (0..=255u8).step_by(TABLES_PER_KERNEL.into()) {
            let last = first + (TABLES_PER_KERNEL - 1);
            let modifiers = format!("tables {first:#04x} to {last:#04x}");
            let with = |of_case: u8| {
                let mut op = op.clone();
                if let Op::Lop3 { table, .. } = &mut op {
                    *table = of_case;
                }
                op
            };
            let ops: Vec<Op> = (first..=last).map(with).collect();
            let form = Form { modifiers, launch: (THREADS, 1), ..Form::new(op.clone()) };
            list.push(elementwise::write(&form, "", &ops));
        }
        elementwise::add(list, &Form { modifiers: "table 0x96".to_owned(), ..Form::new(op) });
    }
}
