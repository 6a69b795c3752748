//! A few seconds of the fuzz, and the fuzz itself tested. The long run is `examples/abi_fuzz.rs`.

use crate::abi::library::Library;
use crate::abi::random::mix;
use crate::fuzz::calls::{Operation, Tally};
use crate::fuzz::case::{Case, Size};
use crate::fuzz::{Sabotage, try_case};

fn check(size: Size, cases: u64) {
    for index in 0..cases {
        let case = Case::new(mix(0xF1A5_0000 + index), size);
        let complaints = try_case(Library::get(), &case, None).complaints;
        assert!(complaints.is_empty(), "{case}\n{}", complaints.join("\n"));
    }
}

#[test]
fn small_cases() {
    check(Size::Small, 250);
}

#[test]
fn odd_cases() {
    check(Size::Odd, 25);
}

#[test]
fn large_cases() {
    check(Size::Large, 2);
}

/// Calls of every operation: each is computed and refused many times.
#[test]
fn calls_of_every_operation() {
    const CALLS: u64 = 6000;
    let tally = Tally::of(Library::get(), (0..CALLS).map(|index| mix(0xCA11_0000 + index)));
    assert_eq!(tally.complaints, [""; 0]);
    for operation in Operation::ALL {
        assert!(tally.computed(operation) >= 50, "{}", tally.text());
    }
}

/// A wrong result is reported. Where it is not, the case has no such element, or it makes no difference: heads that are
/// alike, rows of zeros, sums over so many keys that they may differ by more.
#[test]
fn the_fuzz_notices() {
    let cases: Vec<Case> = (0..60).map(|index| Case::new(mix(0x5AB0_0000 + index), Size::Small)).collect();
    for case in &cases {
        assert_eq!(try_case(Library::get(), case, None).complaints, [""; 0], "{case}");
    }
    let noticed = |sabotage: Sabotage| {
        cases.iter().filter(|case| !try_case(Library::get(), case, Some(sabotage)).complaints.is_empty()).count()
    };
    for (sabotage, least) in [(Sabotage::Row, 10), (Sabotage::Column, 30), (Sabotage::Head, 15), (Sabotage::Lse, 15)] {
        let noticed = noticed(sabotage);
        assert!(noticed >= least, "{sabotage:?}: {noticed} of {} noticed", cases.len());
    }
}
