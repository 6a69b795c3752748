//! The promises of the table of operations, the types and the architectures to those who match on them.

mod numbering;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use flashcore_ir::target::{AMPERE, HOPPER, HOPPER_ONLY, HOPPER_PAIRS};
use flashcore_ir::{Arch, Class, Op, Operand, RegisterId, Role, Since, TABLE, Type, forms, types};

/// Registers below this are written, those from here on read.
const READ: u32 = 1000;
/// Registers from here on are bases of addresses.
const BASE: u32 = 2000;

/// Every form that the architecture with all operations has, each register once.
static ALL_FORMS: LazyLock<Vec<Op>> = LazyLock::new(|| {
    let mut ops = forms::accepted(Arch::Sm90a);
    for op in &mut ops {
        let mut next = [0, READ, BASE];
        op.registers_mut(&mut |role, _, register| {
            let next = match role {
                Role::Write => &mut next[0],
                Role::Read | Role::ReadRegister => &mut next[1],
                Role::Base => &mut next[2],
            };
            *register = RegisterId(*next);
            *next += 1;
        });
    }
    ops
});

/// Of each row, the first of the forms that have the most operands by name, and of these the fewest by number.
fn one_of_each() -> Vec<Op> {
    let size = |op: &Op| {
        let mut names = BTreeSet::new();
        let (mut count, mut registers) = (0, 0);
        op.slots(&mut |slot| {
            names.insert(slot.name);
            count += 1;
            registers += usize::from(matches!(slot.operand, Operand::Register(_)));
        });
        (core::cmp::Reverse(names.len()), count, core::cmp::Reverse(registers))
    };
    let of_row = |entry: &flashcore_ir::Entry| {
        let forms = ALL_FORMS.iter().filter(|op| op.entry().name == entry.name);
        forms.min_by_key(|op| size(op)).cloned().unwrap_or_else(|| panic!("{} has no form", entry.name))
    };
    TABLE.iter().map(of_row).collect()
}

#[test]
fn each_row_has_forms_and_a_name_of_its_own() {
    let rows: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
    assert_eq!(one_of_each().iter().map(|op| op.entry().name).collect::<Vec<_>>(), rows);
    assert_eq!(rows.iter().collect::<BTreeSet<_>>().len(), rows.len());
}

/// The table as a reader sees it: of each row, the columns that its forms have.
#[test]
fn columns() {
    let mut lines: Vec<String> = Vec::new();
    for entry in TABLE {
        lines.push(format!("{}: {}", entry.name, entry.form));
        let row = lines.len();
        for op in ALL_FORMS.iter().filter(|op| op.entry().name == entry.name) {
            let Since { ptx: (major, minor), compute, specific } = op.since();
            let only = if specific { "a" } else { "" };
            let together = if op.is_aligned() { ", whole warp" } else { "" };
            let (class, effect) = (op.class().name(), op.effect());
            let line = format!("    {class}, {effect:?}{together}, PTX {major}.{minor}, sm_{compute}{only}");
            if !lines[row..].contains(&line) {
                lines.push(line);
            }
        }
    }
    insta::assert_snapshot!(lines.join("\n"));
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !(character.is_ascii_alphanumeric() || character == '_'))
}

/// The first word of a form is the instruction; the manual names its sections after it, with a few exceptions.
#[test]
fn forms_begin_with_the_instruction_of_their_section() {
    let mut others = Vec::new();
    for entry in TABLE {
        let mnemonic = words(entry.form).next().unwrap_or_default();
        assert!(!mnemonic.is_empty() && !entry.summary.is_empty(), "{}", entry.name);
        if !words(entry.manual).any(|word| word == mnemonic) {
            others.push((entry.name, mnemonic, entry.manual));
        }
    }
    let barrier = "parallel-synchronization-and-communication-instructions-bar";
    assert_eq!(
        others,
        [
            ("Special", "mov", "special-registers"),
            ("BarrierSync", "barrier", barrier),
            ("BarrierArrive", "barrier", barrier)
        ]
    );
}

#[test]
fn forms_name_their_operands() {
    for op in one_of_each() {
        let form: BTreeSet<&str> = words(op.entry().form).collect();
        op.slots(&mut |slot| assert!(form.contains(slot.name), "{} in `{}`", slot.name, op.entry().form));
    }
}

