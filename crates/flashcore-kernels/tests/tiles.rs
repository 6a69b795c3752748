//! Tile primitives in kernels of a few lines, run by the simulator: what a backward pass asks of them.

use core::marker::PhantomData;

use flashcore_ir::builder::Adds;
use flashcore_ir::types::{F16x2, F32, S32, U32, U64};
use flashcore_ir::{Arch, Builder, Compare, GlobalAddress, Kernel, Major, Reg, SpecialRegister};
use flashcore_kernels::element::ElementLayout;
use flashcore_kernels::primitives::{
    Accumulation, Accumulator, Exponential, FragmentPosition, HalfTypes, LANES, LaneColumns, OperandA, PANEL_ROW_BYTES,
    ROW_STEP, SharedLayout, SharedTile, SwizzledTile, WgmmaA, Window,
};
use flashcore_problem::{Alignment, DType, LseBase, Mask, Problem};
use flashcore_sim::{Argument, GlobalMemory, Launch, Options, launch};

const ELEMENT: ElementLayout = ElementLayout::of(DType::F16);
const SCALE: f32 = 0.125;

/// Runs one CTA over inputs of `f32`, and returns its output of `count` words.
fn run(kernel: Kernel, inputs: &[&[f32]], words: &[i32], count: usize) -> Vec<[u8; 4]> {
    let kernel = kernel.verify(Arch::Sm90a).unwrap_or_else(|errors| panic!("{errors:#?}"));
    let mut memory = GlobalMemory::new();
    let mut arguments = Vec::new();
    for input in inputs {
        let bytes: Vec<u8> = input.iter().flat_map(|number| number.to_le_bytes()).collect();
        arguments.push(Argument::U64(memory.allocate("input", &bytes)));
    }
    let output = memory.allocate("output", &vec![0; count * 4]);
    arguments.push(Argument::U64(output));
    arguments.extend(words.iter().map(|word| Argument::S32(*word)));
    let launched = Launch { grid: [1, 1, 1], arguments };
    launch(&kernel, &launched, &memory, &Options::default()).unwrap_or_else(|error| panic!("{error}"));
    memory.read(output).chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]).collect()
}

/// A matrix of rows of `columns` numbers in device memory, as the lanes of a warp have it in an accumulator.
struct LaneMatrix {
    first: Reg<U64>,
    columns: u32,
}

impl LaneMatrix {
    fn new(k: &mut Builder, matrix: Reg<U64>, columns: u32, first_row: Reg<U32>, position: FragmentPosition) -> Self {
        let index = k.eval((first_row + position.group) * columns + position.member * 2);
        Self { first: k.mad_wide(index, 4u32, matrix), columns }
    }

    fn address(&self, row: usize, column: u32) -> GlobalAddress {
        GlobalAddress::from(self.first).plus(((row as u32 * ROW_STEP * self.columns + column) * 4) as i32)
    }

    fn load(&self, k: &mut Builder, results: &Accumulator) {
        results.each(|row, column, element| {
            let loaded = k.load_one::<F32>(self.address(row, column));
            k.set(element, loaded);
        });
    }

    fn store(&self, k: &mut Builder, results: &Accumulator) {
        results.each(|row, column, element| k.store_one(self.address(row, column), element));
    }
}

/// Makes weights of scores by their LSE: `P = exp(scale · S - LSE)`.
fn load_weights(k: &mut Builder, [scores, lse]: [Reg<U64>; 2], keys: u32, warp: Warp, weights: &Accumulator) {
    LaneMatrix::new(k, scores, keys, warp.first_row, warp.position).load(k, weights);
    let rows = weights.m_tiles.len() as u32 * 2;
    let lse: Vec<_> = (0..rows)
        .map(|row| {
            let row = k.eval(warp.first_row + warp.position.group + row * ROW_STEP);
            let address = k.mad_wide(row, 4u32, lse);
            k.load_one::<F32>(address)
        })
        .collect();
    let scale = k.copy(SCALE * core::f32::consts::LOG2_E);
    Exponential::Unit.weights_of_lse(k, weights, Some(scale), &lse, LseBase::Natural);
}

#[derive(Clone, Copy)]
struct Warp {
    lane: Reg<U32>,
    position: FragmentPosition,
    first_row: Reg<U32>,
}

impl Warp {
    fn new(k: &mut Builder) -> Self {
        let thread = k.special(SpecialRegister::ThreadX);
        let lane = k.and(thread, LANES - 1);
        let position = FragmentPosition::new(k, lane);
        Self { lane, position, first_row: k.eval((thread >> LANES.ilog2()) * 16) }
    }
}

