//! The conformance suite itself: it covers the table, runs in the simulator, assembles, and notices what is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use flashcore_bench::testkit::conformance::{
    CaseRecord, ConformanceCase, Disagreement, Executor, Header, Invocation, OutputRecord, Record, RecordError,
    SimExecutor, Tolerance, cases, check, compare, conduct, fit_sums, replay,
};
use flashcore_ir::{Arch, TABLE, Type};
use flashcore_ptx::{assemble, print, ptxas};
use flashcore_sim::TensorSum;

const SEED: u64 = 0;
/// The record of a real device, replayed wherever the tests run.
const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../results/conformance/h200.json");
/// Largest size of a committed record.
const MOST_RECORD_BYTES: usize = 2 << 20;

fn case(name: &str) -> ConformanceCase {
    cases().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("unknown case `{name}`"))
}

fn header() -> Header {
    Header {
        device: "the simulator".to_owned(),
        driver: "none".to_owned(),
        date: "2026-01-01".to_owned(),
        target: "sm_90".to_owned(),
        seed: SEED,
    }
}

#[test]
fn every_row_of_the_table_has_a_case() {
    let covered: BTreeSet<&str> = cases().iter().map(|case| case.operation).collect();
    let table: BTreeSet<&str> = TABLE.iter().map(|entry| entry.name).collect();
    assert_eq!(covered, table);
}

/// A case is about the operation that it names, and its kernel has that operation.
#[test]
fn every_case_executes_its_operation() {
    for case in cases() {
        let mut executes = false;
        case.kernel.instructions(&mut |instruction| executes |= instruction.op.entry().name == case.operation);
        assert!(executes, "{} has no {}", case.name, case.operation);
    }
}

/// The suite in a list: what is added or lost shows in the diff.
#[test]
fn the_cases_are_these() {
    let cases = cases();
    let names: BTreeSet<&str> = cases.iter().map(|case| &*case.name).collect();
    assert_eq!(names.len(), cases.len(), "names are unique");
    let lines: Vec<String> =
        cases.iter().map(|case| format!("{}: {}, {}", case.name, case.arch, case.tolerance)).collect();
    insta::assert_snapshot!("cases", lines.join("\n"));
}

/// Every form of the operations that the verifier accepts is in some case: here, by type.
#[test]
fn every_type_that_a_row_allows_is_in_a_case() {
    let mut seen: BTreeMap<&str, (BTreeSet<Type>, BTreeSet<Type>)> = BTreeMap::new();
    for case in cases() {
        case.kernel.instructions(&mut |instruction| {
            if let Some((ty, allowed)) = instruction.op.type_choice() {
                let (used, all) = seen.entry(instruction.op.entry().name).or_default();
                used.insert(ty);
                all.extend(allowed);
            }
        });
    }
    for (row, (used, allowed)) in seen {
        assert_eq!(used, allowed, "{row}");
    }
}

#[test]
fn every_case_keeps_the_rules_on_each_architecture_that_has_it() {
    for case in cases() {
        for arch in Arch::ALL.into_iter().filter(|arch| arch.has(case.kernel.since())) {
            if let Err(errors) = case.verified(arch) {
                panic!("{} on {arch}: {}", case.name, errors[0]);
            }
        }
        let since = case.kernel.since();
        assert!(case.arch.compute() == 80 || since.compute > 80, "{} could run on less than {}", case.name, case.arch);
    }
}

