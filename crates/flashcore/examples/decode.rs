//! Generation with a paged KV cache, prefill and decode in one batch: `cargo run --release --example decode`
//!
//! A transformer block with random weights continues four prompts of different lengths. Each step takes up to 16 tokens of
//! every sequence: a chunk of its prompt, or the token that was generated last. New keys and values go into shuffled
//! pages, and attention reads them there, in every step from the same two plans; on a GPU both launches are one CUDA graph,
//! captured once. Every row is compared with attention over all keys of its sequence in one contiguous tensor.

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]
#![expect(unsafe_code, reason = "a launch takes addresses")]

use flashcore::cuda::{Context, DeviceBuffer, Graph, Stream};
use flashcore::half::f16;
use flashcore::verify::SplitMix64;
use flashcore::{
    Alignment, AppendProblem, DType, Device, DeviceTensors, Error, InputViews, Layout, Mask, OutputViews, PagedKv,
    Plan, Problem, Rotary, RotaryStyle,
};
use zerocopy::IntoBytes;

const HIDDEN: usize = 128;
const QUERY_HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const QUERY_WIDTH: usize = QUERY_HEADS * HEAD_DIM;
const KEY_WIDTH: usize = KEY_HEADS * HEAD_DIM;
const VOCABULARY: usize = 256;

/// Tokens of each prompt.
const PROMPTS: [usize; 4] = [3, 20, 50, 100];
/// Tokens that each sequence gets.
const GENERATED: usize = 32;

// The upper bounds from which the plans are made.
const SEQUENCES: usize = PROMPTS.len();
/// Rows of one sequence in a step.
const CHUNK: usize = 16;
/// Rows of all sequences in a step.
const MOST_ROWS: usize = SEQUENCES * CHUNK;
const PAGE_SIZE: usize = 16;
const PAGES_PER_SEQUENCE: usize = 10;
const MOST_KEYS: usize = PAGES_PER_SEQUENCE * PAGE_SIZE;
const NUM_PAGES: usize = SEQUENCES * PAGES_PER_SEQUENCE + 3;

/// An entry of the page table that nobody has set: whatever it holds is not read.
const UNUSED: i32 = i32::MAX;
/// Rounding of keys, weights and outputs to `f16`; a lost key makes ten times as much.
const LIMIT: f64 = 4e-3;

fn main() -> Result<(), Error> {
    let best = Device::best_or_reason();
    println!("on {best}");
    let block = Block::random(&mut SplitMix64::new(1));
    let mut attention = PagedAttention::new(&best.device)?;
    println!("{}", attention.plan.report());

    let mut random = SplitMix64::new(2);
    let mut free_pages = shuffled_pages(&mut random);
    let mut sequences = PROMPTS.map(|length| Sequence::random(length, &mut random));
    let (mut steps, mut mixed_steps, mut rows, mut largest) = (0, 0, 0, 0.0_f64);
    while sequences.iter().any(|sequence| sequence.next_rows() > 0) {
        let step = Step::new(&mut sequences, &mut free_pages);
        let mut qkv = Qkv::unwritten();
        for (row, &(sequence, position)) in step.rows.iter().enumerate() {
            qkv.set(row, &block.qkv(sequences[sequence].tokens[position]));
        }
        let output = attention.run(&step, &qkv)?;

        for (row, &(index, position)) in step.rows.iter().enumerate() {
            let attended = token_row(&output, row, QUERY_WIDTH);
            let sequence = &mut sequences[index];
            let expected = sequence.attend_without_cache(&qkv, row, position);
            let differences =
                attended.iter().zip(&expected).map(|(&actual, expected)| (f64::from(actual) - expected).abs());
            // `f64::max` would lose a NaN.
            largest = differences.fold(largest, |most, difference| if difference <= most { most } else { difference });
            assert!(largest <= LIMIT, "sequence {index} differs by {largest} at position {position}; at most {LIMIT}");
            sequence.cached += 1;
            if sequence.cached == sequence.tokens.len() {
                let next = block.next_token(sequence.tokens[position], attended);
                sequence.tokens.push(next);
            }
        }
        let lengths = step.cu_seqlens_q.windows(2).map(|pair| pair[1] - pair[0]);
        mixed_steps += usize::from(lengths.clone().any(|rows| rows == 1) && lengths.clone().any(|rows| rows > 1));
        steps += 1;
        rows += step.rows.len();
    }

    let generated: usize = sequences.iter().map(|sequence| sequence.tokens.len() - sequence.prompt).sum();
    assert_eq!(generated, SEQUENCES * GENERATED);
    for sequence in &sequences {
        println!("{} tokens of prompt, then {:?} ...", sequence.prompt, &sequence.tokens[sequence.prompt..][..8]);
    }
    println!("{generated} tokens in {steps} steps, {mixed_steps} of them with prefill and decode in one batch");
    println!("{}, made once", attention.name());
    println!("largest difference from attention without a cache: {largest:.1e} in {rows} rows");
    Ok(())
}