/// Scores, their LSE, and the gradient of the output of `rows` rows; the last row attends no key.
fn inputs(rows: u32, keys: u32, columns: u32) -> [Vec<f32>; 3] {
    let number = |index: u32, step: u32| ((index * step + index / 7) % 17) as f32 - 8.0;
    let mut scores: Vec<f32> = (0..rows * keys).map(|index| number(index, 5)).collect();
    scores[((rows - 1) * keys) as usize..].fill(f32::NEG_INFINITY);
    let lse = scores.chunks_exact(keys as usize).map(|row| row.iter().map(|s| (s * SCALE).exp()).sum::<f32>().ln());
    let lse = lse.collect();
    (scores, lse, (0..rows * columns).map(|index| number(index, 3) / 4.0).collect()).into()
}

/// Checks `V' = Pᵀ · O'` of weights that were rounded to `f16`.
fn check(inputs: &[Vec<f32>; 3], [rows, keys, columns]: [u32; 3], output: &[[u8; 4]]) {
    let [rows, keys, columns] = [rows, keys, columns].map(|count| count as usize);
    let [scores, lse, gradient] = inputs;
    for (key, column) in (0..keys).flat_map(|key| (0..columns).map(move |column| (key, column))) {
        let terms = (0..rows).map(|row| {
            let weight = f64::from(scores[row * keys + key] * SCALE - lse[row]).exp();
            let weight = if lse[row] == f32::NEG_INFINITY { 0.0 } else { weight };
            weight * f64::from(gradient[row * columns + column])
        });
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
        let got = f64::from(f32::from_le_bytes(output[key * columns + column]));
        assert!((got - sum).abs() <= size * 1e-3 + 1e-7, "key {key}, column {column}: {got} instead of {sum}");
    }
}

/// A from shared memory, transposed: `Pᵀ`, of weights that the warp wrote there, in registers or loaded by step.
#[test]
fn a_warp_multiplies_a_transposed_left_operand() {
    let [rows, keys, columns] = [32, 128, 96];
    let inputs = inputs(rows, keys, columns);
    for (layout, in_registers) in SharedLayout::ALL.into_iter().flat_map(|layout| [(layout, true), (layout, false)]) {
        let mut builder = Builder::new("transposed_left", LANES);
        let k = &mut builder;
        let [scores, lse, gradient, output] = ["scores", "lse", "gradient", "output"].map(|name| k.parameter(name));
        let [weight_tile, gradient_tile] =
            [keys, columns].map(|columns| SharedTile::reserve(k, rows, columns, layout, ELEMENT));
        let (warp, base) = (Warp::new(k), k.shared_base());
        let weights = Accumulator::zero(k, rows / 16, keys);
        load_weights(k, [scores, lse], keys, warp, &weights);
        let gradients = Accumulator::zero(k, rows / 16, columns);
        LaneMatrix::new(k, gradient, columns, warp.first_row, warp.position).load(k, &gradients);
        for (tile, results) in [(weight_tile, &weights), (gradient_tile, &gradients)] {
            tile.write_rows::<F16x2>(k, (results, LaneColumns::Pairs), base, warp.first_row, warp.position);
        }
        k.warp_sync();
        let a = weight_tile.operand_a(k, base, warp.lane, Major::Outer);
        let m_tiles: Vec<_> = (0..keys / 16).map(|m_tile| a.from_outer(m_tile * 16)).collect();
        let a = if in_registers { OperandA::<F16x2>::load(k, &m_tiles, rows) } else { OperandA::Shared(m_tiles, rows) };
        let b = gradient_tile.operand_b(k, base, warp.lane, Major::Outer);
        let product = Accumulator::zero(k, keys / 16, columns);
        product.multiply(k, &a, b, Accumulation::F32);
        LaneMatrix::new(k, output, columns, warp.first_row, warp.position).store(k, &product);
        let output = run(builder.finish(), &inputs.each_ref().map(Vec::as_slice), &[], (keys * columns) as usize);
        check(&inputs, [rows, keys, columns], &output);
    }
}

/// The same by `wgmma`: both operands MN-major in swizzled shared memory.
#[test]
fn a_warpgroup_multiplies_a_transposed_left_operand() {
    let [rows, keys, columns] = [64, 64, 96];
    let inputs = inputs(rows, keys, columns);
    let mut builder = Builder::new("transposed_left", 4 * LANES);
    let k = &mut builder;
    let [scores, lse, gradient, output] = ["scores", "lse", "gradient", "output"].map(|name| k.parameter(name));
    let tiles = [keys, columns].map(|columns| SwizzledTile { rows, columns, element: ELEMENT });
    let addresses = tiles.map(|tile| k.reserve_shared(tile.bytes(), 1024));
    let (warp, base) = (Warp::new(k), k.shared_base());
    let addresses = addresses.map(|offset| k.add(base, offset));
    let [weights, gradients, product] = [keys, columns, columns].map(|columns| Accumulator::unset(k, columns));
    load_weights(k, [scores, lse], keys, warp, &weights);
    LaneMatrix::new(k, gradient, columns, warp.first_row, warp.position).load(k, &gradients);
    for ((tile, address), results) in tiles.into_iter().zip(addresses).zip([&weights, &gradients]) {
        let rows = k.mad(warp.first_row, PANEL_ROW_BYTES, address);
        tile.write_rows::<F16x2>(k, results, rows, warp.lane);
    }
    k.fence_proxy_async();
    k.cta_sync();
    let [a, b] = [0, 1].map(|operand| tiles[operand].mn_major(k, addresses[operand]));
    k.wgmma_fence();
    product.multiply_async(k, HalfTypes::<F16x2>(PhantomData), WgmmaA::Shared(&a), &b, Adds::Replace);
    k.wgmma_wait(0);
    LaneMatrix::new(k, output, columns, warp.first_row, warp.position).store(k, &product);
    let output = run(builder.finish(), &inputs.each_ref().map(Vec::as_slice), &[], (keys * columns) as usize);
    check(&inputs, [rows, keys, columns], &output);
}