/// All kernels that need the same PTX version in one module, for the lowest architecture and for an H200.
#[test]
#[expect(clippy::print_stderr, reason = "a test that checks less than usual says so")]
fn ptxas_accepts_every_case() {
    let mut modules: BTreeMap<(Arch, String), String> = BTreeMap::new();
    for case in cases() {
        let on_an_h200 = if case.arch.is_specific() { case.arch } else { Arch::Sm90 };
        for arch in BTreeSet::from([case.arch, on_an_h200]) {
            let text = print(&case.verified(arch).unwrap_or_else(|errors| panic!("{}: {}", case.name, errors[0])));
            let (head, body) = text.split_at(text.find(".visible").unwrap_or_else(|| panic!("{text}")));
            let version = head.lines().next().unwrap_or_default().to_owned();
            let module = modules.entry((arch, version.clone())).or_insert_with(|| {
                format!(
                    "{version}\n.target {arch}\n.address_size 64\n.extern .shared .align 128 .b8 shared_memory[];\n"
                )
            });
            module.push_str(body);
        }
    }
    if let Err(reason) = ptxas::find() {
        eprintln!("{} modules printed, but not assembled: {reason}", modules.len());
        return;
    }
    for ((arch, version), module) in modules {
        if let Err(error) = assemble(&module, arch) {
            panic!("{arch}, {version}: {error}");
        }
    }
}

/// A kernel without faults gives the same bits however its warps interleave.
#[test]
fn every_case_runs_in_the_simulator_under_two_seeds_with_the_same_bits() {
    for case in cases() {
        let kernel = case.verified(Arch::Sm90a).unwrap_or_else(|errors| panic!("{}: {}", case.name, errors[0]));
        let inputs = case.input_bytes(SEED);
        let [one, other] = [1, 2].map(|seed| {
            let executed = SimExecutor { seed, ..SimExecutor::default() }.execute_case(&case, &kernel, &inputs);
            executed.unwrap_or_else(|error| panic!("{}: {error}", case.name))
        });
        assert!(one == other, "{} depends on the order of its warps", case.name);
        assert_eq!(one.iter().map(Vec::len).collect::<Vec<_>>(), case.output_lengths(), "{}", case.name);
        // An output without a value would be compared with nothing.
        for (output, bytes) in case.outputs.iter().zip(&one) {
            let zero =
                ["difference", "base modulo 128", "tid.y", "tid.z", "d 0 with table 0x00"].contains(&&*output.name);
            let changed = bytes.iter().any(|byte| *byte != 0);
            assert!(
                changed || zero || case.name.contains("with constants"),
                "{}: `{}` is all zeros",
                case.name,
                output.name
            );
        }
    }
}

/// The outputs of a case in the simulator, and its inputs.
fn simulated(case: &ConformanceCase) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let kernel = case.verified(Arch::Sm90a).expect("it keeps the rules");
    let inputs = case.input_bytes(SEED);
    let outputs = SimExecutor::default().execute_case(case, &kernel, &inputs).expect("it runs");
    (inputs, outputs)
}

/// Changes one element of one output of a case, and returns what the comparison says.
#[track_caller]
fn plant(name: &str, element: usize, change: impl Fn(u32) -> u32) -> Option<String> {
    let case = case(name);
    let (inputs, expected) = simulated(&case);
    let mut actual = expected.clone();
    let bytes = &mut actual[0][4 * element..][..4];
    let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    bytes.copy_from_slice(&change(word).to_le_bytes());
    let comparison = compare(&case, &inputs, &expected, &actual);
    assert_eq!(comparison.disagreements, usize::from(comparison.first.is_some()), "one element was changed");
    comparison.first.map(|mismatch| mismatch.to_string())
}

#[test]
fn a_flipped_bit_is_noticed() {
    let bit = |word: u32| word ^ 1;
    insta::assert_snapshot!("flipped_bit_of_a_sum", plant("Add u32", 2047, bit).expect("it is noticed"));
    insta::assert_snapshot!(
        "flipped_bit_of_a_pair",
        plant("Fma f16x2", 1000, |word| word ^ 1 << 20).expect("it is noticed")
    );
    for name in [
        "Mul f32",
        "Convert f32 to s32 rni",
        "Shuffle up 0x1800 u32",
        "Load global nc L2::128B",
        "CopyAsync 16 cg none",
    ] {
        assert!(plant(name, 77, bit).is_some(), "{name}");
    }
}