/// One sequence: its tokens, its pages, and all of its keys and values once more without a cache.
struct Sequence {
    tokens: Vec<usize>,
    /// Tokens of the prompt.
    prompt: usize,
    /// Tokens whose keys and values are in the cache.
    cached: usize,
    page_table: [i32; PAGES_PER_SEQUENCE],
    /// Keys after the rotary embedding, contiguous `[token, head, column]`.
    keys: Vec<f16>,
    values: Vec<f16>,
}

impl Sequence {
    fn random(prompt: usize, random: &mut SplitMix64) -> Self {
        let tokens = (0..prompt).map(|_| random.next_u64() as usize % VOCABULARY).collect();
        let (keys, values) = (Vec::new(), Vec::new());
        Self { tokens, prompt, cached: 0, page_table: [UNUSED; PAGES_PER_SEQUENCE], keys, values }
    }

    /// Rows of the sequence in the next step; none once all tokens are generated.
    fn next_rows(&self) -> usize {
        let is_finished = self.tokens.len() == self.prompt + GENERATED;
        if is_finished { 0 } else { (self.tokens.len() - self.cached).min(CHUNK) }
    }

    /// Attention of one row over a contiguous tensor of all keys up to its own, by plain loops.
    fn attend_without_cache(&mut self, qkv: &Qkv, row: usize, position: usize) -> Vec<f64> {
        let key = rotated(token_row(&qkv.key, row, KEY_WIDTH), position);
        self.keys.extend(key);
        self.values.extend_from_slice(token_row(&qkv.value, row, KEY_WIDTH));
        let query = rotated(token_row(&qkv.query, row, QUERY_WIDTH), position);
        let mut output = Vec::with_capacity(QUERY_WIDTH);
        for (head, query) in query.chunks_exact(HEAD_DIM).enumerate() {
            let first = head / (QUERY_HEADS / KEY_HEADS) * HEAD_DIM;
            let mut sum = 0.0;
            let mut weighted = [0.0; HEAD_DIM];
            for (key, value) in self.keys.chunks_exact(KEY_WIDTH).zip(self.values.chunks_exact(KEY_WIDTH)) {
                let key = &key[first..][..HEAD_DIM];
                let score: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                let weight = (score / (HEAD_DIM as f64).sqrt()).exp();
                sum += weight;
                for (total, &value) in weighted.iter_mut().zip(&value[first..]) {
                    *total += weight * f64::from(value);
                }
            }
            output.extend(weighted.map(|total| total / sum));
        }
        output
    }
}

/// The rows of one step, packed, and what the two launches read about them. All vectors have the sizes of the plans.
struct Step {
    /// Sequence and position of each row.
    rows: Vec<(usize, usize)>,
    cu_seqlens_q: Vec<u32>,
    seqused_k: Vec<u32>,
    page_table: Vec<i32>,
    /// Slot of each row; -1 for rows that are not there.
    slot_mapping: Vec<i64>,
    positions: Vec<i64>,
}

impl Step {
    /// The next rows of every sequence, with pages for them. A sequence that is finished stays, with no rows and no keys.
    fn new(sequences: &mut [Sequence], free_pages: &mut Vec<i32>) -> Self {
        let (slot_mapping, positions) = (vec![-1; MOST_ROWS], vec![0; MOST_ROWS]);
        let (cu_seqlens_q, seqused_k, page_table) = (vec![0], Vec::new(), Vec::new());
        let mut step = Self { rows: Vec::new(), cu_seqlens_q, seqused_k, page_table, slot_mapping, positions };
        for (index, sequence) in sequences.iter_mut().enumerate() {
            let keys = sequence.cached + sequence.next_rows();
            for position in sequence.cached..keys {
                let page = &mut sequence.page_table[position / PAGE_SIZE];
                if *page == UNUSED {
                    *page = free_pages.pop().expect("pages for MOST_KEYS keys of each sequence");
                }
                let row = step.rows.len();
                step.slot_mapping[row] = i64::from(*page) * PAGE_SIZE as i64 + (position % PAGE_SIZE) as i64;
                step.positions[row] = position as i64;
                step.rows.push((index, position));
            }
            step.cu_seqlens_q.push(step.rows.len() as u32);
            step.seqused_k.push(if sequence.next_rows() > 0 { keys as u32 } else { 0 });
            step.page_table.extend(sequence.page_table);
        }
        step
    }
}

