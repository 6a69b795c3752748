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
use flashcore_ir::{Arch, Builder, Instruction, Kernel, Op, Origin, VerifyError};

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

    /// By a CTA of so many threads in place of 32.
    fn of_threads(mut self, threads: u32) -> Self {
        self.broken.threads = threads;
        self.corrected.threads = threads;
        self
    }

    #[track_caller]
    fn check(self) {
        check(self.broken, self.arch, &self.errors);
        check(self.corrected, self.arch, &[]);
    }
}

/// The reports of an instruction of a kernel: these rules are broken, one after the other.
fn reports<const N: usize>(kernel: &Kernel, index: usize, text: &str, rules: [Rule; N]) -> Vec<VerifyError> {
    let mut origins = Vec::new();
    kernel.instructions(&mut |instruction| origins.push(instruction.origin));
    let Origin { section, file, line } = origins[index];
    let (text, section) = (text.to_owned(), kernel.section(section).to_string());
    let location = Location::Statement { index, text, section, file, line };
    rules.map(|rule| VerifyError { location: location.clone(), rule }).to_vec()
}

/// A mistake in the instruction that has `index` others before it, in a kernel of a warp that `write` writes with it, or with
/// what it should have been.
fn mistake<T, const N: usize>(
    write: impl Fn(&mut Builder, T),
    [mistake, correction]: [T; 2],
    (index, text): (usize, &str),
    rules: [Rule; N],
) -> Case {
    let [broken, corrected] = [mistake, correction].map(|value| {
        let mut k = Builder::new("kernel", 32);
        write(&mut k, value);
        k.finish()
    });
    Case { arch: Arch::Sm80, errors: reports(&broken, index, text, rules), broken, corrected }
}

/// The same in the instruction itself, which `change` makes of one that the builder writes.
fn changed<T, const N: usize>(
    write: impl Fn(&mut Builder),
    change: impl Fn(&mut Op, T),
    [mistake, correction]: [T; 2],
    (index, text): (usize, &str),
    rules: [Rule; N],
) -> Case {
    let [broken, corrected] = [mistake, correction].map(|value| {
        let mut k = Builder::new("kernel", 32);
        write(&mut k);
        let (mut kernel, mut value) = (k.finish(), Some(value));
        edit(&mut kernel, index, |instruction| change(&mut instruction.op, value.take().expect("one instruction")));
        kernel
    });
    Case { arch: Arch::Sm80, errors: reports(&broken, index, text, rules), broken, corrected }
}

/// Changes a field of an operation of a row.
macro_rules! set {
    ($row:ident.$field:ident) => {
        |op: &mut flashcore_ir::Op, value| {
            if let flashcore_ir::Op::$row { $field, .. } = op {
                *$field = value;
            }
        }
    };
}
use set;

/// A broken rule in what the kernel declares; all kernels here are called `kernel`.
fn declared(rule: Rule) -> VerifyError {
    VerifyError { location: Location::Kernel { name: "kernel".to_owned() }, rule }
}

/// Changes the instruction that has `index` others before it.
fn edit(kernel: &mut Kernel, index: usize, mut change: impl FnMut(&mut Instruction)) {
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
