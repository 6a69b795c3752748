//! Steps of a warpgroup: `wgmma`, its fence, its groups and waits, and `setmaxnreg`. Products in flight are in
//! [`crate::state::wgmma`].
//!
//! Warp `w` of the group has rows 16 `w` to 16 `w` + 15 of A and of the accumulator. Of the accumulator, lane `l` is thread
//! `t = l % 4` of `g = l / 4`: register `r` of `f32` holds row `g + 8 (r / 2 % 2)`, column `8 (r / 4) + 2t + r % 2`;
//! register `r` of pairs row `g + 8 (r % 2)`, columns `8 (r / 2) + 2t` and the next. A in registers is the fragment of
//! `mma`, of 16-bit elements or of 8-bit floats. Products are summed as those of `mma` are.

use flashcore_ir::{Accumulation, MatrixSource, Op, RegisterChange, RegisterId, Space, Type};

use crate::error::{InternalError, Stop};
use crate::execute::matrix_descriptor::{CHUNK_BYTES, DEPTH_BYTES, SharedMatrix};
use crate::execute::{Attempt, Context};
use crate::fault::{AccessKind, FaultKind, WarpgroupProblem};
use crate::fp8;
use crate::numeric::{Bf16, F16, Half, canonical, join, split};
use crate::state::registers::{ALL, LANES, Registers};
use crate::state::wgmma::{Disagreement, Elements, Form, InUse, Product, membership};
use crate::tensor_sum::{Factor, TensorSum};

/// Rows of A, and those of one warp.
const ROWS: usize = 64;
const WARP_ROWS: usize = 16;
/// The most elements along the depth: 8-bit floats.
const MOST_DEPTH: usize = DEPTH_BYTES;

/// Rows of A of one warp, of which the depth is used.
type LeftRows = [[f64; MOST_DEPTH]; WARP_ROWS];

impl Elements {
    const fn bytes(self) -> usize {
        match self {
            Self::Pairs(_) => 2,
            Self::Fp8(_) => 1,
        }
    }

    const fn depth(self) -> usize {
        DEPTH_BYTES / self.bytes()
    }

    /// The value of an element of operand A (0) or B (1).
    fn decode(self, side: usize, bytes: &[u8]) -> f64 {
        match self {
            Self::Pairs(Type::F16x2) => F16::decode(u16::from_le_bytes([bytes[0], bytes[1]])).into(),
            Self::Pairs(_) => Bf16::decode(u16::from_le_bytes([bytes[0], bytes[1]])).into(),
            Self::Fp8(types) => fp8::decode(types[side], bytes[0]).into(),
        }
    }

    const fn factors(self) -> [Factor; 2] {
        match self {
            Self::Pairs(operand) => [Factor::of(operand); 2],
            Self::Fp8([left, right]) => [Factor::of_fp8(left), Factor::of_fp8(right)],
        }
    }
}

/// The fault for a register in use by a `wgmma`.
pub(crate) fn in_use(context: &Context<'_, '_, '_>, used: InUse) -> Stop {
    let InUse { register, access, started } = used;
    let mut started = context.scene.location_of(started, 0);
    started.address = None;
    Stop::warp(FaultKind::RegisterInFlight { register, access, started: Box::new(started) })
}

/// Checks that the four warps execute a step in lockstep, with these operands.
pub(crate) fn in_lockstep(context: &mut Context<'_, '_, '_>, operands: &[u64]) -> Result<(), Stop> {
    let placement = context.scene.placement;
    let (_, warp) = placement.rank_and_warp(context.warp_index);
    let (group, member) = membership(warp, placement.warps_per_cta)?;
    let groups = placement.warps_per_cta.div_ceil(crate::state::wgmma::WARPS);
    let group = &mut context.warpgroups[context.rank * groups + group];
    group.arrive(member, context.warp_index, context.step, operands).map_err(|other| disagreement(context, other))
}

/// The fault for warps of a group that do not agree.
pub(crate) fn disagreement(context: &Context<'_, '_, '_>, other: Disagreement) -> Stop {
    let Disagreement { step, warp, same } = other;
    let location = Box::new(context.scene.location(step, warp));
    let problem = if same {
        WarpgroupProblem::OperandsDiffer { other: location }
    } else {
        WarpgroupProblem::Disagrees { other: location }
    };
    Stop::warp(FaultKind::Warpgroup { problem })
}

/// Checks that the warps of a group that ends have executed the same steps.
pub(crate) fn end(context: &Context<'_, '_, '_>) -> Result<(), Stop> {
    let placement = context.scene.placement;
    let (_, warp) = placement.rank_and_warp(context.warp_index);
    let Ok((group, member)) = membership(warp, placement.warps_per_cta) else { return Ok(()) };
    let groups = placement.warps_per_cta.div_ceil(crate::state::wgmma::WARPS);
    let missed = context.warpgroups.get(context.rank * groups + group).and_then(|group| group.missed(member));
    if let Some(missed) = missed {
        return Err(disagreement(context, missed));
    }
    let Some(product) = context.warp.products.unfinished() else { return Ok(()) };
    let mut started = context.scene.location_of(product.started, 0);
    started.address = None;
    Err(Stop::warp(FaultKind::UnfinishedWgmma { started: Box::new(started) }))
}

