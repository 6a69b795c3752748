//! Tests of the microbenchmarks: verdicts in the simulator, kernels through ptxas, figures from made-up times.

use flashcore_ir::Fp8;
use flashcore_ptx::{assemble, print, ptxas};

use super::conversions::{loop_alone, way_name, words_of_all_codes};
use super::*;

#[test]
fn every_conversion_is_exact_and_every_product_right() {
    let found = simulate(Arch::Sm90a).expect("the simulator runs all of it");
    assert_eq!((found.conversions.len(), found.products.len()), (16, 3));
    let wrong: Vec<_> = found.conversions.iter().filter(|row| !row.wrong_codes.is_empty()).collect();
    assert_eq!(wrong, Vec::<&ConversionRow>::new());
    assert!(found.passed());
    // Per four codes: e4m3 to f16 in 9 and e5m2 to f16 in 1 for a pair, the instruction once for a pair.
    let counts = |from: &str, to: &str| {
        let rows = found.conversions.iter().filter(|row| row.from == from && row.to == to);
        rows.map(|row| (row.way.as_str(), row.order.as_str(), row.instructions)).collect::<Vec<_>>()
    };
    let all = |integer, cvt_keys, cvt_values| {
        vec![
            ("integer", "keys", integer),
            ("integer", "values", integer),
            ("cvt", "keys", cvt_keys),
            ("cvt", "values", cvt_values),
        ]
    };
    assert_eq!(counts("e4m3", "f16"), all(18, 2, 4));
    assert_eq!(counts("e5m2", "f16"), all(2, 2, 4));
    assert_eq!(counts("e4m3", "bf16"), all(18, 8, 10));
    assert_eq!(counts("e5m2", "bf16"), all(18, 8, 10));
}

#[test]
fn architectures_have_what_their_instructions_allow() {
    let found = simulate(Arch::Sm80).expect("the simulator runs all of it");
    assert!(found.conversions.iter().all(|row| row.way == "integer" && row.is_default), "no cvt before sm_89");
    let forms: Vec<_> = found.products.iter().map(|row| row.form.as_str()).collect();
    assert_eq!((found.conversions.len(), forms), (8, vec!["m16n8k16 f16", "m16n8k16 bf16"]));
}

#[test]
fn the_words_have_every_code_in_every_byte() {
    let words = words_of_all_codes();
    for byte in 0..4 {
        let mut codes: Vec<u8> = words.iter().map(|word| word.to_le_bytes()[byte]).collect();
        codes.sort_unstable();
        assert_eq!(codes, (0..=u8::MAX).collect::<Vec<_>>());
    }
}

#[test]
fn codes_that_become_other_numbers_are_named() {
    let conversion =
        Conversion { from: Fp8::E4m3, to: DType::F16, way: Fp8Widening::Integer, order: ByteOrder::Values };
    // Bytes 0 and 2, then 1 and 3: 1, -0, NaN, 2^-9 of e4m3.
    let word = u32::from_le_bytes([0x38, 0x7f, 0x80, 0x01]);
    let right = [0x8000_3c00, 0x1800_7e01];
    assert_eq!(conversion.wrong_codes(&[word], &right), Vec::<u8>::new());
    assert_eq!(conversion.wrong_codes(&[word], &[0x0000_3c00, 0x1800_7c00]), vec![0x7f, 0x80]);
    assert_eq!(conversion.wrong_codes(&[word], &[0x8000_3c00]), vec![0x01, 0x7f]);
}

/// Every kernel that is timed, through ptxas: nothing is spilled.
#[test]
#[expect(clippy::print_stderr, reason = "a test that did not assemble says so")]
fn ptxas_takes_every_kernel() {
    if let Err(reason) = ptxas::find() {
        eprintln!("not assembled: {reason}");
        return;
    }
    for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm120] {
        let conversions = Conversion::all().filter(|conversion| conversion.exists_on(arch));
        let products = Product::ALL.into_iter().filter(|product| product.exists_on(arch));
        let kernels = conversions
            .map(|conversion| conversion.loop_kernel(arch))
            .chain(products.map(|product| product.loop_kernel(arch)))
            .chain([loop_alone(arch)]);
        for kernel in kernels {
            let kernel = kernel.expect("a kernel");
            let found = assemble(&print(&kernel), arch).expect("ptxas takes it");
            assert_eq!((found.spill_store_bytes, found.spill_load_bytes), (0, 0), "{} on {arch}", kernel.name);
        }
    }
}

fn row(way: Fp8Widening, order: ByteOrder, is_default: bool, microseconds: f64) -> ConversionRow {
    ConversionRow {
        from: "e4m3".to_owned(),
        to: "bf16".to_owned(),
        way: way_name(way).to_owned(),
        order: order.name().to_owned(),
        is_default,
        wrong_codes: Vec::new(),
        instructions: 0,
        measured: Some(ConversionRate {
            codes: 1.0,
            seconds: vec![microseconds * 1e-6],
            codes_per_clock_per_sm: 1.0,
            decode_seconds: microseconds * 1e-6,
        }),
    }
}

#[test]
fn a_default_that_is_not_the_fastest_is_named() {
    let found = |[integer_keys, integer_values, cvt_keys, cvt_values]: [f64; 4]| Microbenchmark {
        arch: "sm_89".to_owned(),
        decode: None,
        loop_alone: None,
        conversions: vec![
            row(Fp8Widening::Integer, ByteOrder::Keys, true, integer_keys),
            row(Fp8Widening::Integer, ByteOrder::Values, true, integer_values),
            row(Fp8Widening::Convert, ByteOrder::Keys, false, cvt_keys),
            row(Fp8Widening::Convert, ByteOrder::Values, false, cvt_values),
        ],
        products: Vec::new(),
    };
    // Slower for keys and faster for values: together decide.
    assert_eq!(found([10.0, 10.0, 12.0, 7.5]).slower_defaults(), Vec::new());
    let [slower] = &found([16.0, 16.0, 10.0, 14.0]).slower_defaults()[..] else { panic!("one default is slower") };
    let SlowerDefault { from, to, default, faster, ratio } = slower;
    let names = [from, to, default, faster].map(String::as_str);
    assert_eq!((names, (1000.0 * ratio).round()), (["e4m3", "bf16", "integer", "cvt"], 750.0));
    assert_eq!(found([7.0, 7.0, 14.0, 14.0]).slower_defaults(), Vec::new());
}
