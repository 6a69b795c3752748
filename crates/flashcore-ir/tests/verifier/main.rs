//! Each rule of the verifier has a minimal kernel that breaks it, with the exact report, and the corrected kernel.

#[path = "../support/mod.rs"]
mod support;

mod accepted;
mod declarations;
mod hopper;
mod modifiers;
mod operands;
mod together;

use std::collections::BTreeSet;

use flashcore_ir::verify::{Location, Rule};
use flashcore_ir::{Arch, Instruction, Kernel, VerifyError};

use support::check;

/// A kernel that breaks rules, and the same kernel without the mistake.
struct Case {
    arch: Arch,
    broken: Kernel,
    errors: Vec<VerifyError>,
    corrected: Kernel,
}

/// The two kernels that `write` makes of a mistake and of what it should have been, and the line of the mistake.
fn case<T>(
    write: impl Fn(T) -> (Kernel, u32),
    mistake: T,
    correction: T,
    errors: impl FnOnce(u32) -> Vec<VerifyError>,
) -> Case {
    let (broken, line) = write(mistake);
    Case { arch: Arch::Sm80, broken, errors: errors(line), corrected: write(correction).0 }
}

impl Case {
    fn on(self, arch: Arch) -> Self {
        Self { arch, ..self }
    }

    #[track_caller]
    fn check(self) {
        check(self.broken, self.arch, &self.errors);
        check(self.corrected, self.arch, &[]);
    }
}

/// A broken rule in what the kernel declares; all kernels here are called `kernel`.
fn declared(rule: Rule) -> VerifyError {
    VerifyError { location: Location::Kernel { name: "kernel".to_owned() }, rule }
}

/// Changes the instruction that has `index` others before it.
fn edit(kernel: &mut Kernel, index: usize, change: impl Fn(&mut Instruction)) {
    let mut next = 0;
    kernel.instructions_mut(&mut |instruction| {
        if next == index {
            change(instruction);
        }
        next += 1;
    });
}

/// Makes a test of each function that returns a [`Case`], and the list of them.
macro_rules! cases {
    ($($name:ident)*) => {
        pub(crate) const CASES: &[(&str, fn() -> crate::Case)] = &[$((stringify!($name), $name)),*];

        mod tests {
            $(#[test]
            fn $name() {
                super::$name().check();
            })*
        }
    };
}
use cases;

/// A new rule does not compile here until it is listed, and once it is listed it needs a case.
macro_rules! rules {
    ($($name:ident)*) => {
        const RULES: &[&str] = &[$(stringify!($name)),*];

        fn name(rule: &Rule) -> &'static str {
            match rule { $(Rule::$name { .. } => stringify!($name),)* }
        }
    };
}

rules! {
    UnknownRegister TypeMismatch TypeNotAllowed Length ConstantNotAllowed ConstantTooWide GuardedCollective
    NotOnArchitecture ReadBeforeWrite UnknownParameter ParameterType ReinterpretWidth NoConversion VectorSize
    SharedCacheHint VolatilePrefetch NoReduction CopySize BulkSize MatrixCount NoProduct ShuffleControl BitField BarrierNumber
    BarrierThreads Threads SharedMemory RegisterBudget ParameterBytes DuplicateParameter NoParameterType Name
    UnknownSection WrittenTwice NotInSpace MbarrierCount MbarrierBytes Parity MbarrierScope ClusterSize NoClusters TensorRank
    ProductColumns NoWarpgroupProduct AccumulatorMoved RegisterMajor TransposedFp8 RegisterCount
}

fn all_cases() -> impl Iterator<Item = (&'static str, Case)> {
    [declarations::CASES, modifiers::CASES, operands::CASES, hopper::CASES]
        .into_iter()
        .flatten()
        .map(|(name, case)| (*name, case()))
}

#[test]
fn every_rule_has_a_case() {
    let covered: BTreeSet<&str> =
        all_cases().flat_map(|(_, case)| case.errors).map(|error| name(&error.rule)).collect();
    assert_eq!(covered, RULES.iter().copied().collect());
}

/// The messages of the rules, for review.
#[test]
fn messages() {
    let lines: Vec<String> = all_cases()
        .flat_map(|(case, Case { errors, .. })| errors.into_iter().map(move |error| format!("{case}: {}", error.rule)))
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn an_error_names_its_place() {
    let rule = Rule::Threads { threads: 0 };
    assert_eq!(declared(rule.clone()).to_string(), format!("kernel `kernel`: {rule}"));
    let location = Location::Statement {
        index: 3,
        text: "WarpSync".to_owned(),
        section: "scores / mask".to_owned(),
        file: "kernel.rs",
        line: 7,
    };
    let error = VerifyError { location, rule: Rule::GuardedCollective };
    assert_eq!(
        error.to_string(),
        format!("instruction 3 `WarpSync` in `scores / mask` (kernel.rs:7): {}", Rule::GuardedCollective)
    );
}