/// Projections of the rows of a step, contiguous `[row, head, column]`; NaN in rows that are not there.
struct Qkv {
    query: Vec<f16>,
    key: Vec<f16>,
    value: Vec<f16>,
}

impl Qkv {
    fn unwritten() -> Self {
        let rows = |width| vec![f16::NAN; MOST_ROWS * width];
        Self { query: rows(QUERY_WIDTH), key: rows(KEY_WIDTH), value: rows(KEY_WIDTH) }
    }

    fn set(&mut self, row: usize, projected: &[f32]) {
        let (query, rest) = projected.split_at(QUERY_WIDTH);
        let (key, value) = rest.split_at(KEY_WIDTH);
        for (tensor, from) in [(&mut self.query, query), (&mut self.key, key), (&mut self.value, value)] {
            let to = &mut tensor[row * from.len()..][..from.len()];
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = f16::from_f32(from));
        }
    }
}

fn token_row(tensor: &[f16], row: usize, width: usize) -> &[f16] {
    &tensor[row * width..][..width]
}

/// Append and attention over one paged cache.
struct PagedAttention {
    append: Plan,
    plan: Plan,
    cos: Vec<f32>,
    sin: Vec<f32>,
    memory: Memory,
}

/// The caches.
enum Memory {
    Host { keys: Vec<f16>, values: Vec<f16> },
    Gpu(Box<Captured>),
}

impl PagedAttention {
    fn new(device: &Device) -> Result<Self, Error> {
        let mut rotary = Rotary::new(RotaryStyle::Neox, HEAD_DIM, MOST_KEYS);
        rotary.table_dtype = Some(DType::F32);
        let append = AppendProblem::new(MOST_ROWS, KEY_HEADS, HEAD_DIM, DType::F16, NUM_PAGES, PAGE_SIZE)
            .with_query(QUERY_HEADS)
            .with_rotary(rotary);

        // Lengths are upper bounds: what a step has is in cu_seqlens_q and seqused_k.
        let mut problem = Problem::new(SEQUENCES, QUERY_HEADS, CHUNK, HEAD_DIM, DType::F16)
            .with_layout(Layout::Bshd)
            .with_mask(Mask::Causal(Alignment::BottomRight))
            .with_total_q(Some(MOST_ROWS))
            .with_seqused_k(true)
            .with_paged(Some(PagedKv::new(PAGE_SIZE, NUM_PAGES, PAGES_PER_SEQUENCE)));
        (problem.key_heads, problem.key_length) = (KEY_HEADS, MOST_KEYS);

        let (append, plan) = (Plan::new(&append, device)?, Plan::new(&problem, device)?);
        let angles: Vec<f64> =
            (0..MOST_KEYS).flat_map(|row| (0..HEAD_DIM / 2).map(move |pair| angle(row, pair))).collect();
        let cos: Vec<f32> = angles.iter().map(|angle| angle.cos() as f32).collect();
        let sin: Vec<f32> = angles.iter().map(|angle| angle.sin() as f32).collect();
        let memory = if let Some(context) = device.context() {
            Memory::Gpu(Box::new(Captured::new(context, &append, &plan, &cos, &sin)?))
        } else {
            // NaN where nobody has written yet: it reaches no output.
            let cache = || vec![f16::NAN; NUM_PAGES * PAGE_SIZE * KEY_WIDTH];
            Memory::Host { keys: cache(), values: cache() }
        };
        Ok(Self { append, plan, cos, sin, memory })
    }

    /// Appends the keys and values of a step and attends: the output of its rows.
    fn run(&mut self, step: &Step, qkv: &Qkv) -> Result<Vec<f16>, Error> {
        let Self { append, plan, cos, sin, memory } = self;
        match memory {
            Memory::Gpu(captured) => captured.run(step, qkv),
            Memory::Host { keys, values } => {
                let mut query = vec![f16::ZERO; qkv.query.len()];
                let mut output = vec![f16::NAN; qkv.query.len()];
                let inputs = InputViews::default()
                    .with_new_key(&qkv.key)
                    .with_new_value(&qkv.value)
                    .with_slot_mapping(&step.slot_mapping)
                    .with_query(&qkv.query)
                    .with_positions(step.positions.as_slice())
                    .with_cos(&*cos)
                    .with_sin(&*sin);
                let outputs = OutputViews::default().with_key_cache(&mut *keys).with_value_cache(&mut *values);
                append.run(inputs, outputs.with_query_output(&mut query))?;
                let inputs = InputViews::new(&query, &*keys, &*values)
                    .with_cu_seqlens_q(&step.cu_seqlens_q)
                    .with_seqused_k(&step.seqused_k)
                    .with_page_table(&step.page_table);
                plan.run(inputs, OutputViews::new(&mut output))?;
                let unused = &output[step.rows.len() * QUERY_WIDTH..];
                assert!(unused.iter().all(|element| element.is_nan()), "rows after the last sequence are not written");
                Ok(output)
            }
        }
    }

