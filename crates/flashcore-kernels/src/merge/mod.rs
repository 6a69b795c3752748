//! Merge kernel: partial results of attention over disjoint keys become one, weighted by their LSE, in index order.
//!
//! A row is one head of one token; some lanes of a warp have a row, each one vector of 16 bytes of it or more. Every lane
//! of a row computes the weights for itself, so that nothing crosses lanes. Few parts are all loaded at once; of many, the
//! first loop finds the largest LSE and the second adds up.

mod in_place;

pub use in_place::UNWRITTEN;

use flashcore_ir::types::{F32, Pred, U32, U64};
use flashcore_ir::{Argument, Builder, Compare, Kernel, Reg, SpecialRegister};
use flashcore_problem::{DType, LseBase, MergeProblem, Operand, Strides};

use crate::bindings::Word;
use crate::launch_plan::{KernelLaunch, LaunchPlan, TokenRows};
use crate::primitives::{LANES, VectorBits, VectorType, used_strides, vector_elements};
use crate::spec::{KernelKey, KernelSpec};
use crate::target::Target;
use crate::unsupported::Reason;

/// Threads of a CTA.
const THREADS: u32 = 128;
/// The most parts that are loaded all at once.
pub(crate) const MOST_UNROLLED: usize = 4;
/// Parts in flight in the loop over many.
pub(crate) const PARTS_AT_ONCE: u32 = 4;

/// Everything of a merge that is compiled into its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeSpec {
    /// Element type of the parts.
    pub part_dtype: DType,
    /// Element type of the output.
    pub dtype: DType,
    /// Columns.
    pub value_dim: u32,
    /// Elements of a vector.
    pub vec: u32,
    /// The number of partial results where they are loaded all at once; else it is a parameter.
    pub unrolled: Option<u32>,
    /// True if the merged LSE is written.
    pub lse: bool,
    /// True if the second of two parts is merged into the first.
    pub in_place: bool,
}

impl MergeSpec {
    /// The specialization for a valid problem.
    pub fn of(problem: &MergeProblem) -> Self {
        let shape = problem.shape();
        let strides = used_strides(shape, problem.strides.part).chain(used_strides(shape, problem.strides.output));
        Self {
            part_dtype: problem.part_dtype,
            dtype: problem.dtype,
            value_dim: problem.value_dim as u32,
            vec: vector_elements(problem.part_dtype, strides.chain([problem.value_dim])),
            unrolled: (problem.num_parts <= MOST_UNROLLED).then_some(problem.num_parts as u32),
            lse: problem.lse,
            in_place: false,
        }
    }

    /// The specialization of a merge into the first of two parts.
    fn in_place(problem: &MergeProblem) -> Self {
        Self { in_place: true, ..Self::of(problem) }
    }

    fn name(self) -> String {
        let Self { part_dtype, dtype, value_dim, vec, unrolled, lse, in_place } = self;
        let unrolled = unrolled.map_or_else(|| "many".to_owned(), |count| count.to_string());
        let lse = if lse { "_lse" } else { "" };
        let in_place = if in_place { "_in_place" } else { "" };
        format!("flashcore_merge_{part_dtype}_{dtype}_d{value_dim}_v{vec}_{unrolled}parts{lse}{in_place}")
    }

    const fn lanes(self) -> u32 {
        let lanes = (self.value_dim / self.vec).next_power_of_two();
        if lanes < LANES { lanes } else { LANES }
    }

    const fn rows_per_cta(self) -> u32 {
        THREADS / self.lanes()
    }

    /// Bytes of which the addresses of the parts, the distances between them, and the address of the output must be
    /// multiples.
    fn alignments(self) -> [(Operand, u64); 2] {
        let Self { part_dtype, dtype, vec, .. } = self;
        [(Operand::PartOutputs, part_dtype), (Operand::Output, dtype)]
            .map(|(operand, dtype)| (operand, VectorType::new(dtype, vec).access_bytes.into()))
    }

    /// Writes the kernel.
    pub(crate) fn generate(self) -> Kernel {
        if self.in_place { in_place::kernel(self) } else { kernel(self) }
    }
}

