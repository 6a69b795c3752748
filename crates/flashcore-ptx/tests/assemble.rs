//! Results of ptxas, where there is one.

use flashcore_ir::types::{F32, U64};
use flashcore_ir::{Arch, Builder, SpecialRegister};
use flashcore_ptx::{PtxasError, assemble, print};

/// The sum of 64 values times each of them: more values alive at once than the budget has registers.
fn sums(register_budget: u32) -> String {
    let mut k = Builder::new("sums", 128);
    k.set_register_budget(register_budget);
    let x = k.parameter::<U64>("x");
    let thread = k.special(SpecialRegister::ThreadX);
    let x = k.mad_wide(thread, 256u32, x);
    let values: Vec<_> = (0..16).flat_map(|part| k.load::<F32>(at(x, 16 * part), 4)).collect();
    let sum = k.copy(0.0f32);
    for value in &values {
        k.add_to(sum, *value);
    }
    k.cta_sync();
    for value in &values {
        k.mul_to(*value, sum);
    }
    for (part, four) in (0..16).zip(values.chunks(4)) {
        k.store(at(x, 16 * part), four);
    }
    print(&k.finish().verify(Arch::Sm80).unwrap())
}

fn at(base: flashcore_ir::Reg<U64>, bytes: i32) -> flashcore_ir::GlobalAddress {
    flashcore_ir::GlobalAddress::from(base).plus(bytes)
}

/// Runs the check with what ptxas says, or says why there is nothing to check.
#[expect(clippy::print_stderr, reason = "a test that checks less than usual says so")]
fn check(ptx: &str, check: impl FnOnce(Result<flashcore_ptx::Resources, PtxasError>)) {
    match assemble(ptx, Arch::Sm80) {
        Err(reason @ PtxasError::NotFound) => eprintln!("not assembled: {reason}"),
        result => check(result),
    }
}

#[test]
fn a_kernel_within_its_budget_does_not_spill() {
    check(&sums(255), |result| {
        let resources = result.unwrap_or_else(|error| panic!("{error}"));
        assert!((64..128).contains(&resources.registers), "{resources:?}");
        assert_eq!((resources.spill_store_bytes, resources.spill_load_bytes, resources.barriers), (0, 0, 1));
        assert_eq!(resources.remarks, Vec::<String>::new());
    });
}

#[test]
fn a_kernel_beyond_its_budget_spills() {
    check(&sums(32), |result| {
        let resources = result.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(resources.registers, 32);
        assert!(resources.spill_store_bytes > 0 && resources.spill_load_bytes > 0, "{resources:?}");
    });
}

#[test]
fn a_refused_module_comes_back_with_its_lines() {
    let ptx = sums(255).replace("mul.rn.f32", "mul.sometimes.f32");
    let (number, first) =
        ptx.lines().zip(1..).find_map(|(line, number)| line.contains("sometimes").then_some((number, line))).unwrap();
    check(&ptx, |result| match result {
        Err(PtxasError::Refused { arch, message }) => {
            assert_eq!(arch, Arch::Sm80);
            let shown: Vec<&str> = message.lines().filter(|line| line.contains(" | ")).collect();
            assert_eq!(shown.first(), Some(&&*format!("{number:>6} | {first}")), "{message}");
        }
        other => panic!("{other:?}"),
    });
}