    fn name(&self) -> String {
        match &self.memory {
            Memory::Host { .. } => "one plan of append, one plan of attention".to_owned(),
            Memory::Gpu(captured) => format!("one plan of each and one CUDA graph of {} nodes", captured.graph.nodes()),
        }
    }
}

/// Both launches in one CUDA graph, and the device memory that it reads and writes.
struct Captured {
    stream: Stream,
    graph: Graph,
    query: DeviceBuffer,
    key: DeviceBuffer,
    value: DeviceBuffer,
    slot_mapping: DeviceBuffer,
    positions: DeviceBuffer,
    cu_seqlens_q: DeviceBuffer,
    seqused_k: DeviceBuffer,
    page_table: DeviceBuffer,
    output: DeviceBuffer,
    /// Caches, tables of angles and the workspace of attention: only kernels use them.
    _resident: [DeviceBuffer; 5],
}

impl Captured {
    fn new(context: &Context, append: &Plan, plan: &Plan, cos: &[f32], sin: &[f32]) -> Result<Self, Error> {
        let stream = Stream::new(context)?;
        // Bytes of 255 are NaN in f16.
        let buffer = |bytes| DeviceBuffer::filled(&stream, bytes, 255);
        let cache = || buffer(NUM_PAGES * PAGE_SIZE * KEY_WIDTH * size_of::<f16>());
        let rows = |width| buffer(MOST_ROWS * width * size_of::<f16>());
        let (key_cache, value_cache) = (cache()?, cache()?);
        let (cos, sin) =
            (DeviceBuffer::from_host(&stream, cos.as_bytes())?, DeviceBuffer::from_host(&stream, sin.as_bytes())?);
        let (query, output) = (rows(QUERY_WIDTH)?, rows(QUERY_WIDTH)?);
        let (key, value) = (rows(KEY_WIDTH)?, rows(KEY_WIDTH)?);
        let (slot_mapping, positions) = (buffer(MOST_ROWS * 8)?, buffer(MOST_ROWS * 8)?);
        let (cu_seqlens_q, seqused_k) = (buffer((SEQUENCES + 1) * 4)?, buffer(SEQUENCES * 4)?);
        let page_table = buffer(SEQUENCES * PAGES_PER_SEQUENCE * 4)?;
        // A captured launch brings its workspace. Graphs that run one after another could share one.
        let workspace = buffer(plan.workspace_bytes())?;

        let appended = DeviceTensors::NONE
            .with_new_key(key.address())
            .with_new_value(value.address())
            .with_key_cache(key_cache.address())
            .with_value_cache(value_cache.address())
            .with_slot_mapping(slot_mapping.address())
            .with_query(query.address())
            .with_query_output(query.address())
            .with_positions(positions.address())
            .with_cos(cos.address())
            .with_sin(sin.address());
        let attended =
            DeviceTensors::new(query.address(), key_cache.address(), value_cache.address(), output.address())
                .with_cu_seqlens_q(cu_seqlens_q.address())
                .with_seqused_k(seqused_k.address())
                .with_page_table(page_table.address())
                .with_workspace(workspace.address());
        let graph = Graph::capture(&stream, |stream| {
            // SAFETY: the buffers have the sizes of the tensors and live as long as the graph; `run` waits for each replay.
            unsafe { append.launch(stream, appended) }?;
            // SAFETY: as above; the stream orders the two.
            unsafe { plan.launch(stream, attended) }
        })?;
        Ok(Self {
            stream,
            graph,
            query,
            key,
            value,
            slot_mapping,
            positions,
            cu_seqlens_q,
            seqused_k,
            page_table,
            output,
            _resident: [key_cache, value_cache, cos, sin, workspace],
        })
    }