operation_parameters! {
    launch {
        part,
        part_lse,
        // Bytes from a part to the next, modulo 2^64: it may lie before it.
        part_stride,
        part_lse_stride,
        output,
        lse,
        tokens,
    }
    plan {
        part_head_stride: U64,
        part_token_stride: U64,
        part_lse_head_stride: U64,
        part_lse_token_stride: U64,
        output_head_stride: U64,
        output_token_stride: U64,
        lse_head_stride: U64,
        lse_token_stride: U64,
        heads: U32,
        num_parts: U32,
        to_log2: F32,
        from_log2: F32,
    }
}

impl LaunchPlan {
    /// The kernel that merges partial results, or every reason against it.
    pub fn merge(problem: &MergeProblem, target: impl Into<Target>) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let (spec, target) = (MergeSpec::of(problem), target.into());
        let words = Words {
            part: Word::address(Operand::PartOutputs),
            part_lse: Word::address(Operand::PartLses),
            part_stride: Word::PartStride(Operand::PartOutputs),
            part_lse_stride: Word::PartStride(Operand::PartLses),
            output: Word::address(Operand::Output),
            lse: Word::address(Operand::Lse),
            tokens: Word::Tokens,
        };
        Self::of_operation(vec![launch(problem, spec, words, target)], spec.alignments().into(), target)
    }
}

/// The launch of a merge kernel.
fn launch(problem: &MergeProblem, spec: MergeSpec, words: Words, target: Target) -> KernelLaunch {
    let rows = TokenRows { per_token: problem.heads as u32, per_cta: spec.rows_per_cta() };
    let key = KernelKey { spec: KernelSpec::Merge(spec), arch: target.arch };
    let mut launch = KernelLaunch::of_tokens(key, problem.tokens as u32, vec![rows]);
    launch.extend_with_words(words.list());
    launch.extend(arguments(problem));
    launch
}

fn arguments(problem: &MergeProblem) -> Vec<Argument> {
    let strides = |strides: Strides, element: usize| {
        [strides.head, strides.row].map(|stride| Argument::U64((stride * element) as u64))
    };
    let lse = size_of::<f32>();
    let (to_log2, from_log2) = match problem.base {
        LseBase::Natural => (core::f32::consts::LOG2_E, core::f32::consts::LN_2),
        LseBase::Two => (1.0, 1.0),
    };
    let mut arguments = Vec::new();
    arguments.extend(strides(problem.strides.part, problem.part_dtype.size_bytes()));
    arguments.extend(strides(problem.strides.part_lse, lse));
    arguments.extend(strides(problem.strides.output, problem.dtype.size_bytes()));
    arguments.extend(strides(problem.strides.lse, lse));
    arguments.extend([problem.heads, problem.num_parts].map(|size| Argument::U32(size as u32)));
    arguments.extend([to_log2, from_log2].map(Argument::F32));
    arguments
}

/// The columns of a lane: where its vectors begin, which of them are there, and their sums.
struct LaneColumns {
    vector: VectorType,
    offsets: Vec<Reg<U32>>,
    exists: Vec<Option<Reg<Pred>>>,
    sums: Vec<Vec<Reg<F32>>>,
}

/// One part of a row: its LSE, minus infinity where it is empty, and the vectors of this lane.
struct LanePart {
    lse: Reg<F32>,
    empty: Reg<Pred>,
    vectors: Vec<VectorBits>,
}

