//! Every operation that the verifier accepts is printed, and accepted by ptxas where the table says that it exists.

mod combinations;

use std::collections::{BTreeMap, BTreeSet};

use flashcore_ir::verify::Location;
use flashcore_ir::{
    Arch, Builder, Compare, Guard, Instruction, Kernel, Op, Operand, Origin, Parameter, ParameterType, Role, SectionId,
    Statement, TABLE, Type, VerifiedKernel,
};
use flashcore_ptx::{assemble, print, ptxas};

/// The architecture that has every operation.
const EVERYTHING: Arch = Arch::Sm90a;
const PARAMETERS: [Type; 5] = [Type::U32, Type::S32, Type::F32, Type::U64, Type::S64];

#[test]
fn every_row_of_the_table_has_combinations() {
    let tried: BTreeSet<&str> = accepted(EVERYTHING).iter().map(|op| op.entry().name).collect();
    let table: BTreeSet<&str> = TABLE.iter().map(|entry| entry.name).collect();
    assert_eq!(tried, table);
}

/// The text begins with the word that the form of the table begins with, and has as many operands.
#[test]
fn the_forms_of_the_table_are_what_is_printed() {
    let kernel = kernel(&accepted(EVERYTHING), EVERYTHING);
    let text = print(&kernel);
    // The loop around a wait belongs to it: its braces, its labels and its branch.
    let loops = ["    }", "        wait:", "        @!complete bra wait;"];
    let mut lines = text
        .lines()
        .filter(|line| !loops.contains(line))
        .map(str::trim)
        .skip_while(|line| *line != "{")
        .filter(|line| !(line.starts_with(['{', '.']) || line.starts_with("//")));
    kernel.instructions(&mut |instruction| {
        let entry = instruction.op.entry();
        let line = lines.next().unwrap().trim_end_matches(';');
        let line = line.strip_prefix('@').map_or(line, |guarded| guarded.split_once(' ').unwrap().1);
        assert_eq!(family(line), family(entry.form), "`{line}` is printed for `{}`", entry.form);
        let (least, most) = (operands(&without_braces(entry.form)), operands(&entry.form.replace(['{', '}'], "")));
        let actual = operands(&without_braces(line));
        assert!(
            (least..=most).contains(&actual),
            "`{line}` has {actual} operands; `{}` has another number",
            entry.form
        );
    });
    assert_eq!((lines.next(), lines.next(), lines.next()), (Some("ret;"), Some("}"), None));
}

/// Operations that need the same PTX version and architecture are assembled for exactly these, apart from those that
/// need more, so that a row that names too low a version is found.
#[test]
fn ptxas_accepts_each_operation_where_the_table_has_it_first() {
    let mut groups = BTreeMap::<_, Vec<Op>>::new();
    for op in accepted(EVERYTHING) {
        let since = op.since();
        groups.entry((since.compute, since.specific, since.ptx)).or_default().push(op);
    }
    for ((_, _, ptx), ops) in groups {
        let since = ops[0].since();
        let arch = Arch::ALL.into_iter().find(|arch| arch.has(since)).unwrap();
        let text = print(&kernel(&ops, arch));
        let (major, minor) = ptx.max(arch.ptx());
        assert_eq!(text.lines().next(), Some(&*format!(".version {major}.{minor}")));
        check_with_ptxas(&text, arch);
    }
}

#[test]
fn ptxas_accepts_every_operation_of_each_architecture() {
    for arch in Arch::ALL {
        check_with_ptxas(&print(&kernel(&accepted(arch), arch)), arch);
    }
}

#[expect(clippy::print_stderr, reason = "a test that checks less than usual says so")]
fn check_with_ptxas(text: &str, arch: Arch) {
    match ptxas::find() {
        Ok(_) => {
            if let Err(error) = assemble(text, arch) {
                panic!("{error}");
            }
        }
        Err(reason) => eprintln!("printed for {arch}, but not assembled: {reason}"),
    }
}

