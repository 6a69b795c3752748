//! Steps: one operation, executed by the active lanes of a warp; the match on the table of operations.

mod arithmetic;
pub(crate) mod async_copy;
mod bits;
mod cluster;
mod convert;
mod exchange;
mod lanes;
pub(crate) mod matrix_descriptor;
mod mbarrier;
mod memory;
mod mma;
pub(crate) mod tma;
mod tma_box;
pub(crate) mod wgmma;

use flashcore_ir::{Op, Operand, Space, SpecialRegister, Type};

use crate::clocks::{Clocks, Participants};
use crate::counters::Counters;
use crate::error::Stop;
use crate::execute::bits::Shift;
use crate::execute::lanes::Lanes;
use crate::execute::mbarrier::Arrival;
use crate::execute::mma::{Mma, MmaFp8};
use crate::execute::tma::TmaLoad;
use crate::fault::{AccessKind, FaultKind, InFlight, Location, MbarrierProblem, TooEarly};
use crate::launch::Arguments;
use crate::memory::shared::{SHARED_BASE, SharedMemory};
use crate::memory::view::GlobalView;
use crate::memory::{Reason, Refusal};
use crate::placement::Placement;
use crate::program::{Action, Program};
use crate::race::Stamp;
use crate::state::cluster_barrier::ClusterBarrier;
use crate::state::registers::{ALL, LANES, lanes};
use crate::state::warp::Warp;
use crate::state::wgmma::Warpgroup;
use crate::stream::{GridDependency, Overlap};
use crate::tensor_sum::TensorSum;

/// The operands of a step: the executing warp, and the state of its cluster.
pub(crate) struct Context<'c, 'k, 'm> {
    pub(crate) scene: Scene<'c, 'k>,
    /// The warp in the cluster.
    pub(crate) warp_index: usize,
    /// The CTA in the cluster.
    pub(crate) rank: usize,
    pub(crate) step: usize,
    /// The lanes that execute it; at least one.
    pub(crate) mask: u32,
    pub(crate) warp: &'c mut Warp<'k>,
    pub(crate) clocks: &'c mut Clocks,
    /// The shared memory of each CTA of the cluster.
    pub(crate) cluster: &'c mut [SharedMemory],
    pub(crate) global: &'c mut GlobalView<'m>,
    pub(crate) counters: &'c mut Counters,
    pub(crate) cluster_barrier: &'c mut ClusterBarrier,
    pub(crate) signals: &'c mut Signals,
    pub(crate) tma_loads: &'c mut Vec<TmaLoad>,
    /// The warpgroups of all CTAs; none without `wgmma`.
    pub(crate) warpgroups: &'c mut [Warpgroup],
}

/// Events that an operation reports to the scheduler.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The `mbarrier`s of which a phase has completed: the CTA in the cluster, and the address.
    pub(crate) completed: Vec<(usize, u32)>,
    /// True if a warp has given registers back.
    pub(crate) released_registers: bool,
    /// Waits and triggers of the cluster in programmatic dependent launch.
    pub(crate) dependency: GridDependency,
}

/// The constants of a cluster, shared by all its warps.
#[derive(Clone, Copy)]
pub(crate) struct Scene<'c, 'k> {
    pub(crate) program: &'c Program<'k>,
    pub(crate) arguments: &'c Arguments,
    pub(crate) placement: Placement,
    /// The addition of tensor cores in `f32`.
    pub(crate) tensor_sum: TensorSum,
}

/// An access to memory that may be refused.
#[derive(Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) space: Space,
    pub(crate) kind: AccessKind,
    pub(crate) bytes: u32,
    pub(crate) lane: usize,
}

impl Scene<'_, '_> {
    /// The location of a step of a warp, without the lane and the address.
    pub(crate) fn location(&self, step: usize, warp: usize) -> Location {
        self.program.location(step, &self.placement, warp)
    }

    /// The location of an access of this cluster.
    pub(crate) fn location_of(&self, stamp: Stamp, address: u64) -> Location {
        self.program.location_of(stamp, &self.placement, address)
    }