impl LaneColumns {
    fn new(k: &mut Builder, spec: MergeSpec, lane_in_row: Reg<U32>) -> Self {
        let vectors = spec.value_dim / spec.vec;
        let (mut offsets, mut exists, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..vectors.div_ceil(spec.lanes()) {
            let number = k.add(lane_in_row, step * spec.lanes());
            let is_last = (step + 1) * spec.lanes() > vectors;
            exists.push(is_last.then(|| k.compare(Compare::Lt, number, vectors)));
            let number = if is_last { k.min(number, vectors - 1) } else { number };
            offsets.push(k.mul(number, spec.vec));
            sums.push((0..spec.vec).map(|_| k.copy(0.0f32)).collect());
        }
        Self { vector: VectorType::new(spec.part_dtype, spec.vec), offsets, exists, sums }
    }

    fn load(&self, k: &mut Builder, part: Reg<U64>) -> Vec<VectorBits> {
        let element = self.vector.dtype.size_bytes() as u32;
        let load = |&offset| {
            let address = k.mad_wide(offset, element, part);
            self.vector.load(k, address)
        };
        self.offsets.iter().map(load).collect()
    }

    /// Adds a part, times its weight.
    fn add(&self, k: &mut Builder, part: &LanePart, weight: Reg<F32>) {
        for (sums, bits) in self.sums.iter().zip(&part.vectors) {
            let elements = self.vector.widen_unless(k, bits, part.empty);
            for (&sum, element) in sums.iter().zip(elements) {
                k.fma_to(sum, element, weight);
            }
        }
    }
}

/// Addresses of the first part of a row, and of those that follow.
struct RowParts<'a> {
    p: &'a Parameters,
    part: Reg<U64>,
    lse: Reg<U64>,
}

impl RowParts<'_> {
    /// The LSE of a part: minus infinity for one that is empty.
    fn lse(&self, k: &mut Builder, index: Reg<U64>) -> (Reg<F32>, Reg<Pred>) {
        let address = k.mad(index, self.p.part_lse_stride, self.lse);
        let lse = k.load_one::<F32>(address);
        let magnitude = k.abs(lse);
        let empty = k.compare(Compare::Eq, magnitude, f32::INFINITY);
        (k.select(empty, f32::NEG_INFINITY, lse), empty)
    }

    fn load(&self, k: &mut Builder, columns: &LaneColumns, index: Reg<U64>) -> LanePart {
        let (lse, empty) = self.lse(k, index);
        let address = k.mad(index, self.p.part_stride, self.part);
        LanePart { lse, empty, vectors: columns.load(k, address) }
    }
}

/// Writes the kernel.
fn kernel(spec: MergeSpec) -> Kernel {
    let mut builder = Builder::new(spec.name(), THREADS);
    let k = &mut builder;
    let p = Parameters::load(k);
    let thread = k.special(SpecialRegister::ThreadX);
    let lane_in_row = k.and(thread, spec.lanes() - 1);
    let row_in_cta = k.shr(thread, spec.lanes().ilog2());
    let cta = k.special(SpecialRegister::CtaX);
    let row = k.mad(cta, spec.rows_per_cta(), row_in_cta);
    let tokens = k.truncate(p.tokens);
    let rows = k.mul(tokens, p.heads);
    let exists = k.compare(Compare::Lt, row, rows);
    k.if_then(exists, |k| {
        let token = k.div(row, p.heads);
        let first = k.mul(token, p.heads);
        let head = k.sub(row, first);
        let (token, head) = (k.widen(token), k.widen(head));
        let address = |k: &mut Builder, base, token_stride, head_stride| {
            let address = k.mad(token, token_stride, base);
            k.mad(head, head_stride, address)
        };
        let row_parts = RowParts {
            p: &p,
            part: address(k, p.part, p.part_token_stride, p.part_head_stride),
            lse: address(k, p.part_lse, p.part_lse_token_stride, p.part_lse_head_stride),
        };
        let columns = LaneColumns::new(k, spec, lane_in_row);
        let (shift, sum) = match spec.unrolled {
            Some(count) => merge_few(k, &row_parts, &columns, count),
            None => merge_many(k, &row_parts, &columns),
        };
        k.section("epilogue", |k| {
            let output = address(k, p.output, p.output_token_stride, p.output_head_stride);
            store(k, spec, &columns, output, sum);
            if spec.lse {
                let target = address(k, p.lse, p.lse_token_stride, p.lse_head_stride);
                // Of no parts, the logarithm of 0: minus infinity.
                let logarithm = k.log2(sum);
                let lse = k.fma(logarithm, p.from_log2, shift);
                let is_first = k.compare(Compare::Eq, lane_in_row, 0u32);
                k.when(is_first, |k| k.store_one(target, lse));
            }
        });
    });
    builder.finish()
}

