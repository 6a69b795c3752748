//! Expressions in the kernels: right in the simulator, and no work where they leave none.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, expressions, parse_mask, parse_shape};
use flashcore_ir::Arch;
use flashcore_kernels::{Argument, Config, LaunchPlan, Stage};
use flashcore_problem::{Alignment, DType, Inputs, Mask, MaskMod, Problem, ScoreMod};
use flashcore_sim::Counters;

fn check(kernel: &str, shape: &str, mask: &str) {
    let mut problem = parse_shape(shape, DType::F16).expect("a shape");
    (problem.mask, problem.lse) = (parse_mask(mask).expect("a mask"), true);
    let case = Case::new(problem, 5, Backend::Sim(kernel.parse().expect("a config")));
    let outcome = verify(&case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

/// Every expression by name with every family, over four tiles of keys with tails of rows and keys.
#[test]
fn every_expression_is_right_in_every_family() {
    for (number, name) in expressions::SCORE_MODS.into_iter().chain(expressions::MASK_MODS).enumerate() {
        let shape = format!("1x2x70,203x64+{name}");
        for kernel in ["ampere", "hopper"] {
            check(kernel, &shape, ["full", "causal"][number % 2]);
        }
        check(["scalar", "ladder"][number % 2], &format!("1x2x33,97x32+{name}"), "causal");
    }
}

/// Long enough that tiles are far from the diagonal, on both sides, and that documents end within tiles and between.
#[test]
fn tiles_far_from_the_diagonal_and_tiles_of_other_documents() {
    for kernel in ["ampere", "hopper", "hopper-64x64-4stage-2kvgroups-pdl", "ampere-64x64-2stage-swizzled-3splits"] {
        check(kernel, "1x2x300,700x64+relative+documents", "full");
    }
    check("hopper", "2x1x500x128+relative", "full");
    check("ampere", "1x2x300,700x64+documents", "window:200,100");
    // More tiles of query rows than CTAs, which sort them.
    check("hopper", "1x4x900x64+documents", "full");
    check("hopper", "2x2x700,900x64+documents", "causal");
}

/// Warpgroups that do not wait for each other, and go through tiles of their own.
const ALONE: [&str; 2] = ["hopper-128x128-2stage-overlap-persistent", "hopper-192x64-3stage"];

/// Documents end within the rows of a CTA, so that its warpgroups have different keys; some have none at all.
#[test]
fn warpgroups_have_tiles_of_their_own() {
    let none =
        MaskMod::new("none", |at| at.integer(at.query).equals(at.integer(at.key)) & !at.integer(at.query).equals(1));
    for kernel in ALONE {
        check(kernel, "1x2x300,700x64+documents", "full");
        check(kernel, "1x2x300,700x64+relative+documents", "causal");
        check(kernel, "2x2x500x32+documents", "window:200,100");
        let mut problem = parse_shape("1x2x500,700x64", DType::F16).expect("a shape");
        (problem.mask_mod, problem.aux_i32) = (Some(none), 700);
        let case = Case::new(problem, 5, Backend::Sim(kernel.parse().expect("a config")));
        let outcome = verify(&case, None);
        assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
    }
}

/// Tiles of rows begin anew where documents do, and where rows only seem to attend other keys than those before them; with
/// more of them than half of the tiles, nowhere.
#[test]
fn tiles_of_rows_begin_where_documents_do() {
    for kernel in ["hopper-64x32-2stage-overlap-persistent", "hopper-64x32-2stage-overlap-pingpong-persistent"] {
        check(kernel, "1x2x1100x64+documents", "full");
        check(kernel, "1x4/2x1100x64+relative+documents", "causal");
        check(kernel, "2x1x1100,900x32+documents", "window:200,100");
    }
    check(ALONE[0], "1x1x2100x32+documents", "full");
    // Rows of which none attends its own document, and one that is alone among all others.
    let shifted = MaskMod::new("shifted", |at| at.integer(at.query).equals(at.integer(at.key) + 1));
    let alone = MaskMod::new("alone", |at| at.key.equals(at.query) | !(at.query.equals(301) | at.key.equals(301)));
    for mask in [shifted, alone] {
        let mut problem = parse_shape("1x2x700x64", DType::F16).expect("a shape");
        (problem.mask_mod, problem.aux_i32, problem.lse) = (Some(mask), 700, true);
        let case =
            Case::new(problem, 5, Backend::Sim("hopper-64x32-2stage-overlap-persistent".parse().expect("a config")));
        let outcome = verify(&case, None);
        assert!(outcome.passed(), "{mask:?} {case}: {:#?}", outcome.complaints());
    }
}

/// Chunks of which no row of a tile attends a key, under masks with ranges of a CTA and of each warpgroup: the combine kernel
/// counts the chunks of a sequence, and knows nothing of block masks.
#[test]
fn chunks_of_masked_keys() {
    for kernel in [
        "hopper-64x64-2stage-pdl-128chunk",
        "hopper-128x64-2stage-192chunk",
        "ampere-32x32-2stage-swizzled-7persistent-64chunk",
    ] {
        for mask in ["full", "causal", "window:100,20"] {
            check(kernel, "1x2x197,611x64+documents", mask);
        }
        check(kernel, "2x2x97,611x64+relative+prefix", "full");
        check(kernel, "3x1x97,611x64+documents+seqused_k", "full");
    }
    let mut bytes = parse_shape("1x2x97,611x64+documents", DType::E4m3).expect("a shape");
    bytes.out_dtype = Some(DType::F16);
    let case = Case::new(bytes, 5, Backend::Sim("hopper-64x64-2stage-pdl-128chunk".parse().expect("a config")));
    let outcome = verify(&case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

/// Masks with full or empty blocks, or what seems to be one: sums that wrap within a tile and past it, spans too wide to be
/// one, entries beyond the ends of a table, conditions of which only one side is known.
#[test]
fn masks_are_right_for_whole_tiles() {
    let masks = [
        MaskMod::new("wraps", |at| (at.key * 3_000_000 + 1_900_000_000).less(at.query)),
        MaskMod::new("wide", |at| (at.key * (1 << 25)).less(at.query * (1 << 24))),
        MaskMod::new("beyond", |at| at.integer(at.query + 600).equals(at.integer(at.key - 60))),
        MaskMod::new("of batch", |at| at.integer(at.batch * 300 + at.query).less(at.integer(at.batch * 300 + at.key))),
        MaskMod::new("negated", |at| !at.integer(at.query).equals(at.integer(at.key)) & at.key.less(300)),
        MaskMod::new("by numbers", |at| at.number(at.key).less(0.5) & at.integer(at.query).equals(at.integer(at.key))),
        MaskMod::new("far", |at| at.integer(at.key * 7 - at.query * 5).less(3) | at.query.equals(at.key)),
    ];
    for mask in masks {
        let mut problem = parse_shape("2x1x150,700x64", DType::F16).expect("a shape");
        (problem.mask_mod, problem.aux_f32, problem.aux_i32) = (Some(mask), 700, 700);
        for kernel in ["ampere", "hopper", ALONE[0]] {
            let case = Case::new(problem.clone(), 5, Backend::Sim(kernel.parse().expect("a config")));
            let outcome = verify(&case, None);
            assert!(outcome.passed(), "{mask:?} {case}: {:#?}", outcome.complaints());
        }
    }
}

/// Attention at a temperature over keys up to so many before a row and after it, of which the first are a prefix for all.
fn tempered(temperature: f32, window: i32, prefix: i32) -> Problem {
    let mut problem = parse_shape("1x2x150,300x64", DType::F16).expect("a shape");
    let score = ScoreMod::new("tempered", |score, at| {
        (score / temperature).min(4.0) - (at.query - at.key - window).abs().to_number() * 0.01
    });
    let mask = MaskMod::new("window", |at| (at.query - at.key + 7).abs().less(window) | at.key.less(prefix));
    (problem.score_mod, problem.mask_mod, problem.lse) = (Some(score), Some(mask), true);
    problem
}

/// A thousand temperatures and windows have one attention kernel, and one block-mask kernel, with other arguments.
#[test]
fn other_constants_are_other_arguments_of_the_same_kernels() {
    for kernel in ["ampere-32x32-2stage-swizzled-2splits", "hopper-64x32-2stage"] {
        let plan = |number: u16| {
            let problem = tempered(f32::from(number) / 64.0, number.into(), i32::from(number) / 2);
            LaunchPlan::new(&problem, kernel.parse().expect("a config"), Arch::Sm90a).expect("a plan")
        };
        let first = plan(0);
        let specs =
            |plan: &LaunchPlan| plan.launches.iter().map(|launch| (launch.key, launch.grid)).collect::<Vec<_>>();
        for number in 1..=1000 {
            let other = plan(number);
            assert_eq!(specs(&first), specs(&other), "{kernel} {number}");
            for (launch, other) in first.launches.iter().zip(&other.launches) {
                let arguments = launch.template().iter().zip(other.template());
                let differences = arguments.filter(|(one, other)| one != other);
                // Scores and masks are done with when splits are combined.
                if launch.stage() == Stage::Combine {
                    assert_eq!(differences.count(), 0);
                    continue;
                }
                let expected = [
                    Argument::F32(f32::from(number) / 64.0),
                    Argument::S32(number.into()),
                    Argument::S32(number.into()),
                    Argument::S32(i32::from(number) / 2),
                ];
                // Half of the first number is none.
                let expected = if number == 1 { &expected[..3] } else { &expected };
                assert!(differences.map(|(_, other)| other).eq(expected), "{kernel} {number}: {:?}", other.template());
            }
        }
    }
}

/// One kernel with other constants, each judged.
#[test]
fn every_family_takes_its_constants_at_run_time() {
    let kernels = ["ampere", "hopper", ALONE[0], "ampere-64x64-2stage-swizzled-2splits", "scalar", "ladder"];
    for (number, kernel) in kernels.into_iter().enumerate() {
        for (temperature, window, prefix) in [(0.25, 40, 3), (1.5, 120, -1)] {
            let mut problem = tempered(temperature, window, prefix);
            if number % 2 == 0 || window == 120 {
                problem.mask = Mask::Causal(Alignment::BottomRight);
            }
            let case = Case::new(problem, 5, Backend::Sim(kernel.parse().expect("a config")));
            let outcome = verify(&case, None);
            assert!(outcome.passed(), "{temperature} {window} {case}: {:#?}", outcome.complaints());
        }
    }
}

/// Between the ends of a tile a sum wraps, so that its ends are limited to the same integer and what lies between is not.
#[test]
fn a_term_whose_index_wraps_within_a_tile_is_not_the_same_for_all_of_it() {
    let limit = i32::MAX - 20;
    let wraps = ScoreMod::new("wraps", |score, at| score + at.number((at.key + (i32::MAX - 104)).max(limit) - limit));
    for kernel in ["ampere-64x64-2stage-swizzled", "hopper-64x128-2stage"] {
        let mut problem = parse_shape("1x1x64,256x64", DType::F16).expect("a shape");
        (problem.score_mod, problem.aux_f32) = (Some(wraps), 21);
        let case = Case::new(problem, 5, Backend::Sim(kernel.parse().expect("a config")));
        let outcome = verify(&case, None);
        assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
    }
}

fn counted(problem: &Problem, inputs: &Inputs, kernel: &str) -> Counters {
    let config: Config = kernel.parse().expect("a config");
    let plan = LaunchPlan::new(problem, config, Arch::Sm90a).expect("a plan");
    simulate(&plan, problem, inputs, 0).expect("it runs").counters
}

/// Two documents of 256 positions: half of the tiles of keys have nothing for a tile of rows.
#[test]
fn tiles_without_attended_keys_are_left_out() {
    for kernel in ["ampere", "hopper", "ladder-64x64-2stage-swizzled-tensorqk-tensorpv"] {
        let plain = parse_shape("1x1x512x64", DType::F16).expect("a shape");
        let masked = parse_shape("1x1x512x64+documents", DType::F16).expect("a shape");
        let mut inputs = Inputs::random(&masked, 3);
        inputs.aux_i32 = Some((0..512).map(|position| position / 256).collect());
        let with = counted(&masked, &inputs, kernel).tensor_flops;
        inputs.aux_i32 = None;
        let without = counted(&plain, &inputs, kernel).tensor_flops;
        assert_eq!(2 * with, without, "{kernel}");
    }
}

/// Documents of 192 and 320 positions: of 64 rows each, three have the first two of four tiles of keys, five the last three.
#[test]
fn tiles_without_attended_keys_are_left_out_by_each_warpgroup() {
    let plain = parse_shape("1x1x512x64", DType::F16).expect("a shape");
    let masked = parse_shape("1x1x512x64+documents", DType::F16).expect("a shape");
    let mut inputs = Inputs::random(&masked, 3);
    inputs.aux_i32 = Some((0..512).map(|position| i32::from(position >= 192)).collect());
    let with = counted(&masked, &inputs, ALONE[0]).tensor_flops;
    inputs.aux_i32 = None;
    let without = counted(&plain, &inputs, ALONE[0]).tensor_flops;
    assert_eq!(32 * with, (3 * 2 + 5 * 3) * without);
}

/// A document from 192 to 448: its rows have two tiles of keys from 192 on, and not three, and begin a tile of rows.
#[test]
fn tiles_begin_where_something_is_attended() {
    let plain = parse_shape("1x1x512x64", DType::F16).expect("a shape");
    let masked = parse_shape("1x1x512x64+documents", DType::F16).expect("a shape");
    let mut inputs = Inputs::random(&masked, 3);
    let document = |position: i32| i32::from(position >= 192) + i32::from(position >= 448);
    inputs.aux_i32 = Some((0..512).map(document).collect());
    let with = counted(&masked, &inputs, ALONE[0]).tensor_flops;
    inputs.aux_i32 = None;
    let without = counted(&plain, &inputs, ALONE[0]).tensor_flops;
    // Of 64 rows each, none of which has two documents: three of the first, of two tiles; four of two, one of one.
    assert_eq!(32 * with, (3 * 2 + 4 * 2 + 1) * without);
}

/// A term that is constant over a tile is read once: of 64 tiles of keys, all but a few are further than 128 away.
#[test]
fn terms_that_are_the_same_for_a_tile_are_read_once() {
    let mut problem = parse_shape("1x1x64,4096x64+relative", DType::F16).expect("a shape");
    let inputs = Inputs::random(&problem, 3);
    let loads = |problem: &Problem| counted(problem, &inputs, "ampere").global_loads.requests;
    let limited = loads(&problem);
    // The same without a limit that makes distances one.
    let unlimited = ScoreMod::new("unlimited", |score, at| score + at.number(at.query - at.key + 128));
    problem.score_mod = Some(unlimited);
    let unlimited = loads(&problem);
    problem.score_mod = None;
    let plain = loads(&problem);
    assert!(4 * (limited - plain) < unlimited - plain, "{plain}, {limited}, {unlimited}");
}
