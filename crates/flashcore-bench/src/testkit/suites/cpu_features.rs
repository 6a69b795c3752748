//! Cases of the CPU, which has every feature of a problem: a pairwise design, and random ones.

use flashcore_cpu::Level;
use flashcore_problem::{Alignment, DType, Mask, OperandSet, SplitMix64, Stress};

use super::design::{Design, Row};
use super::features::{
    EXPRESSIONS, Features, LSE_FORMS, LayoutForm, SCALE_FACTORS, SOFTCAPS, every_bias, every_numbers, suits,
};
use super::float8::give_float8;
use crate::testkit::case::other_operands;
use crate::testkit::{BiasForm, Case, Numbers, Planted};

/// Cases of the pairwise design, at least.
const COVERING_CASES: usize = 2000;
/// Seed of the design.
const COVERING_SEED: u64 = 0xc07e;

const HEAD_DIMS: [usize; 21] = [1, 3, 5, 8, 16, 17, 24, 32, 33, 40, 64, 65, 72, 80, 96, 112, 127, 128, 160, 192, 256];
/// The first three: the head dimension itself.
const VALUE_DIMS: [usize; 14] = [0, 0, 0, 1, 3, 8, 15, 16, 31, 64, 65, 96, 128, 256];
const HEADS: [(usize, usize); 9] = [(1, 1), (2, 2), (3, 3), (2, 1), (4, 2), (6, 2), (4, 1), (8, 1), (7, 1)];
const BATCHES: [usize; 6] = [1, 1, 2, 2, 3, 0];
/// Queries and keys: nothing, few, decoding, tiles of keys with ragged tails, as many queries as keys.
const LENGTHS: [(usize, usize); 26] = [
    (0, 9),
    (5, 0),
    (1, 1),
    (2, 3),
    (7, 130),
    (1, 300),
    (1, 5000),
    (2, 4097),
    (3, 1000),
    (4, 513),
    (8, 2049),
    (16, 777),
    (17, 400),
    (40, 640),
    (33, 901),
    (65, 389),
    (64, 512),
    (97, 203),
    (130, 257),
    (128, 385),
    (203, 97),
    (239, 1),
    (63, 63),
    (128, 128),
    (193, 193),
    (201, 201),
];

/// A pairwise design over every feature: every two values of every two features meet in a case.
pub(super) fn covering(level: Level, first_number: usize) -> Vec<Case> {
    let design = Design {
        head_dims: &HEAD_DIMS,
        value_dims: &VALUE_DIMS,
        heads: &HEADS,
        batches: &BATCHES,
        lengths: &LENGTHS,
        dtypes: &DType::ALL,
        biases: every_bias(),
        numbers: every_numbers(),
    };
    let case = |(index, row): (usize, Row)| {
        let number = first_number + index;
        let command = format!("flashcore verify --backend cpu --suite full --only {number}");
        design.features(&row).case(number as u64, level, command)
    };
    design.rows(|_, _| false, COVERING_CASES, COVERING_SEED).into_iter().enumerate().map(case).collect()
}

/// Keeps the numbers that shape a problem apart from those that fill its tensors.
const FUZZ_STREAM: u64 = 0xf_022c;

/// A random problem over every feature, small enough that 20,000 take a few minutes.
pub(super) fn fuzz_case(level: Level, number: u64) -> Case {
    let features = random_features(&mut SplitMix64::stream(number, FUZZ_STREAM));
    let mut case = features.case(number, level, format!("flashcore verify --backend cpu --fuzz 1 --seed {number}"));
    give_float8(&mut case.problem, number);
    case
}