    /// True if the step that started is a TMA load, whose completion an `mbarrier` counts.
    fn is_tma_load(&self, started: Stamp) -> bool {
        matches!(self.operation(started), Some(Op::BulkLoad { .. } | Op::TensorLoad { .. }))
    }

    fn operation(&self, started: Stamp) -> Option<&Op> {
        match &self.program.steps[started.step()].action {
            Action::Operation(operation) => Some(operation.op),
            _ => None,
        }
    }

    /// The fault for a refused access.
    pub(crate) fn refused(&self, attempt: Attempt, refusal: Refusal) -> Stop {
        let Attempt { space, kind: access, bytes, lane } = attempt;
        let address = refusal.address;
        let location = |stamp| Box::new(self.location_of(stamp, address));
        let touch = match access {
            AccessKind::Read => TooEarly::Read,
            AccessKind::Write | AccessKind::Atomic => TooEarly::Write,
        };
        let kind = match refusal.reason {
            Reason::OutOfBounds(nearest) => FaultKind::OutOfBounds { space, bytes, nearest: *nearest },
            Reason::Uninitialised => FaultKind::UninitialisedMemory { space },
            Reason::Race { earlier, earlier_kind } => {
                FaultKind::Race { space, access, earlier_access: earlier_kind, earlier: location(earlier) }
            }
            Reason::Overlap(overlap) => {
                let Overlap { earlier, waited } = *overlap;
                FaultKind::LaunchRace { access, earlier, waited }
            }
            Reason::Filling(started) => {
                let in_flight = match space {
                    Space::Shared | Space::Cluster if self.is_tma_load(started) => InFlight::TmaLoadTarget,
                    Space::Shared | Space::Cluster => InFlight::CopyTarget,
                    Space::Global => InFlight::BulkTarget,
                };
                FaultKind::MissingWait { space, touch, in_flight, started: location(started) }
            }
            Reason::Draining(started) => {
                let product = matches!(self.operation(started), Some(Op::Wgmma { .. } | Op::WgmmaFp8 { .. }));
                let in_flight = if product { InFlight::WgmmaOperand } else { InFlight::BulkSource };
                FaultKind::MissingWait { space, touch, in_flight, started: location(started) }
            }
            Reason::Unfenced(written) => FaultKind::MissingProxyFence { written: location(written) },
            Reason::Mbarrier(state) => FaultKind::Mbarrier { problem: MbarrierProblem::Touched, state: Some(state) },
            Reason::UnfencedGlobal(written) => FaultKind::UnfencedGlobal { written: location(written) },
            Reason::Stale(written) => FaultKind::StaleRead { written: location(written) },
        };
        Stop::address(kind, lane, address)
    }
}

/// Checks that an address is a multiple of `alignment`.
pub(crate) fn aligned(space: Space, address: u64, alignment: u32, lane: usize) -> Result<(), Stop> {
    if address.is_multiple_of(u64::from(alignment)) {
        return Ok(());
    }
    Err(Stop::address(FaultKind::Misaligned { space, alignment }, lane, address))
}

/// The continuation of a warp after an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Proceeds with the next step.
    Next,
    /// Arrives at a named barrier with these operands.
    Barrier { barrier: Operand, threads: Operand, waits: bool },
    /// Arrives at the cluster barrier.
    ClusterArrive,
    /// Waits, and executes the step again.
    Wait,
    /// The lanes that executed it have ended.
    Exit,
}

impl<'k> Context<'_, 'k, '_> {
    pub(crate) fn lanes(&mut self) -> Lanes<'_, 'k> {
        Lanes { registers: &mut self.warp.registers, mask: self.mask }
    }