/// The combinations that the verifier accepts for an architecture.
fn accepted(arch: Arch) -> Vec<Op> {
    let mut ops = combinations::all(&PARAMETERS);
    let before = unverified(&ops).body.statements.len() - ops.len();
    let refused: BTreeSet<usize> = match unverified(&ops).verify(arch) {
        Ok(_) => BTreeSet::new(),
        Err(errors) => errors
            .iter()
            .map(|error| match &error.location {
                Location::Statement { index, .. } => *index,
                Location::Kernel { .. } => panic!("{error}"),
            })
            .collect(),
    };
    let mut index = before;
    ops.retain(|_| {
        index += 1;
        !refused.contains(&(index - 1))
    });
    ops
}

fn kernel(ops: &[Op], arch: Arch) -> VerifiedKernel {
    unverified(ops).verify(arch).unwrap_or_else(|errors| panic!("{}", errors[0]))
}

/// A kernel of these operations, with registers of the right types: those they read have been written, those they write
/// are new.
fn unverified(ops: &[Op]) -> Kernel {
    let mut kernel = Builder::new("every_operation", 32).finish();
    kernel.parameters = PARAMETERS.map(|ty| Parameter { name: format!("p_{ty}"), ty: ty.into() }).to_vec();
    kernel.parameters.push(Parameter { name: "p_map".to_owned(), ty: ParameterType::TensorMap });
    kernel.shared_bytes = 1024;
    let sources = Type::ALL.map(|ty| kernel.add_register(ty, SectionId(0)));
    let source = |ty: Type| sources[ty as usize];
    let zero = Operand::Constant(0);
    for ty in Type::ALL.into_iter().filter(|ty| *ty != Type::Pred) {
        let d = source(ty);
        append(
            &mut kernel,
            match PARAMETERS.iter().position(|parameter| *parameter == ty) {
                Some(parameter) => Op::LoadParam { ty, parameter: parameter as u32, d },
                None => Op::Mov { ty, d, a: zero },
            },
            None,
        );
    }
    let a = Operand::Register(source(Type::U32));
    let set = Op::SetPredicate { compare: Compare::Eq, ty: Type::U32, d: source(Type::Pred), a, b: zero };
    append(&mut kernel, set, None);
    let mut accumulators = Vec::new();
    let first = kernel.body.statements.len();
    for op in ops {
        let mut types = Vec::new();
        op.slots(&mut |slot| {
            if let Operand::Register(_) = slot.operand {
                types.push(slot.ty);
            }
        });
        let mut types = types.into_iter();
        let mut op = op.clone();
        op.registers_mut(&mut |role, _, register| {
            let ty = types.next().unwrap();
            *register = if role == Role::Write { kernel.add_register(ty, SectionId(0)) } else { source(ty) };
        });
        // An operation that accumulates in place reads its result register, which must have a value.
        let in_place = match &mut op {
            Op::Wgmma { accumulate, d, c, .. } => Some((*accumulate, d, c)),
            Op::WgmmaFp8 { d, c, .. } => Some((Type::F32, d, c)),
            _ => None,
        };
        if let Some((accumulate, d, c)) = in_place
            && !c.is_empty()
        {
            c.clone_from(d);
            if matches!(accumulate, Type::F32 | Type::F16x2) {
                accumulators.extend(d.iter().map(|register| (*register, accumulate)));
            }
        }
        // Code after an unconditional exit would not be compiled.
        let guard = matches!(op, Op::Exit {}).then(|| Guard { predicate: source(Type::Pred), negated: true });
        append(&mut kernel, op, guard);
    }
    let rest = kernel.body.statements.split_off(first);
    for (d, ty) in accumulators {
        append(&mut kernel, Op::Mov { ty, d, a: zero }, None);
    }
    kernel.body.statements.extend(rest);
    kernel
}

fn append(kernel: &mut Kernel, op: Op, guard: Option<Guard>) {
    let origin = Origin { section: SectionId(0), file: file!(), line: line!() };
    kernel.body.statements.push(Statement::Instruction(Instruction { op, guard, origin }));
}

/// The first word of a mnemonic.
fn family(text: &str) -> &str {
    text.split(['.', '{', ' ']).next().unwrap_or_default()
}

/// The text without its braced parts.
fn without_braces(text: &str) -> String {
    let mut depth = 0;
    text.chars()
        .filter(|character| {
            let inside = depth > 0;
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            !inside || depth == 0
        })
        .collect()
}

/// The number of operands after the mnemonic.
fn operands(text: &str) -> usize {
    text.split_once(' ').map_or(0, |(_, operands)| operands.split(',').count())
}
