use super::super::Tables;
use super::*;

/// Numbers and integers by the hundred.
fn tables() -> (Vec<f32>, Vec<i32>) {
    let numbers = (0..600_u16).map(|index| (f32::from(index) * 0.37).sin()).collect();
    (numbers, (0..600).map(|index| index / 7).collect())
}

fn scores(score_mod: ScoreMod, place: (usize, usize, usize)) -> Vec<f64> {
    let (numbers, integers) = tables();
    let mut scores: Vec<f64> = (0..40).map(|index| f64::from(index) * 0.3 - 5.0).collect();
    let keys: Vec<usize> = (0..40).collect();
    score_mod.apply_to_row(Tables { numbers: &numbers, integers: &integers }, place, &keys, &mut scores);
    scores
}

fn attended(mask_mod: MaskMod, place: (usize, usize, usize)) -> Vec<usize> {
    let (numbers, integers) = tables();
    mask_mod.attended(Tables { numbers: &numbers, integers: &integers }, place, 0..40)
}

/// Texts and closures that say the same.
#[test]
fn texts_are_what_closures_are() {
    let check = |text: &str, closure: ScoreMod| {
        let parsed = ScoreMod::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        for place in [(0, 0, 0), (1, 2, 17), (2, 1, 39)] {
            assert_eq!(scores(parsed, place), scores(closure, place), "{text} at {place:?}");
        }
    };
    check("score", ScoreMod::new("", |score, _| score));
    check("score + 0.1 * (q - k)", ScoreMod::new("", |score, at| score + 0.1 * (at.query - at.key).to_number()));
    check("-score / 2 - -1", ScoreMod::new("", |score, _| -score / 2.0 - -1.0));
    check("score * 2 + 3 * 4", ScoreMod::new("", |score, _| score * 2.0 + 12.0));
    check("10 - 3 - 2 - score", ScoreMod::new("", |score, _| 5.0 - score));
    check("2 * 3 > score ? 1 : score - 2.5e0", ScoreMod::new("", |score, _| score.less(6.0).number(1.0, score - 2.5)));
    check(
        "relative(16)",
        ScoreMod::new("", |score, at| score + at.number(at.head * 33 + (at.query - at.key).max(-16).min(16) + 16)),
    );
    check("softcap(3)", ScoreMod::new("", |score, _| 3.0 * (score / 3.0).tanh()));
    check("temperature(0.5)", ScoreMod::new("", |score, _| score / 0.5));
    check("distance(0.03)", ScoreMod::new("", |score, at| score - (at.query - at.key).abs().to_number() * 0.03));
    check(
        "d = abs(query - key); near = d < 5 && score > -3; near ? max(score, d) : exp(min(score, 0.5)) + b",
        ScoreMod::new("", |score, at| {
            let distance = (at.query - at.key).abs();
            let near = distance.less(5) & score.more(-3.0);
            near.number(score.max(distance.to_number()), score.min(0.5).exp() + at.batch.to_number())
        }),
    );
    check(
        "aux_f32[aux_i32[k] * 2 + (q >> 1 + 1)] * number(h)",
        ScoreMod::new("", |_, at| at.number(at.integer(at.key) * 2 + (at.query >> 2)) * at.head.to_number()),
    );
    check("7", ScoreMod::new("", |score, _| score * 0.0 + 7.0));
}

#[test]
fn masks_are_what_closures_are() {
    let check = |text: &str, closure: MaskMod| {
        let parsed = MaskMod::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        for place in [(0, 0, 0), (1, 2, 17), (2, 1, 39)] {
            assert_eq!(attended(parsed, place), attended(closure, place), "{text} at {place:?}");
        }
    };
    check("documents", MaskMod::new("", |at| at.integer(at.query).equals(at.integer(at.key))));
    check("causal", MaskMod::new("", |at| at.query.at_least(at.key)));
    check("q - k > 3 ? k < 3 : 9 >= k", {
        MaskMod::new("", |at| {
            let far = (at.query - at.key).more(3);
            (far & at.key.less(3)) | (!far & at.key.at_most(9))
        })
    });
    check("prefix(5)", MaskMod::new("", |at| at.key.less(5) | at.query.at_least(at.key)));
    check("window(4, 2)", MaskMod::new("", |at| (at.query - at.key).at_most(4) & (at.key - at.query).at_most(2)));
    check("chunks(3)", MaskMod::new("", |at| (at.query >> 3).equals(at.key >> 3)));
    check("documents() && !causal || h == 1 && k != 7", {
        MaskMod::new("", |at| {
            let documents = at.integer(at.query).equals(at.integer(at.key));
            (documents & !at.query.at_least(at.key)) | (at.head.equals(1) & !at.key.equals(7))
        })
    });
    check(
        "3 <= k && 20 > k && 30 != q",
        MaskMod::new("", |at| at.key.at_least(3) & at.key.less(20) & !at.query.equals(30)),
    );
}

/// The same steps as the closure has, so that a kernel that is there is taken; and one kernel for all constants.
#[test]
fn constants_are_no_part_of_the_structure() {
    let same = |one: ScoreMod, other: ScoreMod| std::ptr::eq(one.expression(), other.expression());
    let parse = |text: &str| ScoreMod::parse(text).unwrap();
    assert!(same(parse("score / 0.7"), parse("score  / 3 ")) && !same(parse("score / 3"), parse("score / h")));
    assert_eq!(parse("score / 3").expression().name(), "score / #");
    assert!(same(parse("temperature(2)"), parse("temperature(0.1)")));
    let closure = ScoreMod::new("tempered", |score, _| score / 0.7);
    assert_eq!(ScoreMod::parse_as("tempered", "score / 0.7"), Ok(closure));
}