/// Gives registers back or takes them (`setmaxnreg`). Returns true if there are enough.
pub(crate) fn set_register_count(
    context: &mut Context<'_, '_, '_>,
    change: RegisterChange,
    count: u32,
) -> Result<bool, Stop> {
    let current = context.warp.register_count;
    let possible = match change {
        RegisterChange::Increase => count >= current,
        RegisterChange::Decrease => count <= current,
    };
    if !possible {
        return Err(Stop::warp(FaultKind::RegisterCount { count, current }));
    }
    let free = &mut context.cluster[context.rank].free_registers;
    let wanted = count.saturating_sub(current);
    if wanted > *free {
        context.warp.waiting.registers = wanted;
        return Ok(false);
    }
    *free = *free + current - count;
    context.warp.register_count = count;
    context.warp.waiting.registers = 0;
    context.signals.released_registers |= count < current;
    in_lockstep(context, &[])?;
    Ok(true)
}

/// The value that all lanes give; a fault if they disagree.
fn uniform(values: &[u64; LANES]) -> Result<u64, Stop> {
    if values.iter().all(|value| *value == values[0]) {
        return Ok(values[0]);
    }
    Err(Stop::warp(FaultKind::Warpgroup { problem: WarpgroupProblem::LanesDisagree }))
}

/// Starts a `wgmma`.
pub(crate) fn start<'k>(context: &mut Context<'_, 'k, '_>, op: &'k Op) -> Result<(), Stop> {
    let form = Form::of(op).ok_or_else(|| Stop::no_such_form("Wgmma", op))?;
    let Form { columns, elements, accumulation, source, majors: [a_major, b_major], d, scale, a, b, .. } = form;
    let registers = &context.warp.registers;
    let adds = match accumulation {
        Accumulation::Replace => false,
        Accumulation::Add => true,
        Accumulation::AddWhere => match registers.predicate_of(scale[0]) {
            0 => false,
            ALL => true,
            _ => return Err(Stop::warp(FaultKind::Warpgroup { problem: WarpgroupProblem::LanesDisagree })),
        },
    };
    let mut matrices = Vec::new();
    let mut operands = vec![u64::from(adds)];
    if source == MatrixSource::Shared {
        matrices.push((uniform(registers.wide_of(a[0]))?, a_major, ROWS));
    }
    matrices.push((uniform(registers.wide_of(b[0]))?, b_major, columns as usize));
    operands.extend(matrices.iter().map(|(descriptor, ..)| *descriptor));
    in_lockstep(context, &operands)?;
    let checked = context.warp.products.check(d, form.fragment(), form.shape());
    checked.map_err(|problem| match problem {
        Ok(used) => in_use(context, used),
        Err(register) => Stop::warp(FaultKind::MissingWgmmaFence { register }),
    })?;
    let matrices: Vec<SharedMatrix> = matrices
        .into_iter()
        .map(|(descriptor, major, outer)| {
            SharedMatrix::new(descriptor, major, outer, elements.bytes()).ok_or_else(|| {
                Stop::warp(FaultKind::Warpgroup { problem: WarpgroupProblem::BaseOffset { descriptor } })
            })
        })
        .collect::<Result<_, _>>()?;
    let Context { scene, warp, clocks, cluster, rank, warp_index, step, counters, .. } = context;
    let accessor = clocks.accessor(*warp_index, *step);
    let access = accessor.all_lanes();
    for matrix in &matrices {
        if !matrix.is_aligned() {
            let kind = FaultKind::Misaligned { space: Space::Shared, alignment: matrix.alignment() };
            return Err(Stop::address(kind, 0, matrix.start.into()));
        }
        for chunk in 0..matrix.chunk_count() {
            let attempt = Attempt { space: Space::Shared, kind: AccessKind::Read, bytes: CHUNK_BYTES, lane: 0 };
            let read = cluster[*rank].start_product(matrix.chunk(chunk), &access, clocks);
            read.map_err(|refusal| scene.refused(attempt, refusal).by_warp())?;
        }
    }
    // The next `wgmma` may add to it before it is complete; for all other uses it is in flight until the wait.
    for &register in d {
        warp.registers.will_be_written(register);
    }
    warp.products.start(access.stamp, op, adds, matrices);
    counters.wgmma += 1;
    counters.tensor_flops += 2 * (WARP_ROWS * elements.depth()) as u64 * u64::from(columns);
    Ok(())
}

/// Computes the `wgmma`s that a wait covers.
pub(crate) fn wait(context: &mut Context<'_, '_, '_>, pending: u32) -> Result<(), Stop> {
    in_lockstep(context, &[])?;
    for product in context.warp.products.take(pending) {
        finish(context, &product)?;
    }
    Ok(())
}