/// One ULP past what is allowed is too much, and what is allowed is not.
#[test]
fn an_error_beyond_the_tolerance_is_noticed() {
    // 2^x of an ordinary number is far from where subnormals begin, so an ULP is one bit.
    let name = "Exp2 f32 of ordinary numbers";
    let ordinary = |case: &ConformanceCase| {
        let (_, outputs) = simulated(case);
        let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        outputs[0].chunks(4).position(|bytes| (1.5..1000.0).contains(&number(bytes))).expect("there is one")
    };
    let element = ordinary(&case(name));
    assert_eq!(case(name).tolerance, Tolerance::Ulps { most: 2, flushed: true });
    assert_eq!(plant(name, element, |word| word + 2), None);
    assert_eq!(plant(name, element, |word| word - 2), None);
    assert!(plant(name, element, |word| word - 3).is_some());
    insta::assert_snapshot!(
        "three_ulps_where_two_are_allowed",
        plant(name, element, |word| word + 3).expect("it is noticed")
    );
    assert!(plant(name, element, |word| word | 0x7fc0_0000).is_some(), "a NaN where there was a number");
}

/// A swapped pair of products is a large error; the last bit of a sum is none.
#[test]
fn tensor_cores_are_judged_by_the_size_of_their_terms() {
    let name = "Mma m16n8k16 f16x2 in f32, normal";
    assert_eq!(plant(name, 5, |word| word ^ 1), None);
    assert!(plant(name, 5, |word| word ^ 1 << 8).is_some());
    let exact = "Mma m16n8k16 f16x2 in f32, small integers";
    assert!(plant(exact, 5, |word| word ^ 1).is_some());
}

