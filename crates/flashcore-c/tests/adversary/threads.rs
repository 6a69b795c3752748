//! Many threads on one plan, plans that come and go, and results that do not depend on the number of threads.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::abi::header::Header;
use crate::abi::library::{Library, Plan};
use crate::abi::random::mix;
use crate::child;
use crate::fuzz;
use crate::fuzz::case::{Case, Size};
use crate::fuzz::element::Element;
use crate::fuzz::tensors::{Inputs, Outputs, Poison};
use crate::simple::Simple;

/// A plan that threads share: a number, which the header says they may.
#[derive(Clone, Copy)]
struct Shared(Plan);

// SAFETY: the header says that any thread may use a plan.
unsafe impl Send for Shared {}
// SAFETY: as above, and many at once.
unsafe impl Sync for Shared {}

impl Shared {
    fn plan(self) -> Plan {
        self.0
    }
}

const THREADS: u64 = 16;

/// 16 threads, each with its own tensors: each gets what it got alone.
#[test]
fn one_plan_of_many_threads() {
    let library = Library::get();
    for (sizes, element) in [
        ([1, 4, 40, 32], Element::F32),
        ([1, 1, 1, 64], Element::F16),
        ([2, 3, 33, 40], Element::Bf16),
        ([1, 2, 9, 8], Element::F64),
    ] {
        let plan = Shared(library.create(&Simple::new(sizes, element, 0).problem).unwrap());
        let barrier = Barrier::new(THREADS as usize);
        thread::scope(|scope| {
            for number in 0..THREADS {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut simple = Simple::new(sizes, element, 100 + number);
                    let alone = {
                        let alone = Library::get().create(&simple.problem).unwrap();
                        simple.run(alone).unwrap();
                        Library::get().destroy(alone);
                        simple.result()
                    };
                    barrier.wait();
                    for round in 0..25 {
                        simple.clear();
                        simple.run(plan.plan()).unwrap();
                        assert!(simple.result() == alone, "{sizes:?} {element:?}, thread {number}, round {round}");
                    }
                });
            }
        });
        library.destroy(plan.plan());
    }
}

/// Threads that make, run and destroy plans of all kinds; every one of them is right, and every number is new.
#[test]
fn plans_come_and_go_on_many_threads() {
    let kinds = [([1, 1, 3, 8], Element::F32), ([1, 2, 5, 4], Element::F16), ([2, 1, 1, 16], Element::F64)];
    thread::scope(|scope| {
        for number in 0..THREADS {
            scope.spawn(move || {
                let library = Library::get();
                for round in 0..100 {
                    let (sizes, element) = kinds[((number + round) % 3) as usize];
                    let mut simple = Simple::new(sizes, element, number);
                    let (first, second) =
                        (library.create(&simple.problem).unwrap(), library.create(&simple.problem).unwrap());
                    assert_ne!(first, second);
                    simple.run(first).unwrap();
                    let result = simple.result();
                    library.destroy(first);
                    assert_eq!(simple.run(first).unwrap_err().0, Header::get().constant("INVALID_PLAN"));
                    simple.clear();
                    simple.run(second).unwrap();
                    assert!(simple.result() == result);
                    library.destroy(second);
                }
            });
        }
    });
}

/// A plan that is destroyed while others run it: they finish, and those that come later are told.
#[test]
fn a_plan_destroyed_while_it_runs() {
    let library = Library::get();
    for round in 0..20 {
        let sizes = [1, 2, 40, 32];
        let plan = Shared(library.create(&Simple::new(sizes, Element::F32, 0).problem).unwrap());
        let is_gone = AtomicBool::new(false);
        thread::scope(|scope| {
            for number in 0..4 {
                let is_gone = &is_gone;
                scope.spawn(move || {
                    let simple = Simple::new(sizes, Element::F32, number);
                    loop {
                        let was_gone = is_gone.load(Ordering::SeqCst);
                        match simple.run(plan.plan()) {
                            Ok(()) => assert!(!was_gone, "a plan that is gone was run"),
                            Err((status, words)) => {
                                assert_eq!(status, Header::get().constant("INVALID_PLAN"), "{words}");
                                break;
                            }
                        }
                    }
                });
            }
            thread::sleep(std::time::Duration::from_micros(200 * round));
            library.destroy(plan.plan());
            is_gone.store(true, Ordering::SeqCst);
        });
    }
}

/// The bits of random cases, and of some that are divided among threads, mixed into one number.
fn digest_of_cases() -> u64 {
    let mut digest = 0;
    let library = Library::get();
    let small = (0..60).map(|index| Case::new(mix(0x0071_0000 + index), Size::Small));
    let large = (0..4).map(|index| Case::new(mix(0x0072_0000 + index), Size::Large));
    for case in small.chain(large) {
        let (mut inputs, mut outputs) = (Inputs::new(&case), Outputs::new(&case));
        inputs.fill(&case, Poison::Zeros);
        outputs.fill(1);
        let plan = library.create(&case.problem(library)).unwrap();
        // SAFETY: the memory is there, and as long as it says.
        unsafe { library.try_run(plan, &fuzz::tensors::list(&case, &inputs, &outputs)) }.unwrap();
        library.destroy(plan);
        let (rows, lse, _) = outputs.take(&case, 1);
        for byte in rows.iter().chain(&lse) {
            digest = mix(digest ^ u64::from(*byte));
        }
    }
    digest
}

/// The same bits on 1, 2, 3, 7 and 16 threads, at the best level and at the portable one.
#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    const NAME: &str = "threads::bits_do_not_depend_on_the_number_of_threads";
    if child::is_child(NAME) {
        println!("child found: {:016x}", digest_of_cases());
        return;
    }
    for level in [None, Some("portable")] {
        let digests = ["1", "2", "3", "7", "16"].map(|threads| {
            let level = level.map(|level| ("FLASHCORE_CPU_LEVEL", level));
            let variables: Vec<_> = [("RAYON_NUM_THREADS", threads)].into_iter().chain(level).collect();
            child::run(NAME, &variables)
        });
        assert_eq!(digests[0].len(), 1, "{digests:?}");
        assert!(digests.iter().all(|digest| *digest == digests[0]), "{level:?}: {digests:?}");
    }
}