#[test]
fn manual_addresses() {
    assert_eq!(
        TABLE[0].manual_url(),
        "https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#data-movement-and-conversion-instructions-mov"
    );
}

/// The registers of an operation by role, in the order of its slots.
fn registers(op: &Op) -> Vec<(Role, &'static str, RegisterId)> {
    let mut registers = Vec::new();
    op.slots(&mut |slot| {
        if let Operand::Register(register) = slot.operand {
            registers.push((slot.role, slot.name, register));
        }
    });
    registers
}

#[test]
fn slots_have_written_operands_first_and_bases_last() {
    for op in &*ALL_FORMS {
        let roles: Vec<u32> = registers(op)
            .into_iter()
            .map(|(role, _, register)| {
                let (place, range) = match role {
                    Role::Write => (0, 0..READ),
                    Role::Read => (1, READ..BASE),
                    Role::ReadRegister => (2, READ..BASE),
                    Role::Base => (3, BASE..u32::MAX),
                };
                assert!(range.contains(&register.0), "{role:?} {register} of {op}");
                place
            })
            .collect();
        assert!(roles.is_sorted(), "{op}");
    }
}

/// The derived `Debug` shows every field, so a register that it shows must have a slot.
#[test]
fn slots_have_every_register() {
    for op in &*ALL_FORMS {
        let mut shown: Vec<u32> = format!("{op:?}")
            .split("RegisterId(")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
            .map(|number| number.parse().unwrap())
            .collect();
        let mut visited: Vec<u32> = registers(op).into_iter().map(|(_, _, register)| register.0).collect();
        shown.sort_unstable();
        visited.sort_unstable();
        assert_eq!(visited, shown, "{op}");
    }
}

#[test]
fn registers_can_be_changed_where_slots_have_them() {
    const MOVED: u32 = 1000;
    for mut op in ALL_FORMS.iter().cloned() {
        let before = registers(&op);
        let mut visited = Vec::new();
        op.registers_mut(&mut |role, name, register| {
            visited.push((role, name, *register));
            register.0 += MOVED;
        });
        assert_eq!(visited, before, "{op}");
        let moved: Vec<_> =
            before.into_iter().map(|(role, name, register)| (role, name, RegisterId(register.0 + MOVED))).collect();
        assert_eq!(registers(&op), moved, "{op}");
    }
}

/// Constants have a slot, but no register to change.
#[test]
fn constants_are_slots_without_registers() {
    let mut op = Op::Add { ty: Type::U32, d: RegisterId(0), a: Operand::Constant(1), b: Operand::Constant(2) };
    let mut operands = Vec::new();
    op.slots(&mut |slot| operands.push((slot.role, slot.name, slot.operand, slot.ty)));
    assert_eq!(
        operands,
        [
            (Role::Write, "d", Operand::Register(RegisterId(0)), Type::U32),
            (Role::Read, "a", Operand::Constant(1), Type::U32),
            (Role::Read, "b", Operand::Constant(2), Type::U32),
        ]
    );
    let mut changed = Vec::new();
    op.registers_mut(&mut |role, name, register| changed.push((role, name, *register)));
    assert_eq!(changed, [(Role::Write, "d", RegisterId(0))]);
}

#[test]
fn samples_have_the_lengths_that_their_modifiers_ask_for() {
    for op in &*ALL_FORMS {
        op.length_mismatches(&mut |mismatch| panic!("{op}: {mismatch:?}"));
    }
}

#[test]
fn addresses_are_the_bases() {
    for op in &*ALL_FORMS {
        let mut addresses = Vec::new();
        op.addresses(&mut |name, _, address| addresses.push((Role::Base, name, address.base)));
        let bases: Vec<_> = registers(op).into_iter().filter(|(role, ..)| *role == Role::Base).collect();
        assert_eq!(addresses, bases, "{op}");
    }
}

#[test]
fn display() {
    let lines: Vec<String> = one_of_each().iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(lines.join("\n"));
}

