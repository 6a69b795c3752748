//! The Llama of candle-transformers with random weights, generating with its own `flash-attn` feature, whose
//! candle-flash-attn is flashcore by `[patch.crates-io]` of this workspace:
//!
//! ```sh
//! cargo run --release -p flashcore-candle-transformers --features flash-attn            # GPU 0
//! cargo run --release -p flashcore-candle-transformers --features flash-attn -- --cpu   # CPU tensors
//! ```
//!
//! That feature turns on CUDA in candle, so that building needs nvcc on a machine of either kind. Without it the model has
//! its eager attention alone; `cargo run --example generate` of flashcore-candle needs neither.

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use std::time::{Duration, Instant};

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{Cache, Config, Llama};

const PROMPT: usize = 200;
const GENERATED: usize = 64;
const VOCABULARY: usize = 1000;

fn main() -> Result<()> {
    let on_cpu = !cfg!(feature = "flash-attn") || std::env::args().any(|argument| argument == "--cpu");
    let device = if on_cpu { Device::Cpu } else { Device::new_cuda(0)? };
    let dtype = if on_cpu { DType::F32 } else { DType::BF16 };
    let weights = VarMap::new();
    let builder = VarBuilder::from_varmap(&weights, dtype, &device);
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|token| token * 37 % VOCABULARY as u32).collect();

    // Both models have the same weights: the first makes them.
    let (eager, eager_time) = generate(builder.clone(), &config(false), &prompt, dtype, &device)?;
    println!("on {:?} in {dtype:?}, {PROMPT} tokens of prompt and {GENERATED} generated", device.location());
    println!("eager attention {eager_time:>10.2?}  {:?} ...", &eager[..8]);
    if !cfg!(feature = "flash-attn") {
        println!("built without the feature flash-attn, which needs nvcc for candle");
        return Ok(());
    }
    let (flash, flash_time) = generate(builder, &config(true), &prompt, dtype, &device)?;
    println!("flash attention {flash_time:>10.2?}  {:?} ...", &flash[..8]);
    let same = flash.iter().zip(&eager).take_while(|(a, b)| a == b).count();
    println!("the first {same} of {GENERATED} tokens are the same");
    Ok(())
}

fn config(use_flash_attn: bool) -> Config {
    Config {
        hidden_size: 512,
        intermediate_size: 1536,
        vocab_size: VOCABULARY,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        max_position_embeddings: PROMPT + GENERATED,
        ..Config::config_7b_v2(use_flash_attn)
    }
}

/// The most likely token, again and again, and the time that it took.
fn generate(
    builder: VarBuilder,
    config: &Config,
    prompt: &[u32],
    dtype: DType,
    device: &Device,
) -> Result<(Vec<u32>, Duration)> {
    let model = Llama::load(builder, config)?;
    let mut cache = Cache::new(true, dtype, config, device)?;
    let (mut tokens, mut position, mut generated) = (prompt.to_vec(), 0, vec![]);
    let start = Instant::now();
    while generated.len() < GENERATED {
        let logits = model.forward(&Tensor::new(tokens.as_slice(), device)?.unsqueeze(0)?, position, &mut cache)?;
        let token = logits.to_dtype(DType::F32)?.argmax(D::Minus1)?.squeeze(0)?.to_scalar::<u32>()?;
        position += tokens.len();
        tokens = vec![token];
        generated.push(token);
    }
    Ok((generated, start.elapsed()))
}