/// The weight of a part, relative to that of an LSE of `shift`.
fn weight(k: &mut Builder, p: &Parameters, lse: Reg<F32>, shift: Reg<F32>) -> Reg<F32> {
    let difference = k.sub(lse, shift);
    let exponent = k.mul(difference, p.to_log2);
    k.exp2(exponent)
}

/// The largest LSE, or 0 where all parts are empty: nothing is subtracted from minus infinity then.
fn shift_of(k: &mut Builder, largest: Reg<F32>) -> Reg<F32> {
    let none = k.compare(Compare::Eq, largest, f32::NEG_INFINITY);
    k.select(none, 0.0f32, largest)
}

/// Adds up parts that are all in registers. Returns the largest LSE and the sum of the weights.
fn merge_few(k: &mut Builder, row: &RowParts<'_>, columns: &LaneColumns, count: u32) -> (Reg<F32>, Reg<F32>) {
    let loaded: Vec<_> = (0..count)
        .map(|index| {
            let index = k.copy(index);
            let index = k.widen(index);
            row.load(k, columns, index)
        })
        .collect();
    let largest = k.copy(f32::NEG_INFINITY);
    for part in &loaded {
        k.max_to(largest, part.lse);
    }
    let shift = shift_of(k, largest);
    let sum = k.copy(0.0f32);
    for part in &loaded {
        let weight = weight(k, row.p, part.lse, shift);
        k.add_to(sum, weight);
        columns.add(k, part, weight);
    }
    (shift, sum)
}

/// Adds up many parts, some at a time. Returns the largest LSE and the sum of the weights.
fn merge_many(k: &mut Builder, row: &RowParts<'_>, columns: &LaneColumns) -> (Reg<F32>, Reg<F32>) {
    let p = row.p;
    let last = k.sub(p.num_parts, 1u32);
    let index_of = |k: &mut Builder, first: Reg<U32>, next: u32| {
        let index = k.add(first, next);
        let exists = k.compare(Compare::Lt, index, p.num_parts);
        let index = k.min(index, last);
        (k.widen(index), exists)
    };
    let largest = k.copy(f32::NEG_INFINITY);
    k.section("largest", |k| {
        k.for_uniform(0u32, p.num_parts, PARTS_AT_ONCE, |k, first| {
            for next in 0..PARTS_AT_ONCE {
                // The last once more changes no maximum.
                let (index, _) = index_of(k, first, next);
                let (lse, _) = row.lse(k, index);
                k.max_to(largest, lse);
            }
        });
    });
    let shift = shift_of(k, largest);
    let sum = k.copy(0.0f32);
    k.section("parts", |k| {
        k.for_uniform(0u32, p.num_parts, PARTS_AT_ONCE, |k, first| {
            let mut loaded = Vec::new();
            for next in 0..PARTS_AT_ONCE {
                let (index, exists) = index_of(k, first, next);
                let part = row.load(k, columns, index);
                let lse = k.select(exists, part.lse, f32::NEG_INFINITY);
                let absent = k.not(exists);
                let empty = k.or(part.empty, absent);
                loaded.push(LanePart { lse, empty, ..part });
            }
            for part in &loaded {
                let weight = weight(k, p, part.lse, shift);
                k.add_to(sum, weight);
                columns.add(k, part, weight);
            }
        });
    });
    (shift, sum)
}

/// Stores the sums, over the sum of the weights: zeros where all parts are empty.
fn store(k: &mut Builder, spec: MergeSpec, columns: &LaneColumns, output: Reg<U64>, sum: Reg<F32>) {
    let none = k.compare(Compare::Eq, sum, 0.0f32);
    let divisor = k.select(none, 1.0f32, sum);
    let inverse = k.div(1.0f32, divisor);
    let vector = VectorType::new(spec.dtype, spec.vec);
    for ((&offset, exists), sums) in columns.offsets.iter().zip(&columns.exists).zip(&columns.sums) {
        let values: Vec<_> = sums.iter().map(|&sum| k.mul(sum, inverse)).collect();
        let bits = vector.round(k, &values);
        let address = k.mad_wide(offset, spec.dtype.size_bytes() as u32, output);
        match exists {
            Some(exists) => k.when(*exists, |k| vector.store(k, address, &bits)),
            None => vector.store(k, address, &bits),
        }
    }
}