/// The variants of an enum; a new one does not compile here until it is listed.
macro_rules! variants {
    ($name:ident: $($variant:ident)*) => {{
        fn listed(value: $name) {
            match value { $($name::$variant => {})* }
        }
        let variants = [$($name::$variant),*];
        variants.into_iter().for_each(listed);
        variants
    }};
}

#[test]
fn all_values_are_listed_in_order() {
    assert_eq!(Type::ALL, variants!(Type: Pred U16 F16 Bf16 U32 S32 F32 Tf32 F16x2 Bf16x2 U64 S64));
    assert_eq!(Arch::ALL, variants!(Arch: Sm80 Sm86 Sm89 Sm90 Sm90a Sm120));
    assert_eq!(
        Class::ALL,
        variants!(Class: Integer Float Convert SpecialFunction Warp Memory Asynchronous Tensor Barrier Control)
    );
    assert!(Type::ALL.is_sorted() && Arch::ALL.is_sorted() && Class::ALL.is_sorted());
}

#[test]
fn types_have_names_and_widths() {
    let rows = Type::ALL.map(|ty| (ty.name(), ty.bits(), ty.bytes()));
    assert_eq!(
        rows,
        [
            ("pred", 1, 0),
            ("u16", 16, 2),
            ("f16", 16, 2),
            ("bf16", 16, 2),
            ("u32", 32, 4),
            ("s32", 32, 4),
            ("f32", 32, 4),
            ("tf32", 32, 4),
            ("f16x2", 32, 4),
            ("bf16x2", 32, 4),
            ("u64", 64, 8),
            ("s64", 64, 8),
        ]
    );
}

#[test]
fn markers_are_their_types() {
    use types::Ty;
    let markers = [
        types::Pred::TYPE,
        types::U16::TYPE,
        types::F16::TYPE,
        types::Bf16::TYPE,
        types::U32::TYPE,
        types::S32::TYPE,
        types::F32::TYPE,
        types::Tf32::TYPE,
        types::F16x2::TYPE,
        types::Bf16x2::TYPE,
        types::U64::TYPE,
        types::S64::TYPE,
    ];
    assert_eq!(markers, Type::ALL);
}

/// Two operations together need the later of each requirement, which may come from different operations.
#[test]
fn needs_add_up() {
    let needs = [AMPERE, HOPPER_PAIRS, HOPPER, HOPPER_ONLY, Since::new((8, 7), 80)];
    for a in needs {
        assert_eq!(a.and(a), a);
        assert_eq!(AMPERE.and(a), a);
        for b in needs {
            assert_eq!(a.and(b), b.and(a));
        }
    }
    assert_eq!(HOPPER_PAIRS.and(HOPPER), HOPPER);
    assert_eq!(HOPPER.and(Since::new((8, 7), 80)), Since::new((8, 7), 90));
    assert_eq!(HOPPER_ONLY.and(HOPPER), HOPPER_ONLY);
    // A version is not a decimal number.
    let tenth = Since::new((7, 10), 80);
    assert_eq!(tenth.and(Since::new((7, 9), 80)), tenth);
}

#[test]
fn architectures_have_what_they_can_do() {
    assert_eq!(Arch::ALL.map(|arch| arch.has(AMPERE)), [true; 6]);
    assert_eq!(Arch::ALL.map(|arch| arch.has(HOPPER)), [false, false, false, true, true, true]);
    // A later PTX is a matter of the printed version.
    assert!(Arch::Sm80.has(Since::new((9, 0), 80)));
    // The target with the suffix has what came before as well; later ones do not have what only it has.
    assert_eq!(Arch::ALL.map(|arch| arch.has(HOPPER_ONLY)), [false, false, false, false, true, false]);
    assert_eq!([HOPPER, HOPPER_ONLY].map(|since| since.to_string()), ["sm_90 and PTX 8.0", "sm_90a and PTX 8.0"]);
    assert!(Arch::ALL.is_sorted_by_key(|arch| (arch.compute(), arch.ptx())));
}

#[test]
fn architectures_are_read_as_they_are_written() {
    for arch in Arch::ALL {
        assert_eq!(arch.to_string().parse(), Ok(arch));
    }
    assert_eq!("sm_75".parse::<Arch>(), Err(flashcore_ir::UnknownArch { name: "sm_75".to_owned() }));
}
