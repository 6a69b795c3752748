//! Tensors that lie where other code put them: `cargo run --release --example custom_strides`
//!
//! A decoder keeps its keys and values in a cache of fixed size, of which the first part is filled; its projection wrote
//! query, key and value of the new token side by side; and the output goes into the columns of a wider matrix. Nothing is
//! copied to make it fit: strides say where everything is.

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use flashcore::{DType, Device, Error, InputViews, Layout, OutputViews, Plan, Problem, Strides, TensorStrides};

const BATCH: usize = 2;
const QUERY_HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
/// Tokens the cache has room for, and tokens in it.
const CAPACITY: usize = 128;
const FILLED: usize = 100;
/// Columns of the matrix that the output is a part of.
const OUTPUT_COLUMNS: usize = QUERY_HEADS * HEAD_DIM + 32;

fn main() -> Result<(), Error> {
    // [batch, query heads | key heads | value heads, column] of the new token.
    let projection_columns = (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM;
    let projection: Vec<f32> = (0..BATCH * projection_columns).map(|index| (index as f32 * 0.37).cos()).collect();
    // [batch, token, head, column], tokens past `FILLED` never written.
    let cache: Vec<f32> =
        (0..BATCH * CAPACITY * KEY_HEADS * HEAD_DIM)
            .map(|index| {
                if index / (KEY_HEADS * HEAD_DIM) % CAPACITY < FILLED { (index as f32 * 0.11).sin() } else { f32::NAN }
            })
            .collect();
    let mut output = vec![-1.0_f32; BATCH * OUTPUT_COLUMNS];

    let mut problem = Problem::new(BATCH, QUERY_HEADS, FILLED, HEAD_DIM, DType::F32);
    problem.key_heads = KEY_HEADS;
    problem.query_length = 1;
    let cached = Strides { batch: CAPACITY * KEY_HEADS * HEAD_DIM, head: HEAD_DIM, row: KEY_HEADS * HEAD_DIM };
    problem.layout = Layout::Strided(TensorStrides {
        query: Strides { batch: projection_columns, head: HEAD_DIM, row: projection_columns },
        key: cached,
        value: cached,
        output: Strides { batch: OUTPUT_COLUMNS, head: HEAD_DIM, row: OUTPUT_COLUMNS },
    });

    let plan = Plan::new(&problem, &Device::cpu())?;
    plan.run(InputViews::new(&projection, &cache, &cache), OutputViews::new(&mut output))?;

    let (attended, rest) = output[..OUTPUT_COLUMNS].split_at(QUERY_HEADS * HEAD_DIM);
    assert!(attended.iter().all(|element| element.is_finite()), "what is not in the cache was not read");
    assert!(rest.iter().all(|&element| element == -1.0), "what is not output was not written");
    println!("{problem}: {:?} ...", &attended[..4]);

    // What does not fit is said, not guessed: the cache is too short for this many tokens.
    problem.key_length = CAPACITY + 1;
    let plan = Plan::new(&problem, &Device::cpu())?;
    let refused = plan.run(InputViews::new(&projection, &cache, &cache), OutputViews::new(&mut output));
    if let Err(error) = refused {
        println!("refused: {error}");
    }
    Ok(())
}