    fn special(&self, register: SpecialRegister) -> [u32; LANES] {
        let placement = &self.scene.placement;
        let first_thread = (self.warp_index % placement.warps_per_cta * LANES) as u32;
        let cta = placement.cta(self.rank);
        match register {
            SpecialRegister::ThreadX => core::array::from_fn(|lane| first_thread + lane as u32),
            SpecialRegister::Lane => core::array::from_fn(|lane| lane as u32),
            // CTAs have one dimension.
            SpecialRegister::ThreadY | SpecialRegister::ThreadZ => [0; LANES],
            SpecialRegister::BlockX => [self.scene.program.kernel.threads; LANES],
            SpecialRegister::CtaX => [cta[0]; LANES],
            SpecialRegister::CtaY => [cta[1]; LANES],
            SpecialRegister::CtaZ => [cta[2]; LANES],
            SpecialRegister::GridX => [placement.grid[0]; LANES],
            SpecialRegister::GridY => [placement.grid[1]; LANES],
            SpecialRegister::GridZ => [placement.grid[2]; LANES],
            SpecialRegister::ClusterCtaX => [placement.within(self.rank)[0]; LANES],
            SpecialRegister::ClusterCtaY => [placement.within(self.rank)[1]; LANES],
            SpecialRegister::ClusterCtaZ => [placement.within(self.rank)[2]; LANES],
            SpecialRegister::ClusterX => [placement.size[0]; LANES],
            SpecialRegister::ClusterY => [placement.size[1]; LANES],
            SpecialRegister::ClusterZ => [placement.size[2]; LANES],
            SpecialRegister::ClusterRank => [self.rank as u32; LANES],
            SpecialRegister::ClusterSize => [placement.ctas() as u32; LANES],
        }
    }
}