/// A run of the simulator, written down as if it were a device.
fn own_record() -> Record {
    conduct(header(), &SimExecutor { seed: 3, ..SimExecutor::default() }, &mut |outcome| {
        assert!(outcome.comparison.agrees(), "{:?}", outcome.comparison.first);
    })
    .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_record_is_read_back_replayed_and_small() {
    let record = own_record();
    let json = record.to_json().expect("JSON");
    assert!(json.len() < MOST_RECORD_BYTES, "the record takes {} bytes", json.len());
    assert_eq!(json.lines().count(), record.cases.len() + 2, "a line for each case");
    let read = Record::parse(&json).expect("the record that was written");
    assert_eq!(read, record);
    let replayed = replay(&read).expect("every case runs");
    assert_eq!(replayed.complaints(), [""; 0]);
    assert_eq!(replayed.compared, record.cases.len());
}

/// Replays the record of this build after a change.
fn replayed(change: impl FnOnce(&mut Vec<CaseRecord>)) -> flashcore_bench::testkit::conformance::Replay {
    let kept = ["Add u32", "Log2 f32", "Select u64"];
    let records =
        kept.map(|name| check(&case(name), &SimExecutor::default(), Arch::Sm90, SEED).expect("it runs").record);
    let mut record = Record { schema: 1, header: header(), cases: records.to_vec() };
    change(&mut record.cases);
    let mut replayed = replay(&record).expect("every case runs");
    // The other cases of the suite are not in this small record.
    replayed.new.retain(|name| kept.contains(&&**name));
    replayed
}

#[test]
fn a_record_that_differs_says_how() {
    assert!(replayed(|_| {}).passed());

    let changed_hash = replayed(|records| records[0].outputs[0] = OutputRecord::Hash("0".repeat(32)));
    assert!(
        matches!(&changed_hash.disagreements[..], [Disagreement::Hash { case, output, .. }] if case == "Add u32" && output == "d"),
        "{changed_hash:?}"
    );

    // Zeros in place of what the device gave.
    let zeros = replayed(|records| records[1].outputs[0] = OutputRecord::Bytes("A".repeat(10_923) + "="));
    assert!(
        matches!(&zeros.disagreements[..], [Disagreement::Element(mismatch)] if mismatch.case == "Log2 f32"),
        "{zeros:?}"
    );

    let garbage = replayed(|records| records[1].outputs[0] = OutputRecord::Bytes("??".to_owned()));
    assert!(matches!(&garbage.disagreements[..], [Disagreement::Unusable { case, .. }] if case == "Log2 f32"));

    let renamed = replayed(|records| records[2].name = "Select u128".to_owned());
    insta::assert_snapshot!("new_and_gone", renamed.complaints().join("\n"));

    let other_inputs = replayed(|records| records[2].fingerprint.insert(0, 'f'));
    insta::assert_snapshot!("changed", other_inputs.complaints().join("\n"));
}

#[test]
fn a_record_of_another_schema_is_refused() {
    let error = Record::parse(r#"{"schema": 7, "whatever": []}"#).expect_err("another schema");
    assert!(matches!(error, RecordError::Schema { found: 7 }));
    insta::assert_snapshot!("another_schema", error.to_string());
    assert!(matches!(Record::parse("[]"), Err(RecordError::Json(_))));
}

/// An executor that gives wrong results is found out by the run itself.
#[test]
fn a_wrong_device_is_noticed() {
    struct WrongDevice;
    impl Executor for WrongDevice {
        fn execute(
            &self,
            invocation: &Invocation<'_>,
        ) -> Result<Vec<Vec<u8>>, flashcore_bench::testkit::conformance::ExecuteError> {
            let mut outputs = SimExecutor::default().execute(invocation)?;
            outputs[0][12] ^= 4;
            Ok(outputs)
        }
    }
    let outcome = check(&case("Xor u64"), &WrongDevice, Arch::Sm90, SEED).expect("it runs");
    assert_eq!(outcome.comparison.disagreements, 1);
    let first = outcome.comparison.first.expect("a mismatch");
    assert_eq!((first.element, first.expected ^ first.actual), (1, 4 << 32));
}

/// The committed record of a real device. Cases that it does not have yet are no mistake: who adds an operation may have
/// no GPU, and the next record has them.
#[test]
#[expect(clippy::print_stderr, reason = "a test that checks less than usual says so")]
fn the_simulator_agrees_with_the_recorded_device() {
    let path = Path::new(RECORD);
    let json = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(json.len() < MOST_RECORD_BYTES, "the record takes {} bytes", json.len());
    let record = Record::parse(&json).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut replayed = replay(&record).unwrap_or_else(|error| panic!("{error}"));
    for case in replayed.new.drain(..) {
        eprintln!("no GPU has executed `{case}` yet; `flashcore conformance --record` on one writes a new record");
    }
    assert!(replayed.passed(), "{:#?}", replayed.complaints());
}

/// The sums in `f32` of an H200: terms are cut off 25 bits below the largest, and of `wgmma` with 8-bit floats 13, not one
/// more or less. `mma` of 8-bit floats is two of `f16`.
#[test]
fn truncated_sums_are_those_of_the_recorded_device() {
    let json = std::fs::read_to_string(RECORD).unwrap_or_else(|error| panic!("{RECORD}: {error}"));
    let record = Record::parse(&json).unwrap_or_else(|error| panic!("{RECORD}: {error}"));
    let TensorSum::Truncating { fraction, fp8_fraction } = TensorSum::H200 else { panic!("an H200 cuts off") };
    assert_eq!((fraction, fp8_fraction), (25, 13));
    let around = |bits: u32| fit_sums(&record, bits - 1..=bits + 1).unwrap_or_else(|error| panic!("{error}"));
    let (wide, narrow) = (around(fraction), around(fp8_fraction));
    for (row, bits, of_all, products, elements) in [
        ("Mma ", fraction, &wide, 6, 2 * 4096),
        ("MmaFp8 ", fraction, &wide, 4, 2 * 4096),
        ("WgmmaFp8 ", fp8_fraction, &narrow, 4, 2 * 2048),
    ] {
        let fits: Vec<_> = of_all.iter().filter(|fit| fit.product.starts_with(row)).collect();
        assert_eq!(fits.len(), products, "{row}");
        for fit in fits {
            assert_eq!((fit.elements, fit.best()), (elements, (bits, 0)), "{}: {:?}", fit.product, fit.differing);
            let differ = |tried| fit.differing.iter().any(|&(fraction, count)| fraction == tried && count > 100);
            assert!(differ(bits - 1) && differ(bits + 1), "{}: {:?}", fit.product, fit.differing);
        }
    }
}
