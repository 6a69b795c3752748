//! A small Llama-like model with random weights that generates tokens with flash attention and, beside it, with matmul and
//! softmax: `cargo run --release --example generate`, on a GPU with `--features cuda` and `-- cuda`.

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use std::time::{Duration, Instant};

use candle_core::{D, DType, Device, Result, Tensor};
use candle_flash_attn::flash_attn; // flashcore-candle, by the name that programs know

const VOCABULARY: usize = 1000;
const LAYERS: usize = 4;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const HIDDEN: usize = HEADS * HEAD_DIM;
const FEED_FORWARD: usize = 3 * HIDDEN;
const PROMPT: usize = 200;
const GENERATED: usize = 64;

fn main() -> Result<()> {
    let device = match std::env::args().nth(1).as_deref() {
        Some("cuda") => Device::new_cuda(0)?,
        _ => Device::Cpu,
    };
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let model = Model::new(dtype, &device)?;
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|token| token * 37 % VOCABULARY as u32).collect();

    let (flash, flash_time) = model.generate(&prompt, Attention::Flash)?;
    let (eager, eager_time) = model.generate(&prompt, Attention::Eager)?;
    println!("on {:?} in {dtype:?}, {PROMPT} tokens of prompt and {GENERATED} generated", device.location());
    println!("flash attention    {flash_time:>10.2?}  {:?} ...", &flash[..8]);
    println!("matmul and softmax {eager_time:>10.2?}  {:?} ...", &eager[..8]);
    let same = flash.iter().zip(&eager).take_while(|(a, b)| a == b).count();
    println!("the first {same} of {GENERATED} tokens are the same");
    // In 16 bits two tokens may be as good as one another; in 32 bits the tokens of this model are all the same.
    if dtype == DType::F32 && same < GENERATED {
        candle_core::bail!("token {same} is {} with flash attention and {} without", flash[same], eager[same])
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Attention {
    Flash,
    Eager,
}

/// Attention of `(batch, rows, heads, head_dim)`.
fn attend(q: &Tensor, k: &Tensor, v: &Tensor, attention: Attention) -> Result<Tensor> {
    let scale = 1.0 / (HEAD_DIM as f64).sqrt();
    match attention {
        Attention::Flash => flash_attn(q, k, v, scale as f32, true),
        Attention::Eager => {
            let (rows, keys) = (q.dim(1)?, k.dim(1)?);
            let by_head = |tensor: &Tensor| tensor.transpose(1, 2)?.contiguous();
            let (q, k, v) = (by_head(q)?, repeat(&by_head(k)?)?, repeat(&by_head(v)?)?);
            let hidden = |row: usize, key: usize| if key > row + keys - rows { f32::NEG_INFINITY } else { 0.0 };
            let mask: Vec<f32> = (0..rows).flat_map(|row| (0..keys).map(move |key| hidden(row, key))).collect();
            let mask = Tensor::from_vec(mask, (rows, keys), q.device())?;
            let scores = (q.matmul(&k.t()?)? * scale)?.to_dtype(DType::F32)?.broadcast_add(&mask)?;
            let weights = candle_nn::ops::softmax(&scores, D::Minus1)?.to_dtype(v.dtype())?;
            weights.matmul(&v)?.transpose(1, 2)
        }
    }
}

/// Each KV head for all of the query heads that share it.
fn repeat(tensor: &Tensor) -> Result<Tensor> {
    let (batch, heads, rows, columns) = tensor.dims4()?;
    let copies = vec![tensor; HEADS / KV_HEADS];
    Tensor::cat(&copies, 2)?.reshape((batch, heads * copies.len(), rows, columns))
}

struct Layer {
    attention_norm: Tensor,
    qkv: Tensor,
    output: Tensor,
    feed_forward_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
}

struct Model {
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: DType,
    device: Device,
}

impl Model {
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let mut seed = 0;
        let mut matrix = |inputs: usize, outputs: usize| {
            seed += 1;
            random(inputs, outputs, seed, 1.7 / (inputs as f32).sqrt())?.to_dtype(dtype)?.to_device(device)
        };
        let ones = || Tensor::ones(HIDDEN, dtype, device);
        let layers = (0..LAYERS).map(|_| {
            Ok(Layer {
                attention_norm: ones()?,
                qkv: matrix(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)?,
                output: matrix(HIDDEN, HIDDEN)?,
                feed_forward_norm: ones()?,
                gate_up: matrix(HIDDEN, 2 * FEED_FORWARD)?,
                down: matrix(FEED_FORWARD, HIDDEN)?,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let angles = |function: fn(f32) -> f32| {
            let half = HEAD_DIM / 2;
            let angle = |position: usize, pair: usize| position as f32 / 10_000_f32.powf(pair as f32 / half as f32);
            let rows =
                (0..PROMPT + GENERATED).flat_map(|position| (0..half).map(move |pair| function(angle(position, pair))));
            Tensor::from_vec(rows.collect::<Vec<_>>(), (PROMPT + GENERATED, half), device)?.to_dtype(dtype)
        };
        Ok(Self {
            embedding: matrix(VOCABULARY, HIDDEN)?,
            layers,
            norm: ones()?,
            head: matrix(HIDDEN, VOCABULARY)?,
            cos: angles(f32::cos)?,
            sin: angles(f32::sin)?,
            dtype,
            device: device.clone(),
        })
    }

    /// The most likely token, again and again, and the time that it took.
    fn generate(&self, prompt: &[u32], attention: Attention) -> Result<(Vec<u32>, Duration)> {
        let mut cache = vec![None; LAYERS];
        self.next(&prompt[..1], 0, &mut cache, attention)?; // what is made once
        let (mut tokens, mut cache, mut position) = (prompt.to_vec(), vec![None; LAYERS], 0);
        let mut generated = Vec::new();
        let start = Instant::now();
        while generated.len() < GENERATED {
            let token = self.next(&tokens, position, &mut cache, attention)?;
            position += tokens.len();
            tokens = vec![token];
            generated.push(token);
        }
        Ok((generated, start.elapsed()))
    }

    fn next(
        &self,
        tokens: &[u32],
        position: usize,
        cache: &mut [Option<(Tensor, Tensor)>],
        attention: Attention,
    ) -> Result<u32> {
        let rows = tokens.len();
        let (cos, sin) = (self.cos.narrow(0, position, rows)?, self.sin.narrow(0, position, rows)?);
        let mut hidden = self.embedding.index_select(&Tensor::new(tokens, &self.device)?, 0)?;
        for (layer, cache) in self.layers.iter().zip(cache) {
            let qkv = candle_nn::ops::rms_norm(&hidden, &layer.attention_norm, 1e-5)?.matmul(&layer.qkv)?;
            let qkv = qkv.reshape((1, rows, HEADS + 2 * KV_HEADS, HEAD_DIM))?;
            let rotated = |first: usize, heads: usize| {
                let by_head = qkv.narrow(2, first, heads)?.transpose(1, 2)?.contiguous()?;
                candle_nn::rotary_emb::rope(&by_head, &cos, &sin)?.transpose(1, 2)
            };
            let (q, k) = (rotated(0, HEADS)?, rotated(HEADS, KV_HEADS)?);
            let v = qkv.narrow(2, HEADS + KV_HEADS, KV_HEADS)?;
            let (k, v) = match cache.take() {
                Some((keys, values)) => (Tensor::cat(&[&keys, &k], 1)?, Tensor::cat(&[&values, &v], 1)?),
                None => (k, v),
            };
            let attended = attend(&q, &k, &v, attention)?.reshape((rows, HIDDEN))?;
            *cache = Some((k, v));
            hidden = (hidden + attended.matmul(&layer.output)?)?;
            let gate_up = candle_nn::ops::rms_norm(&hidden, &layer.feed_forward_norm, 1e-5)?.matmul(&layer.gate_up)?;
            hidden = (hidden + candle_nn::ops::swiglu(&gate_up)?.matmul(&layer.down)?)?;
        }
        let last = hidden.narrow(0, rows - 1, 1)?;
        let logits = candle_nn::ops::rms_norm(&last.contiguous()?, &self.norm, 1e-5)?.matmul(&self.head)?;
        debug_assert_eq!(logits.dtype(), self.dtype);
        logits.to_dtype(DType::F32)?.argmax(D::Minus1)?.squeeze(0)?.to_scalar::<u32>()
    }
}

/// Independent numbers up to `most` in magnitude, the same in every run.
fn random(rows: usize, columns: usize, seed: u64, most: f32) -> Result<Tensor> {
    let mut state = seed << 32;
    let numbers = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0) * most
    });
    Tensor::from_vec(numbers.take(rows * columns).collect::<Vec<_>>(), (rows, columns), &Device::Cpu)
}