const BLOCK: u32 = 2;

/// A kernel whose lanes store, each for a block of rows or of keys, the ranges that some and that all of the block attend.
fn ranges_kernel(has_limit: [bool; 2], of_keys: bool) -> Kernel {
    let mut builder = Builder::new("ranges", LANES);
    let k = &mut builder;
    let output = k.parameter::<U64>("output");
    let [offset, before, after, rows, keys] =
        ["offset", "before", "after", "rows", "keys"].map(|name| k.parameter::<S32>(name));
    let [before, after] = [(has_limit[0], before), (has_limit[1], after)].map(|(has, limit)| has.then_some(limit));
    let window = Window { offset, packed: None, before, after, length: keys };
    let (window, count) = if of_keys { (window.transposed(k, rows), keys) } else { (window, rows) };
    let block = k.special(SpecialRegister::ThreadX);
    let (first, count) = (k.mul(block, BLOCK), k.reinterpret::<S32, U32>(count));
    let last = k.eval((first + (BLOCK - 1)).min(count - 1));
    let [begin, end] = window.attended_by_some(k, [first, last], BLOCK);
    let (all_begin, all_end) = window.attended_by_all(k, [first, last]);
    let all_begin = all_begin.unwrap_or_else(|| k.copy(0i32));
    let exists = k.compare(Compare::Lt, first, count);
    let address = k.mad_wide(block, 16u32, output);
    k.when(exists, |k| k.store(address, &[begin, end, all_begin, all_end]));
    builder.finish()
}

/// Ranges of both directions are those of the problem, for every block, window, alignment and pair of small lengths.
#[test]
fn ranges_of_both_directions_are_those_of_the_problem() {
    let limits = [None, Some(0), Some(1), Some(3)];
    for (left, right, of_keys) in
        limits.iter().flat_map(|l| limits.iter().flat_map(move |r| [false, true].map(|of_keys| (*l, *r, of_keys))))
    {
        for (alignment, rows, keys) in [Alignment::TopLeft, Alignment::BottomRight]
            .into_iter()
            .flat_map(|alignment| (1..8).flat_map(move |rows| (1..8).map(move |keys| (alignment, rows, keys))))
        {
            let mut problem = Problem::new(1, 1, rows, 32, DType::F16);
            problem.key_length = keys;
            problem.mask = Mask::Window { left, right, alignment };
            let limit = |limit: Option<usize>| limit.unwrap_or(0) as i32;
            let words = [problem.position_offset(keys) as i32, limit(left), limit(right), rows as i32, keys as i32];
            let kernel = ranges_kernel([left.is_some(), right.is_some()], of_keys);
            let stored = run(kernel, &[], &words, LANES as usize * 4);
            let (count, others) = if of_keys { (keys, rows) } else { (rows, keys) };
            let attends = |index: usize, other: usize| {
                if of_keys {
                    problem.attending_rows(keys, index).contains(&other)
                } else {
                    problem.attends(keys, index, other)
                }
            };
            for (block, first) in (0..count).step_by(BLOCK as usize).enumerate() {
                let indices = first..count.min(first + BLOCK as usize);
                let some: Vec<_> = (0..others).filter(|o| indices.clone().any(|index| attends(index, *o))).collect();
                let all: Vec<_> = (0..others).filter(|o| indices.clone().all(|index| attends(index, *o))).collect();
                let stored = [0, 1, 2, 3].map(|word| i32::from_le_bytes(stored[block * 4 + word]) as usize);
                let [begin, end, all_begin, all_end] = stored;
                let what = format!("{problem}, block {block}, of keys: {of_keys}: {stored:?}");
                assert_eq!((all_begin..all_end).collect::<Vec<_>>(), all, "{what}");
                match (some.first(), some.last()) {
                    (Some(first), Some(last)) => {
                        assert_eq!([begin, end], [first / BLOCK as usize * BLOCK as usize, last + 1], "{what}");
                    }
                    // The begin of an empty range is rounded down too, and may be before its end.
                    _ => assert!(end < begin + BLOCK as usize, "{what}"),
                }
            }
        }
    }
}