pub(super) fn random_features(random: &mut SplitMix64) -> Features {
    let one_in = |random: &mut SplitMix64, count: usize| random.below(count) == 0;
    let head_dim = random_dim(random);
    let value_dim = if random.below(3) > 0 { head_dim } else { random_dim(random) };
    let key_heads = 1 + random.below(3);
    let layout = LayoutForm::ALL[random.below(LayoutForm::ALL.len())];
    let mut lengths = random_lengths(random);
    if layout == LayoutForm::PackedQkv {
        let both = if random.below(4) == 0 { 385 + random.below(80) } else { random.below(200) };
        lengths = (both, both);
    }
    let (alibi, sinks) = (one_in(random, 4), one_in(random, 4));
    let bias = one_in(random, 4).then(|| BiasForm::ALL[random.below(BiasForm::ALL.len())]);
    let numbers = match random.below(16) {
        0 | 1 => Numbers::Stress(Stress::ALL[random.below(Stress::ALL.len())]),
        2 | 3 => Numbers::Planted(Planted::ALL[random.below(Planted::ALL.len())]),
        _ => Numbers::Normal,
    };
    let dtype = DType::ALL[random.below(DType::ALL.len())];
    let scale_factor = SCALE_FACTORS[random.below(SCALE_FACTORS.len())];
    let mut features = Features {
        batch: [0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4][random.below(12)],
        heads: (key_heads * [1, 1, 2, 3, 4, 7, 8][random.below(7)], key_heads),
        lengths,
        dims: (head_dim, value_dim),
        dtype,
        scale_factor,
        mask: random_mask(random, lengths.1),
        softcap: SOFTCAPS[random.below(SOFTCAPS.len())],
        alibi,
        sinks,
        bias,
        seqused_k: one_in(random, 3),
        lse: LSE_FORMS[random.below(LSE_FORMS.len())],
        others: OperandSet::NONE,
        layout,
        numbers: if suits(numbers, bias, alibi, sinks) { numbers } else { Numbers::Normal },
        expressions: if one_in(random, 4) { EXPRESSIONS[random.below(EXPRESSIONS.len())] } else { (None, None) },
    };
    features.others = other_operands().filter(|_| one_in(random, 4)).collect();
    let most_work = [1_000_000, 3_000_000][random.below(2)] * if one_in(random, 32) { 8 } else { 1 };
    shrink(&mut features, most_work);
    features
}

/// Takes away batches, then heads, then queries, then columns; keys stay, for it is tiles of keys that go wrong.
pub(super) fn shrink(features: &mut Features, most_work: usize) {
    while features.work() > most_work {
        let (query_heads, key_heads) = features.heads;
        if features.batch > 1 {
            features.batch -= 1;
        } else if key_heads > 1 {
            features.heads = (query_heads / key_heads * (key_heads - 1), key_heads - 1);
        } else if query_heads > 2 {
            features.heads = (query_heads / 2, 1);
        } else if features.lengths.0 > 8 && features.layout != LayoutForm::PackedQkv {
            features.lengths.0 -= features.lengths.0.div_ceil(4);
        } else if query_heads > 1 {
            features.heads = (1, 1);
        } else {
            features.dims = (features.dims.0.div_ceil(2), features.dims.1.div_ceil(2));
        }
    }
}

pub(super) fn random_dim(random: &mut SplitMix64) -> usize {
    match random.below(4) {
        0 => 1 + random.below(16),
        1 => 8 * (1 + random.below(16)),
        2 => [64, 128][random.below(2)],
        _ => 1 + random.below(256),
    }
}

/// Queries and keys; more than three tiles of 128 keys in about half of all cases.
fn random_lengths(random: &mut SplitMix64) -> (usize, usize) {
    const AROUND_TILES: [usize; 13] = [31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 127, 128, 129];
    let many = |random: &mut SplitMix64| match random.below(4) {
        0 => [384, 385, 511, 512, 513, 639, 640, 641][random.below(8)],
        1 => 385 + random.below(1700),
        _ => 385 + random.below(400),
    };
    match random.below(8) {
        0 => (random.below(9), random.below(9)),
        1 => (1 + random.below(8), many(random)),
        2 => {
            let longest = [5000, 1200, 1200, 1200, 1200, 1200, 1200, 1200][random.below(8)];
            (1 + random.below(8), 1 + random.below(longest))
        }
        3 => (AROUND_TILES[random.below(13)], AROUND_TILES[random.below(13)]),
        4 => (AROUND_TILES[random.below(13)], many(random)),
        5 | 6 => (1 + random.below(130), many(random)),
        _ => (random.below(300), random.below(300)),
    }
}