/// Executes an operation.
#[expect(clippy::too_many_lines, reason = "one arm for each row of the table")]
pub(crate) fn execute<'k>(context: &mut Context<'_, 'k, '_>, op: &'k Op) -> Result<Flow, Stop> {
    let mask = context.mask;
    match *op {
        Op::Mov { ty, d, a } | Op::Reinterpret { to: ty, from: _, d, a } => {
            arithmetic::copy(&mut context.lanes(), ty, d, a);
        }
        Op::Special { register, d } => {
            let values = context.special(register);
            context.lanes().set_word(d, &values);
        }
        Op::SharedBase { d } => context.lanes().set_word(d, &[SHARED_BASE; LANES]),
        Op::LoadParam { ty, parameter, d } => {
            let bits = Operand::Constant(context.scene.arguments.bits[parameter as usize]);
            arithmetic::copy(&mut context.lanes(), ty, d, bits);
        }
        Op::TensorMapAddress { parameter, d } => {
            let bits = Operand::Constant(context.scene.arguments.bits[parameter as usize]);
            arithmetic::copy(&mut context.lanes(), Type::U64, d, bits);
        }
        Op::SetPredicate { compare, ty, d, a, b } => {
            arithmetic::set_predicate(&mut context.lanes(), compare, ty, d, [a, b])?;
        }
        Op::Select { ty, d, a, b, ref condition } => {
            arithmetic::select(&mut context.lanes(), ty, d, [a, b], condition[0])?;
        }

        Op::Add { ty, d, a, b } => arithmetic::add(&mut context.lanes(), ty, d, [a, b])?,
        Op::Sub { ty, d, a, b } => arithmetic::sub(&mut context.lanes(), ty, d, [a, b])?,
        Op::Mul { ty, d, a, b } => arithmetic::mul(&mut context.lanes(), ty, d, [a, b])?,
        Op::MulHigh { ty, d, a, b } => arithmetic::mul_high(&mut context.lanes(), ty, d, [a, b])?,
        Op::MulWide { ty, d, a, b } => {
            arithmetic::mad_wide(&mut context.lanes(), ty, d, [a, b], Operand::Constant(0))?;
        }
        Op::Mad { ty, d, a, b, c } => arithmetic::mad(&mut context.lanes(), ty, d, [a, b, c])?,
        Op::MadWide { ty, d, a, b, c } => arithmetic::mad_wide(&mut context.lanes(), ty, d, [a, b], c)?,
        Op::Fma { ty, d, a, b, c } => arithmetic::fused(&mut context.lanes(), ty, d, [a, b, c])?,
        Op::Div { ty, d, a, b } => arithmetic::div(&mut context.lanes(), ty, d, [a, b])?,
        Op::Rem { ty, d, a, b } => arithmetic::rem(&mut context.lanes(), ty, d, [a, b])?,
        Op::Min { ty, d, a, b } => arithmetic::min(&mut context.lanes(), ty, d, [a, b])?,
        Op::Max { ty, d, a, b } => arithmetic::max(&mut context.lanes(), ty, d, [a, b])?,
        Op::Neg { ty, d, a } => arithmetic::neg(&mut context.lanes(), ty, d, a)?,
        Op::Abs { ty, d, a } => arithmetic::abs(&mut context.lanes(), ty, d, a)?,

        Op::And { ty, d, a, b } => bits::logic(&mut context.lanes(), ty, d, [a, b], |a, b| a & b)?,
        Op::Or { ty, d, a, b } => bits::logic(&mut context.lanes(), ty, d, [a, b], |a, b| a | b)?,
        Op::Xor { ty, d, a, b } => bits::logic(&mut context.lanes(), ty, d, [a, b], |a, b| a ^ b)?,
        Op::Not { ty, d, a } => bits::logic(&mut context.lanes(), ty, d, [a, a], |a, _| !a)?,
        Op::Shl { ty, d, a, b } => bits::shift(&mut context.lanes(), Shift::Left, ty, d, a, b)?,
        Op::Shr { ty, d, a, b } => bits::shift(&mut context.lanes(), Shift::Right, ty, d, a, b)?,
        Op::Lop3 { table, d, a, b, c } => {
            context.lanes().words3(d, [a, b, c], |a, b, c| bits::lop3(table, a, b, c));
        }
        Op::BitFieldExtract { d, a, position, length } => {
            context.lanes().words3(d, [a, position, length], bits::extract);
        }
        Op::BitFieldInsert { d, a, b, position, length } => {
            let mut lanes = context.lanes();
            let (a, b, position, length) = (lanes.word(a), lanes.word(b), lanes.word(position), lanes.word(length));
            let insert = |lane: usize| bits::insert(a[lane], b[lane], position[lane], length[lane]);
            lanes.set_word(d, &core::array::from_fn(insert));
        }
        Op::Permute { d, a, b, selector } => context.lanes().words3(d, [a, b, selector], bits::permute),
        Op::PopCount { d, a } => context.lanes().words1(d, a, u32::count_ones),
        Op::LeadingZeros { d, a } => context.lanes().words1(d, a, u32::leading_zeros),

        Op::Convert { to, from, rounding, d, a } => {
            convert::convert(&mut context.lanes(), to, from, rounding, d, a)?;
        }
        Op::ConvertPair { to, d, high, low } => convert::convert_pair(&mut context.lanes(), to, d, high, low)?,
        Op::ConvertFp8 { to, d, high, low } => convert::to_fp8(&mut context.lanes(), to, d, high, low),
        Op::WidenFp8 { from, d, ref a } => convert::from_fp8(&mut context.lanes(), from, d, a[0]),
        Op::Pack { to, d, ref low, ref high } => convert::pack(&mut context.lanes(), to, d, low[0], high[0]),
        Op::Unpack { from, low, high, ref a } => convert::unpack(&mut context.lanes(), from, low, high, a[0]),

        Op::Exp2 { ty, d, a } => {
            let elements = if ty == Type::F32 { 1 } else { 2 };
            context.counters.exponentials += elements * u64::from(mask.count_ones());
            arithmetic::exp2(&mut context.lanes(), ty, d, a)?;
        }
        Op::Log2 { d, a } => arithmetic::special_function(&mut context.lanes(), d, a, f64::log2),
        Op::Reciprocal { d, a } => arithmetic::special_function(&mut context.lanes(), d, a, |a| 1.0 / a),
        Op::ReciprocalSqrt { d, a } => {
            // The root of -0 is -0, whose reciprocal is -inf, as the manual has it.
            arithmetic::special_function(&mut context.lanes(), d, a, |a| 1.0 / a.sqrt());
        }
        Op::Sqrt { d, a } => arithmetic::special_function(&mut context.lanes(), d, a, f64::sqrt),
        Op::Tanh { ty, d, a } => arithmetic::tanh(&mut context.lanes(), ty, d, a)?,

        Op::Shuffle { mode, control, ty: _, d, index, ref a } => {
            let mut lanes = context.lanes();
            let index = lanes.word(index);
            exchange::shuffle(&mut lanes, mode, control, d, &index, a[0]);
        }
        Op::Vote { mode, d, ref a } => exchange::vote(&mut context.lanes(), mode, d, a[0]),
        Op::Ballot { d, ref a } => {
            let holds = context.warp.registers.predicate_of(a[0]);
            context.lanes().set_word(d, &[holds; LANES]);
        }
        Op::ReduceWarp { op, ty, d, ref a } => exchange::reduce(&mut context.lanes(), op, ty, d, a[0])?,
        // Any lane would do; the last one exposes kernels that rely on the first.
        Op::Elect { d } => context.lanes().set_predicate(d, 1 << (LANES - 1)),
        Op::WarpSync {} => context.clocks.warp_sync(context.warp_index),

        Op::Load { space, cache, prefetch: _, ty, count: _, ref d, source } => {
            memory::load(context, space, cache, ty, d, source)?;
        }
        Op::Store { space, cache: _, ty, count: _, ref a, target } => memory::store(context, space, ty, a, target)?,
        Op::Atomic { space, op, ty, d, ref a, target } => {
            memory::atomic(context, space, op, ty, Some(d), a[0], target)?;
        }
        Op::CompareAndSwap { space, ty, d, ref compare, ref value, target } => {
            memory::compare_and_swap(context, space, ty, d, [compare[0], value[0]], target)?;
        }
        Op::Reduce { space, op, ty, ref a, target } => memory::atomic(context, space, op, ty, None, a[0], target)?,

        Op::CopyAsync { bytes, cache: _, prefetch: _, zero_fill: _, ref source_bytes, target, source } => {
            async_copy::copy(context, bytes, source_bytes.first().copied(), target, source)?;
        }
        Op::CopyAsyncCommit {} => context.warp.copies.commit(mask),
        Op::CopyAsyncWait { pending } => async_copy::wait(context, Some(pending)),
        Op::CopyAsyncWaitAll {} => async_copy::wait(context, None),
        Op::BulkStore { bytes, target, source } => async_copy::bulk_store(context, bytes, target, source)?,
        Op::BulkCommit {} => context.warp.copies.bulk_commit(mask),
        Op::BulkWait { pending, read } => async_copy::bulk_wait(context, pending, read),
        Op::FenceProxyAsync {} => context.clocks.fence_proxy(context.warp_index, mask),

        Op::BulkLoad { bytes, target, source, barrier } => {
            tma::bulk_load(context, bytes, target, source, barrier)?;
        }
        Op::TensorLoad { ref map, ref coordinates, ref mask, target, barrier, .. } => {
            tma::tensor_load(context, map[0], coordinates, mask.first().copied(), target, barrier)?;
        }
        Op::TensorStore { ref map, ref coordinates, source, .. } => {
            tma::tensor_store(context, map[0], coordinates, source)?;
        }

        Op::LoadMatrix { count: _, transposed, ty: _, ref d, source } => {
            memory::load_matrix(context, transposed, d, source)?;
        }
        Op::StoreMatrix { count: _, transposed, ty: _, ref a, target } => {
            memory::store_matrix(context, transposed, a, target)?;
        }
        Op::Mma { shape, operand, accumulate, ref d, ref a, ref b, ref c } => {
            debug_assert_eq!(mask, ALL, "the scheduler lets only whole warps through");
            context.counters.mma += 1;
            context.counters.tensor_flops += 2 * 16 * 8 * u64::from(shape.depth());
            let sum = context.scene.tensor_sum;
            mma::mma(&mut context.warp.registers, &Mma { shape, operand, accumulate, d, a, b, c }, sum)?;
        }
        Op::MmaFp8 { left, right, ref d, ref a, ref b, ref c } => {
            context.counters.mma += 1;
            context.counters.tensor_flops += 2 * 16 * 8 * 32;
            let (sum, arch) = (context.scene.tensor_sum, context.scene.program.kernel.arch());
            mma::mma_fp8(&mut context.warp.registers, &MmaFp8 { types: [left, right], d, a, b, c }, sum, arch);
        }
        Op::Wgmma { .. } | Op::WgmmaFp8 { .. } => wgmma::start(context, op)?,
        Op::WgmmaFence {} => {
            wgmma::in_lockstep(context, &[])?;
            context.warp.products.fence();
        }
        Op::WgmmaCommit {} => {
            wgmma::in_lockstep(context, &[])?;
            context.warp.products.commit();
        }
        Op::WgmmaWait { pending } => wgmma::wait(context, pending)?,

        Op::BarrierSync { barrier, threads } => return Ok(Flow::Barrier { barrier, threads, waits: true }),
        Op::BarrierArrive { barrier, threads } => return Ok(Flow::Barrier { barrier, threads, waits: false }),

        Op::MbarrierInit { count, target } => mbarrier::initialise(context, count, target)?,
        Op::MbarrierInvalidate { target } => mbarrier::invalidate(context, target)?,
        Op::MbarrierArrive { space, count, target } => {
            mbarrier::arrive(context, space, Arrival::Count(count), target)?;
        }
        Op::MbarrierArriveExpect { space, bytes, target } => {
            mbarrier::arrive(context, space, Arrival::Expect(bytes), target)?;
        }
        Op::MbarrierExpect { space, bytes, target } => {
            mbarrier::arrive(context, space, Arrival::ExpectOnly(bytes), target)?;
        }
        Op::MbarrierWait { scope, parity, source } => {
            if !mbarrier::wait(context, scope, parity, source)? {
                return Ok(Flow::Wait);
            }
            context.counters.mbarrier_waits += 1;
        }
        Op::MbarrierTest { suspends: _, scope, d, parity, source } => {
            mbarrier::test(context, scope, d, parity, source)?;
        }
        Op::FenceMbarrierInit {} => context.clocks.fence_mbarrier_init(context.warp_index, mask),

        Op::MapShared { d, a, rank } => cluster::map(context, d, a, rank)?,
        Op::ClusterArrive {} => return Ok(Flow::ClusterArrive),
        Op::ClusterWait {} => {
            if !context.cluster_barrier.wait(context.warp_index, context.clocks)? {
                context.warp.waiting.cluster = true;
                return Ok(Flow::Wait);
            }
        }

        // A prefetch is a hint, which may point anywhere. A fence orders accesses of one thread; a barrier makes others
        // see them.
        Op::Prefetch { source: _ } | Op::PrefetchTensorMap { map: _ } | Op::Fence { scope: _ } => {}

        Op::GridDependencyWait {} => {
            let participants = Participants { warp: context.warp_index, lanes: mask, alive: context.warp.alive() };
            context.clocks.grid_dependency_wait(participants);
            context.signals.dependency.waits = true;
        }
        Op::LaunchDependents {} => {
            let accessor = context.clocks.accessor(context.warp_index, context.step);
            let waited = lanes(mask).all(|lane| accessor.lane(lane).has_waited());
            context.signals.dependency.triggers_early |= !waited;
        }

        Op::SetRegisterCount { change, count } => {
            if !wgmma::set_register_count(context, change, count)? {
                return Ok(Flow::Wait);
            }
        }
        Op::Exit {} => {
            async_copy::end(context)?;
            return Ok(Flow::Exit);
        }
    }
    Ok(Flow::Next)
}
