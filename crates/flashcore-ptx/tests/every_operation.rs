//! Every operation that the verifier accepts is printed, and accepted by ptxas where the table says that it exists.

use std::collections::{BTreeMap, BTreeSet};

use flashcore_ir::{Accumulation, Arch, Op, TABLE, Type, VerifiedKernel, forms};
use flashcore_ptx::{assemble, print, ptxas};

/// The architecture that has every operation.
const EVERYTHING: Arch = Arch::Sm90a;

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

/// The forms that the verifier accepts for an architecture. The widest products in one form alone: ptxas takes its time over
/// so many registers.
fn accepted(arch: Arch) -> Vec<Op> {
    let mut ops = forms::accepted(arch);
    ops.retain(|op| match op {
        Op::Wgmma { columns: 256, accumulate, accumulation, .. } => {
            (*accumulate, *accumulation) == (Type::F16x2, Accumulation::Replace)
        }
        _ => true,
    });
    ops
}

fn kernel(ops: &[Op], arch: Arch) -> VerifiedKernel {
    forms::kernel(ops).verify(arch).unwrap_or_else(|errors| panic!("{}", errors[0]))
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