pub(super) fn random_mask(random: &mut SplitMix64, keys: usize) -> Mask {
    let alignment = [Alignment::TopLeft, Alignment::BottomRight][random.below(2)];
    let limit = |random: &mut SplitMix64| match random.below(4) {
        0 => None,
        1 => Some(random.below(5)),
        2 => Some(random.below(150)),
        _ => Some(random.below(keys + 1)),
    };
    match random.below(3) {
        0 => Mask::None,
        1 => Mask::Causal(alignment),
        _ => match (limit(random), limit(random)) {
            (None, None) => Mask::Window { left: Some(keys / 3), right: None, alignment },
            (left, right) => Mask::Window { left, right, alignment },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::Problem;

    /// Percentage of `cases` of a kind.
    fn share(cases: &[Case], is: impl Fn(&Problem) -> bool) -> usize {
        100 * cases.iter().filter(|case| is(&case.problem)).count() / cases.len()
    }

    fn check_is_broad(cases: &[Case]) {
        for case in cases {
            assert_eq!(case.problem.validate(), Ok(()), "{case}");
        }
        let parts: [(&str, usize, usize); 12] = [
            ("more than three tiles of 128 keys", 35, share(cases, |problem| problem.key_length > 384)),
            ("one to eight queries", 20, share(cases, |problem| (1..=8).contains(&problem.query_length))),
            ("grouped heads", 20, share(cases, |problem| problem.query_heads > problem.key_heads)),
            ("a mask", 50, share(cases, |problem| problem.mask != Mask::None)),
            ("another value dim", 20, share(cases, |problem| problem.head_dim != problem.value_dim)),
            ("ALiBi", 15, share(cases, |problem| problem.alibi)),
            ("sinks", 15, share(cases, |problem| problem.sinks)),
            ("bias", 15, share(cases, |problem| problem.bias)),
            ("softcap", 15, share(cases, |problem| problem.softcap.is_some())),
            ("seqused_k", 20, share(cases, |problem| problem.seqused_k)),
            ("log-sum-exp", 40, share(cases, |problem| problem.lse)),
            ("no output", 1, share(cases, |problem| problem.output_shape().is_empty())),
        ];
        for (what, least, percent) in parts {
            assert!(percent >= least, "{what}: {percent}% of the cases, and at least {least}% are meant to be");
        }
        for planted in Planted::ALL {
            assert!(cases.iter().any(|case| case.numbers == Numbers::Planted(planted)), "{planted:?}");
        }
        for bias in BiasForm::ALL {
            assert!(cases.iter().any(|case| case.problem.bias && case.bias == bias), "{bias:?}");
        }
    }

    #[test]
    fn the_design_holds_2000_cases_over_every_feature() {
        let cases = covering(Level::Portable, 100);
        assert!(cases.len() >= COVERING_CASES, "{}", cases.len());
        check_is_broad(&cases);
        assert_eq!(cases[0].seed, 100);
        assert_eq!(cases[7].command(), "flashcore verify --backend cpu --suite full --only 107 --cpu-level portable");
        assert_eq!(cases, covering(Level::Portable, 100));
    }

    #[test]
    fn random_cases_are_broad_and_small() {
        let cases: Vec<Case> = (0..2000).map(|number| fuzz_case(Level::Portable, number)).collect();
        check_is_broad(&cases);
        assert!(share(&cases, |problem| problem.dtypes().key_value.is_float8()) >= 12);
        assert!(share(&cases, |problem| problem.k_scale) >= 8);
        let work: Vec<usize> =
            (0..2000).map(|number| random_features(&mut SplitMix64::stream(number, FUZZ_STREAM)).work()).collect();
        assert!(work.iter().sum::<usize>() / work.len() < 2_000_000, "{}", work.iter().sum::<usize>() / work.len());
        assert_eq!(fuzz_case(Level::Portable, 7), cases[7]);
    }
}