fn finish(context: &mut Context<'_, '_, '_>, product: &Product<'_>) -> Result<(), Stop> {
    let form = Form::of(product.op).ok_or_else(|| Stop::no_such_form("Wgmma", product.op))?;
    let Form { columns, elements, accumulate, source, d, a, .. } = form;
    let (_, warp) = context.scene.placement.rank_and_warp(context.warp_index);
    let first_row = warp % crate::state::wgmma::WARPS * WARP_ROWS;
    let columns = columns as usize;
    let context_sum = context.scene.tensor_sum;
    let Context { warp, clocks, cluster, rank, warp_index, .. } = context;
    let shared = &mut cluster[*rank];
    let mut left = [[0f64; MOST_DEPTH]; WARP_ROWS];
    let Some((b, in_shared)) = product.matrices.split_last() else {
        let message = "a product without a second operand".to_owned();
        return Err(Stop::Internal(InternalError { message }));
    };
    match source {
        MatrixSource::Shared => {
            for matrix in in_shared {
                matrix_elements(
                    matrix,
                    elements.bytes(),
                    |address| shared.chunk(address),
                    |row, depth, bytes| {
                        if let Some(row) = row.checked_sub(first_row).filter(|row| *row < WARP_ROWS) {
                            left[row][depth] = elements.decode(0, bytes);
                        }
                    },
                );
            }
        }
        MatrixSource::Registers => fragment(&warp.registers, a, elements, &mut left),
    }
    let mut right = vec![0f64; elements.depth() * columns];
    matrix_elements(
        b,
        elements.bytes(),
        |address| shared.chunk(address),
        |column, depth, bytes| {
            right[depth * columns + column] = elements.decode(1, bytes);
        },
    );
    let sums = (context_sum, elements.factors());
    accumulate_product(&mut warp.registers, (d, accumulate, product.adds), sums, (&left, elements.depth()), &right);
    let accessor = clocks.accessor(*warp_index, product.started.step());
    let access = accessor.all_lanes();
    for matrix in &product.matrices {
        for chunk in 0..matrix.chunk_count() {
            shared.finish_product(matrix.chunk(chunk), &access);
        }
    }
    Ok(())
}

/// Visits each element of a matrix with its outer index and depth.
fn matrix_elements(
    matrix: &SharedMatrix,
    element_bytes: usize,
    chunk: impl Fn(u32) -> [u8; CHUNK_BYTES as usize],
    mut visit: impl FnMut(usize, usize, &[u8]),
) {
    for number in 0..matrix.chunk_count() {
        for (index, element) in chunk(matrix.chunk(number)).chunks_exact(element_bytes).enumerate() {
            let (outer, depth) = matrix.position(number, index);
            visit(outer, depth, element);
        }
    }
}

/// The rows of a warp from the fragment in its registers.
fn fragment(registers: &Registers<'_>, a: &[RegisterId], elements: Elements, rows: &mut LeftRows) {
    // A register has 4 bytes of a row, and the four of a group 16.
    let (of_register, of_group) = (4 / elements.bytes(), 16 / elements.bytes());
    for (register, &a) in a.iter().enumerate() {
        for (lane, &word) in registers.word_of(a).iter().enumerate() {
            let row = lane / 4 + 8 * (register % 2);
            let column = of_register * (lane % 4) + of_group * (register / 2);
            for (index, element) in word.to_le_bytes().chunks_exact(elements.bytes()).enumerate() {
                rows[row][column + index] = elements.decode(0, element);
            }
        }
    }
}

fn accumulate_product(
    registers: &mut Registers<'_>,
    (d, accumulate, adds): (&[RegisterId], Type, bool),
    (tensor_sum, factors): (TensorSum, [Factor; 2]),
    (left, depth): (&LeftRows, usize),
    right: &[f64],
) {
    let columns = right.len() / depth;
    let sum = |start: f64, row: usize, column: usize| {
        left[row][..depth].iter().enumerate().fold(start, |sum, (depth, a)| sum + a * right[depth * columns + column])
    };
    for (register, &d) in d.iter().enumerate() {
        let old = *registers.word_of(d);
        let words = core::array::from_fn(|lane| {
            let (group, thread) = (lane / 4, lane % 4);
            if accumulate == Type::F32 {
                let (row, column) = (group + 8 * (register / 2 % 2), 8 * (register / 4) + 2 * thread + register % 2);
                let start = if adds { f32::from_bits(old[lane]) } else { 0.0 };
                let products =
                    left[row][..depth].iter().enumerate().map(|(depth, a)| (*a, right[depth * columns + column]));
                canonical(tensor_sum.add(factors, start, products))
            } else {
                let (row, column) = (group + 8 * (register % 2), 8 * (register / 2) + 2 * thread);
                let halves = split(old[lane]);
                join([0, 1].map(|half| {
                    let start = if adds { F16::decode(halves[half]).into() } else { 0.0 };
                    F16::encode(sum(start, row, column + half))
                }))
            }
        });
        registers.set_word(d, ALL, &words);
    }
}