#[test]
fn errors_point_at_the_column() {
    let check = |text: &str, column: usize, words: &str| {
        let of_score = ScoreMod::parse(text).unwrap_err();
        assert_eq!(of_score.column, column, "{text}: {of_score}");
        assert!(of_score.message.contains(words), "{text}: {of_score}");
    };
    check("", 1, "a number, a name or a `(` must stand here");
    check("score +", 8, "must stand here");
    check("score + foo", 9, "there is no `foo`; names are score, batch");
    check("score 2", 7, "an operator is missing");
    check("(score", 7, "a `)` is missing");
    check("score)", 6, "an operator is missing");
    check("q / 2", 3, "integers are not divided");
    check("score % 2", 7, "no remainder");
    check("score < 2", 1, "a score_mod is a number, and this is true or false");
    check("1 < score < 2 ? 1 : 2", 11, "comparisons are not chained");
    check("score = 2", 1, "`score` has a meaning already");
    check("q + 1 = 2", 7, "equality is written ==");
    check("score & 2", 7, "written &&");
    check("score ? 1 : 2", 7, "before `?` stands a number");
    check("q < k ? 1", 10, "`:` is missing");
    check("score + (q < k)", 7, "`+` is for numbers and integers");
    check("aux_f32[score]", 1, "the index of aux_f32 is a number");
    check("aux_f32", 1, "is a table");
    check("table[q]", 1, "is no table");
    check("score >> 1", 7, "`>>` divides an integer");
    check("q >> 32", 3, "from 0 to 31");
    check("q >> k", 3, "from 0 to 31");
    check("exp(1, 2)", 1, "it is written exp(x)");
    check("relative", 1, "relative has 0 arguments; it is written relative(n)");
    check("relative(q)", 1, "n of relative is an integer that is no constant");
    check("relative(0.5)", 1, "and so the index of aux_f32 is a number");
    check("score + 99999999999", 9, "integers go up to 2147483647");
    check("score + 2147483647 * 2", 20, "is no 32-bit integer");
    check("score + -(-2147483647 - 1)", 9, "is no 32-bit integer");
    check("score + abs(-2147483647 - 1)", 9, "is no 32-bit integer");
    check("score + 1e99", 9, "more than a float holds");
    check("score + 0x10", 9, "not a number");
    check("score + 1.2.3", 9, "not a number");
    check("é + score", 1, "there is no sign `é`");
    check("ü", 1, "there is no sign");
    check("score + \u{7}", 9, "there is no sign");
    check("1 < 2 ? score : 3", 3, "two constants");
    check("d = q; d = k; score", 8, "`d` has a meaning already");
    check("d = q score", 7, "a definition ends with `;`");
    check("max = 3; score", 1, "`max` has a meaning already");
    check("q = 3; score", 1, "`q` has a meaning already");
    check("-(q < k)", 1, "written !");
    check(&"(".repeat(100), 65, "nested more than 64 deep");
    check(&"-".repeat(5000), 5001, "at most 4096 characters");
    check(&"!".repeat(4000), 65, "nested more than");
    check("score + aux_f32[k + 1] + ".repeat(40).trim_end_matches(" + "), 1, "at most 64");

    let error = MaskMod::parse("q - k").unwrap_err();
    assert_eq!(
        error.to_string(),
        "column 1, at `q - k`: a mask_mod is true or false, such as query >= key, and this is not"
    );
    let error = MaskMod::parse("score > 1").unwrap_err();
    assert_eq!(error.to_string(), "column 1, at `score > 1`: a mask_mod does not know the score; it is for score_mod");
    assert_eq!(MaskMod::parse("k <").unwrap_err().to_string(), "column 4: a number, a name or a `(` must stand here");
}

/// Texts put together from parts of the language: none of them panics.
#[test]
fn texts_at_random() {
    const PARTS: [&str; 35] = [
        "score",
        "q",
        "k",
        "h",
        "b",
        "x",
        "x = ",
        ";",
        "(",
        ")",
        "[",
        "]",
        ",",
        "+",
        "-",
        "*",
        "/",
        ">> ",
        "<",
        "==",
        "&&",
        "||",
        "!",
        "?",
        ":",
        "1",
        "0.5",
        "2147483647",
        "abs(",
        "aux_f32[",
        "aux_i32[",
        "min(",
        "clamp(",
        "relative(",
        "documents",
    ];
    let mut state = 1_u64;
    let mut draw = |count: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % count
    };
    let mut taken = 0;
    for _ in 0..20_000 {
        let count = 1 + draw(9);
        let text: String = (0..count).map(|_| PARTS[draw(PARTS.len())]).collect();
        if let Ok(parsed) = ScoreMod::parse(&text) {
            scores(parsed, (1, 2, 3));
            taken += 1;
        }
        if let Ok(parsed) = MaskMod::parse(&text) {
            attended(parsed, (1, 2, 3));
            taken += 1;
        }
    }
    assert!(taken > 500, "{taken}");
}
