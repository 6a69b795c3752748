//! Shared helpers of the verifier's tests.

use std::panic::Location;

use flashcore_ir::verify::{self, Rule};
use flashcore_ir::{Arch, Kernel, VerifyError};

/// The kernel breaks these rules on the architecture, in this order, and no other; with none it is accepted as it is.
#[track_caller]
pub(crate) fn check(kernel: Kernel, arch: Arch, expected: &[VerifyError]) {
    let before = kernel.clone();
    match kernel.verify(arch) {
        Ok(verified) => {
            assert_eq!(Vec::<VerifyError>::new(), expected);
            assert_eq!(verified.arch(), arch);
            assert_eq!(verified.into_kernel(), before);
        }
        Err(errors) => assert_eq!(errors, expected),
    }
}

/// A broken rule at a statement that the calling file wrote on `line`, in the section a kernel begins with.
#[track_caller]
pub(crate) fn at(line: u32, index: usize, text: &str, rule: Rule) -> VerifyError {
    let (text, section, file) = (text.to_owned(), "prologue".to_owned(), Location::caller().file());
    VerifyError { location: verify::Location::Statement { index, text, section, file, line }, rule }
}
