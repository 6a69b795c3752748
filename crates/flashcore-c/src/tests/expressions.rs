//! Expressions as text, and the struct of a launch for tensors in the host's memory.

use std::ffi::CString;

use super::*;

/// Random numbers of a seed.
fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    (0..count).map(|_| random.normal() as f32).collect()
}

const HEADS: usize = 2;
const LENGTH: usize = 203;
const DIM: usize = 8;

fn tensors(storage: &mut [Vec<f32>; 4], lse: &mut [f32]) -> Tensors {
    let [query, key, value, output] = storage;
    Tensors {
        query: query.as_ptr().cast(),
        key: key.as_ptr().cast(),
        value: value.as_ptr().cast(),
        output: output.as_mut_ptr().cast(),
        lse: lse.as_mut_ptr(),
        ..zeroed()
    }
}

fn with_texts(score: Option<&CString>, mask: Option<&CString>) -> Problem {
    let mut problem = problem(1, HEADS as u64, LENGTH as u64, DIM as u64, FLASHCORE_DTYPE_F32);
    problem.lse = 1;
    problem.score_mod = score.map_or(ptr::null(), |text| text.as_ptr());
    problem.mask_mod = mask.map_or(ptr::null(), |text| text.as_ptr());
    problem
}

/// Softmax by hand, with what the texts mean written in Rust.
#[test]
fn expressions_change_scores_and_masks() {
    let (score, mask) =
        (CString::new("score + aux_f32[h] * (q - k)").unwrap(), CString::new("documents && k != 5").unwrap());
    let mut problem = with_texts(Some(&score), Some(&mask));
    (problem.aux_f32, problem.aux_i32) = (HEADS as u64, LENGTH as u64);
    let plan = create(&problem).unwrap();
    let described = text(flashcore_plan_describe(plan));
    assert!(
        described.contains("score + aux_f32[h] * (q - k)") && described.contains("documents && k != #"),
        "{described}"
    );

    let elements = HEADS * LENGTH * DIM;
    let mut storage = [random(1, elements), random(2, elements), random(3, elements), vec![f32::NAN; elements]];
    let mut lse = vec![f32::NAN; HEADS * LENGTH];
    let slopes = [0.01_f32, -0.02];
    let documents: Vec<i32> = (0..LENGTH as i32).map(|position| position / 80).collect();
    let mut given = tensors(&mut storage, &mut lse);
    (given.aux_f32, given.aux_i32) = (slopes.as_ptr(), documents.as_ptr());
    // SAFETY: the tensors are as long as the problem says.
    assert_eq!(unsafe { flashcore_plan_run_tensors(plan, &raw const given) }, FLASHCORE_OK);

    let [query, key, value, output] = &storage;
    for head in 0..HEADS {
        for row in 0..LENGTH {
            let at =
                |tensor: &[f32], row: usize, column: usize| f64::from(tensor[(head * LENGTH + row) * DIM + column]);
            let weight = |other: usize| {
                let product: f64 = (0..DIM).map(|column| at(query, row, column) * at(key, other, column)).sum();
                let distance = row as f64 - other as f64;
                let score = product / (DIM as f64).sqrt() + f64::from(slopes[head]) * distance;
                let is_attended = documents[row] == documents[other] && other != 5;
                if is_attended { score.exp() } else { 0.0 }
            };
            let weights: Vec<f64> = (0..LENGTH).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            for column in 0..DIM {
                let expected: f64 =
                    (0..LENGTH).map(|other| weights[other] * at(value, other, column)).sum::<f64>() / sum;
                assert!((expected - at(output, row, column)).abs() < 2e-5, "{head} {row} {column}");
            }
            assert!((sum.ln() - f64::from(lse[head * LENGTH + row])).abs() < 2e-5, "{head} {row}");
        }
    }
    // What is missing is named; what is there without being asked for, too.
    given.aux_f32 = ptr::null();
    // SAFETY: null is looked at.
    assert_eq!(unsafe { flashcore_plan_run_tensors(plan, &raw const given) }, FLASHCORE_INVALID_ARGUMENT);
    assert!(text(flashcore_last_error()).contains("aux_f32"), "{}", text(flashcore_last_error()));
    (given.aux_f32, given.sinks) = (slopes.as_ptr(), slopes.as_ptr());
    // SAFETY: as many sinks as heads.
    assert_eq!(unsafe { flashcore_plan_run_tensors(plan, &raw const given) }, FLASHCORE_INVALID_ARGUMENT);
    assert!(text(flashcore_last_error()).contains("sinks"), "{}", text(flashcore_last_error()));
    (given.sinks, given.workspace) = (ptr::null(), given.output);
    // SAFETY: refused.
    assert_eq!(unsafe { flashcore_plan_run_tensors(plan, &raw const given) }, FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(
        text(flashcore_last_error()),
        "tensors.workspace is set; it is for a launch on a GPU and must be null in a run"
    );
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
}

/// A run by addresses is a run by bytes, and a continuation too.
#[test]
fn addresses_and_bytes_give_the_same() {
    let problem = with_texts(None, None);
    let plan = create(&problem).unwrap();
    let elements = HEADS * LENGTH * DIM;
    let mut storage = [random(4, elements), random(5, elements), random(6, elements), vec![0.0; elements]];
    let mut lse = vec![0.0; HEADS * LENGTH];
    let given = tensors(&mut storage, &mut lse);
    // SAFETY: the tensors are as long as the problem says.
    assert_eq!(unsafe { flashcore_plan_run_tensors(plan, &raw const given) }, FLASHCORE_OK);
    let by_addresses = (storage[3].clone(), lse.clone());
    storage[3].fill(f32::NAN);
    let [query, key, value, output] = &mut storage;
    let (inputs, outputs) = (inputs(query, key, value), outputs(mut_bytes(output), mut_bytes(&mut lse)));
    assert_eq!(run(plan, &inputs, &outputs).0, FLASHCORE_OK);
    assert_eq!((&storage[3], &lse), (&by_addresses.0, &by_addresses.1));
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);

    // From the start, an output of 0 and an LSE of minus infinity: the same again.
    let mut plan = ptr::null_mut();
    // SAFETY: both pointers are to what they say.
    let status = unsafe { flashcore_continue_create(&raw const problem, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
    assert_eq!(status, FLASHCORE_OK);
    storage[3].fill(0.0);
    lse.fill(f32::NEG_INFINITY);
    let given = tensors(&mut storage, &mut lse);
    // SAFETY: the tensors are as long as the problem says.
    assert_eq!(unsafe { flashcore_continue_run_tensors(plan, &raw const given) }, FLASHCORE_OK);
    let difference = |(one, other): (&f32, &f32)| (one - other).abs();
    assert!(storage[3].iter().zip(&by_addresses.0).map(difference).fold(0.0, f32::max) < 1e-6);
    assert!(lse.iter().zip(&by_addresses.1).map(difference).fold(0.0, f32::max) < 1e-6);
    assert_eq!(flashcore_continue_destroy(plan), FLASHCORE_OK);
}

#[test]
fn wrong_texts_are_told_where() {
    let check = |score: &[u8], mask: &[u8], expected: &str| {
        let text = |bytes: &[u8]| (!bytes.is_empty()).then(|| CString::new(bytes).unwrap());
        let (score, mask) = (text(score), text(mask));
        let problem = with_texts(score.as_ref(), mask.as_ref());
        assert_eq!(create(&problem), Err((FLASHCORE_INVALID_ARGUMENT, expected.to_owned())));
    };
    check(b"score + exp(score", b"", "problem.score_mod: column 18: a `,` or a `)` is missing here");
    check(
        b"",
        b"q > k == 3",
        "problem.mask_mod: column 7, at `== 3`: comparisons are not chained; write a < b && b < c",
    );
    check(b"score \xFF", b"", "problem.score_mod is not UTF-8: invalid utf-8 sequence of 1 bytes from index 6");
    check(b"score + aux_f32[k]", b"", "score_mod reads the aux_f32, which is 0; give it the number of its entries");
}
