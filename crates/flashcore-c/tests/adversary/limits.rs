//! Sizes that overflow, little memory, and leaks.

use std::ffi::c_int;
use std::fs;
use std::time::Instant;

use crate::abi::header::{Header, Tensors};
use crate::abi::library::Library;
use crate::abi::random::Random;
use crate::child;
use crate::fuzz::element::Element;
use crate::simple::Simple;

/// Products of sizes and strides that do not fit: refused with words, or a problem without elements, and never anything
/// else. What is taken is described and destroyed.
#[test]
fn sizes_that_overflow() {
    let (library, header) = (Library::get(), Header::get());
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..20_000 {
        let random = &mut Random::new(seed);
        let mut size = || match random.below(4) {
            0 => [0, 1, 2, 3][random.below(4)],
            1 => 1 << random.below(64),
            2 => u64::MAX >> random.below(64),
            _ => random.next() >> random.below(64),
        };
        let mut problem = library.problem(size(), size(), size(), size(), 1 + (seed % 4) as i32);
        for field in ["key_heads", "key_length", "value_dim"] {
            problem.set(field, size().into());
        }
        for tensor in ["query", "key", "value", "output"] {
            for dimension in ["batch", "head", "row"] {
                problem.set(&format!("{tensor}_strides.{dimension}"), size().into());
            }
        }
        let layouts = ["LAYOUT_BHSD", "LAYOUT_BSHD", "LAYOUT_PACKED_QKV", "LAYOUT_STRIDED"];
        problem.set("layout", header.constant(random.pick(&layouts)).into());
        let masks = ["MASK_NONE", "MASK_CAUSAL", "MASK_WINDOW"];
        problem.set("mask", header.constant(random.pick(&masks)).into()).set("window_left", 1);
        match library.create(&problem) {
            Ok(plan) => {
                taken += 1;
                // SAFETY: a plan.
                assert!(!unsafe { (library.plan_describe)(plan) }.is_null());
                library.destroy(plan);
            }
            Err((status, words)) => {
                refused += 1;
                let allowed = ["INVALID_ARGUMENT", "UNSUPPORTED"].map(|name| header.constant(name));
                assert!(allowed.contains(&status) && !words.is_empty(), "{seed}: {status} {words}");
            }
        }
    }
    assert!(taken >= 20 && refused >= 10_000, "{taken} taken, {refused} refused");
}

/// Keys that nobody attends cost nothing, however many there are: one row of 2^40, all of them one place in memory.
#[test]
fn keys_without_end() {
    let (library, header) = (Library::get(), Header::get());
    let numbers = [0.5_f32; 8];
    let mut output = [0.0_f32; 8];
    let mut problem = library.problem(1, 1, 1, 8, Element::F32.code());
    problem.set("key_length", 1 << 40).set("layout", header.constant("LAYOUT_STRIDED").into());
    problem.set("mask", header.constant("MASK_CAUSAL").into());
    problem.set("alignment", header.constant("ALIGNMENT_TOP_LEFT").into());
    for tensor in ["query", "output"] {
        for dimension in ["batch", "head", "row"] {
            problem.set(&format!("{tensor}_strides.{dimension}"), 8);
        }
    }
    let mut tensors = Tensors::default();
    for tensor in ["query", "key", "value"] {
        tensors = tensors.with(tensor, &numbers, &[]);
    }
    let tensors = tensors.with_mut("output", &mut output, &[]);
    let (start, plan) = (Instant::now(), library.create(&problem).unwrap());
    // SAFETY: the tensors are the arrays.
    unsafe { library.try_run(plan, &tensors) }.unwrap();
    library.destroy(plan);
    assert_eq!(output, numbers);
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}

#[repr(C)]
struct Limit {
    current: u64,
    most: u64,
}

const RLIMIT_AS: c_int = 9;

unsafe extern "C" {
    fn setrlimit(resource: c_int, limit: *const Limit) -> c_int;
}

/// Address space and resident memory of this process, in bytes.
fn memory() -> (u64, u64) {
    let text = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: Vec<u64> = text.split_whitespace().take(2).map(|word| word.parse().unwrap()).collect();
    (pages[0] * 4096, pages[1] * 4096)
}

/// With 64 MiB of address space left, problems whose tensors are there are computed: the library needs memory for tiles,
/// not for scores.
#[test]
fn little_memory() {
    const NAME: &str = "limits::little_memory";
    if !child::is_child(NAME) {
        assert_eq!(child::run(NAME, &[("RAYON_NUM_THREADS", "2")]), ["right"]);
        return;
    }
    let library = Library::get();
    // Scores alone would be 256 MiB; threads and their stacks are made before the limit.
    let warm = Simple::new([1, 1, 64, 64], Element::F32, 1);
    let plan = library.create(&warm.problem).unwrap();
    warm.run(plan).unwrap();
    library.destroy(plan);
    let mut large = Simple::new([1, 1, 8192, 16], Element::F32, 2);
    large.clear();
    let most = memory().0 + (64 << 20);
    let limit = Limit { current: most, most };
    // SAFETY: one struct is read.
    assert_eq!(unsafe { setrlimit(RLIMIT_AS, &raw const limit) }, 0);
    let plan = library.create(&large.problem).unwrap();
    large.run(plan).unwrap();
    library.destroy(plan);
    assert!(large.result().1.iter().all(|&row| f32::from_bits(row).is_finite()));
    println!("child found: right");
}

/// Plans that come and go, runs and errors leave nothing.
#[test]
fn nothing_is_left_behind() {
    const NAME: &str = "limits::nothing_is_left_behind";
    if !child::is_child(NAME) {
        assert_eq!(child::run(NAME, &[]), ["nothing"]);
        return;
    }
    let library = Library::get();
    let simple = Simple::new([2, 2, 33, 16], Element::F32, 1);
    let mut wrong = simple.problem.clone();
    wrong.set("dtype", 77);
    let churn = |rounds: usize| {
        for _ in 0..rounds {
            let plan = library.create(&simple.problem).unwrap();
            simple.run(plan).unwrap();
            library.destroy(plan);
            assert!(simple.run(plan).is_err());
            assert!(library.create(&wrong).is_err());
        }
    };
    churn(500);
    let before = memory().1;
    churn(5000);
    let growth = memory().1.saturating_sub(before);
    // A plan has some hundred bytes: 5,000 of them that stay are a megabyte.
    assert!(growth <= 256 << 10, "{growth} bytes more");
    println!("child found: nothing");
}