    fn run(&mut self, step: &Step, qkv: &Qkv) -> Result<Vec<f16>, Error> {
        let stream = &self.stream;
        for (buffer, bytes) in [
            (&mut self.query, qkv.query.as_bytes()),
            (&mut self.key, qkv.key.as_bytes()),
            (&mut self.value, qkv.value.as_bytes()),
            (&mut self.slot_mapping, step.slot_mapping.as_bytes()),
            (&mut self.positions, step.positions.as_bytes()),
            (&mut self.cu_seqlens_q, step.cu_seqlens_q.as_bytes()),
            (&mut self.seqused_k, step.seqused_k.as_bytes()),
            (&mut self.page_table, step.page_table.as_bytes()),
        ] {
            buffer.copy_from_host(stream, bytes)?;
        }
        // SAFETY: what was promised for the captured launches still holds: the plans live beside this graph.
        unsafe { self.graph.launch(stream) }?;
        let mut output = vec![f16::ZERO; MOST_ROWS * QUERY_WIDTH];
        self.output.copy_to_host(stream, 0, output.as_mut_bytes())?;
        Ok(output)
    }
}

/// A transformer block with random weights, and the embeddings around it.
struct Block {
    embedding: Vec<f32>,
    qkv: Vec<f32>,
    output: Vec<f32>,
    unembedding: Vec<f32>,
}

impl Block {
    fn random(random: &mut SplitMix64) -> Self {
        let mut matrix = |rows: usize, columns: usize| {
            (0..rows * columns).map(|_| (random.normal() / (columns as f64).sqrt()) as f32).collect()
        };
        Self {
            embedding: matrix(VOCABULARY, HIDDEN),
            qkv: matrix(QUERY_WIDTH + 2 * KEY_WIDTH, HIDDEN),
            output: matrix(HIDDEN, QUERY_WIDTH),
            unembedding: matrix(VOCABULARY, HIDDEN),
        }
    }

    fn embed(&self, token: usize) -> &[f32] {
        &self.embedding[token * HIDDEN..][..HIDDEN]
    }

    /// Query, key and value of a token.
    fn qkv(&self, token: usize) -> Vec<f32> {
        product(&self.qkv, &rms_norm(self.embed(token)))
    }

    /// The likeliest token after one with this output of attention.
    fn next_token(&self, token: usize, attended: &[f16]) -> usize {
        let attended: Vec<f32> = attended.iter().map(|element| element.to_f32()).collect();
        let projected = product(&self.output, &attended);
        let hidden: Vec<f32> = self.embed(token).iter().zip(projected).map(|(residual, new)| residual + new).collect();
        let logits = product(&self.unembedding, &rms_norm(&hidden));
        (0..VOCABULARY).max_by(|&left, &right| logits[left].total_cmp(&logits[right])).unwrap_or(0)
    }
}

/// Matrix times vector.
fn product(matrix: &[f32], vector: &[f32]) -> Vec<f32> {
    matrix
        .chunks_exact(vector.len())
        .map(|row| row.iter().zip(vector).map(|(left, right)| left * right).sum())
        .collect()
}

fn rms_norm(row: &[f32]) -> Vec<f32> {
    let mean_square = row.iter().map(|element| element * element).sum::<f32>() / row.len() as f32;
    row.iter().map(|element| element / (mean_square + 1e-6).sqrt()).collect()
}

/// The angle of a pair of columns at a position.
fn angle(position: usize, pair: usize) -> f64 {
    position as f64 * 10_000_f64.powf(-2.0 * pair as f64 / HEAD_DIM as f64)
}

/// Rotary embedding of all heads of one token, columns `i` and `i + HEAD_DIM / 2` a pair.
fn rotated(heads: &[f16], position: usize) -> Vec<f16> {
    let mut rotated = heads.to_vec();
    for head in rotated.chunks_exact_mut(HEAD_DIM) {
        let (left, right) = head.split_at_mut(HEAD_DIM / 2);
        for (pair, (left, right)) in left.iter_mut().zip(right).enumerate() {
            let (sin, cos) = angle(position, pair).sin_cos();
            let (x, y) = (f64::from(*left), f64::from(*right));
            (*left, *right) = (f16::from_f64(x * cos - y * sin), f16::from_f64(x * sin + y * cos));
        }
    }
    rotated
}

/// The pages of the cache in random order.
fn shuffled_pages(random: &mut SplitMix64) -> Vec<i32> {
    let mut pages: Vec<i32> = (0..NUM_PAGES as i32).collect();
    for last in (1..pages.len()).rev() {
        pages.swap(last, random.next_u64() as usize % (last + 1));
    }
    pages
}
