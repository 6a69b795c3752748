//! Random attention problems through the C ABI, judged by a reference that shares no code with the library.
//!
//!     cargo run --release -p flashcore-c --example abi_fuzz -- --cases 60000 --seed 1
//!     FLASHCORE_CPU_LEVEL=avx2 cargo run --release -p flashcore-c --example abi_fuzz -- --size odd --cases 1000
//!     cargo run --release -p flashcore-c --example abi_fuzz -- --only 1234567        one case, by the number reported
//!     cargo run --release -p flashcore-c --example abi_fuzz -- --sabotage row         results made wrong, to be noticed
//!     cargo run --release -p flashcore-c --example abi_fuzz -- --calls 100000         arguments of every operation
//!
//! Exits with 0 if all is right, 1 if something is not, 2 for wrong arguments. What is right is derived in
//! `tests/adversary/fuzz/reference.rs`.

#![expect(unsafe_code, reason = "calls a C ABI and maps memory")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command that prints what it finds")]

#[cfg(target_os = "linux")]
#[path = "../tests/adversary/abi/mod.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod abi;
#[cfg(target_os = "linux")]
#[path = "../tests/adversary/fuzz/mod.rs"]
mod fuzz;

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("the fuzz maps its memory as Linux does");
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    command::main()
}

#[cfg(target_os = "linux")]
mod command {
    use std::process::ExitCode;
    use std::time::Instant;

    use crate::abi::built::folder;
    use crate::abi::library::Library;
    use crate::abi::random::mix;
    use crate::fuzz::calls::{Operation, Tally};
    use crate::fuzz::case::{Case, Size};
    use crate::fuzz::{Sabotage, try_case};

    struct Arguments {
        cases: u64,
        seed: u64,
        size: Size,
        only: Option<u64>,
        sabotage: Option<Sabotage>,
        calls: Option<u64>,
    }

    fn arguments() -> Option<Arguments> {
        let mut found = Arguments { cases: 1000, seed: 1, size: Size::Small, only: None, sabotage: None, calls: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let value = words.next()?;
            match word.as_str() {
                "--cases" => found.cases = value.parse().ok()?,
                "--seed" => found.seed = value.parse().ok()?,
                "--calls" => found.calls = Some(value.parse().ok()?),
                "--only" => found.only = Some(value.parse().ok()?),
                "--size" => {
                    found.size = match value.as_str() {
                        "small" => Size::Small,
                        "large" => Size::Large,
                        "odd" => Size::Odd,
                        _ => return None,
                    }
                }
                "--sabotage" => {
                    found.sabotage = Some(match value.as_str() {
                        "row" => Sabotage::Row,
                        "column" => Sabotage::Column,
                        "head" => Sabotage::Head,
                        "lse" => Sabotage::Lse,
                        _ => return None,
                    });
                }
                _ => return None,
            }
        }
        Some(found)
    }

    pub(crate) fn main() -> ExitCode {
        let Some(Arguments { cases, seed, size, only, sabotage, calls }) = arguments() else {
            eprintln!(
                "usage: abi_fuzz [--cases N] [--seed N] [--size small|large|odd] [--only CASE] \
                 [--sabotage row|column|head|lse] [--calls N]"
            );
            return ExitCode::from(2);
        };
        let library = Library::get();
        let level = std::env::var("FLASHCORE_CPU_LEVEL").unwrap_or_else(|_| "the best".to_owned());
        println!("flashcore {} of {}, level: {level}", library.version(), folder().display());
        if let Some(calls) = calls {
            let start = Instant::now();
            let seeds: Vec<u64> =
                only.map_or_else(|| (0..calls).map(|index| mix(seed << 32 ^ index)).collect(), |one| vec![one]);
            let tally = Tally::of(library, seeds.into_iter());
            tally.complaints.iter().for_each(|complaint| println!("{complaint}"));
            println!("{}; {} wrong; {:.1} s", tally.text(), tally.complaints.len(), start.elapsed().as_secs_f64());
            // A run that computes nothing of some operation has not tried it.
            let is_tried = only.is_some() || Operation::ALL.iter().all(|&operation| tally.computed(operation) > 0);
            return ExitCode::from(u8::from(!tally.complaints.is_empty() || !is_tried));
        }
        let numbers: Vec<u64> = match only {
            Some(number) => vec![number],
            None => (0..cases).map(|index| mix(seed << 32 ^ index)).collect(),
        };
        let (start, mut said) = (Instant::now(), Instant::now());
        let (mut wrong, mut judged, mut unknown, mut overflowed, mut worst) = (0, 0, 0, 0, 0.0_f64);
        for (index, &number) in numbers.iter().enumerate() {
            let case = Case::new(number, size);
            let verdict = try_case(library, &case, sabotage);
            judged += verdict.judged;
            unknown += verdict.unknown;
            overflowed += verdict.overflowed;
            worst = worst.max(verdict.worst);
            if !verdict.complaints.is_empty() || only.is_some() {
                wrong += usize::from(!verdict.complaints.is_empty());
                println!("case {number}: {case}\n    {}", verdict.complaints.join("\n    "));
            }
            if said.elapsed().as_secs() >= 10 {
                said = Instant::now();
                eprintln!("{} of {} cases, {wrong} wrong, {} s", index + 1, numbers.len(), start.elapsed().as_secs());
            }
        }
        println!(
            "{} cases ({size:?}, seed {seed}), {wrong} wrong; {judged} rows judged, {unknown} with scores that overflow, \
             {overflowed} elements overflowed; the largest error is {worst:.3} of its bound; {:.1} s",
            numbers.len(),
            start.elapsed().as_secs_f64()
        );
        ExitCode::from(u8::from(wrong > 0))
    }
}
