//! Simulator of the flashcore kernel language on a CPU: values, asynchrony, faults and counters.
//!
//! The simulator is the living definition of the language: an operation of the table means what happens here, and a
//! kernel that runs here without a fault, under several seeds, keeps the rules that hardware does not check.
//!
//! ```
//! use flashcore_ir::{Arch, Builder, types::{F32, U64}};
//! use flashcore_sim::{Argument, GlobalMemory, Launch, Options, launch};
//!
//! // y[i] = 2 * x[i] for one warp
//! let mut k = Builder::new("double", 32);
//! let x = k.parameter::<U64>("x");
//! let y = k.parameter::<U64>("y");
//! let lane = k.lane();
//! let from = k.mad_wide(lane, 4u32, x);
//! let to = k.mad_wide(lane, 4u32, y);
//! let value = k.load_one::<F32>(from);
//! let doubled = k.mul(value, 2.0f32);
//! k.store_one(to, doubled);
//! let kernel = k.finish().verify(Arch::Sm80).expect("it keeps the rules");
//!
//! let input: Vec<u8> = (0..32).flat_map(|i| (i as f32).to_le_bytes()).collect();
//! let mut memory = GlobalMemory::new();
//! let x = memory.allocate("x", &input);
//! let y = memory.allocate_uninitialised("y", 128);
//! let arguments = vec![Argument::U64(x), Argument::U64(y)];
//! let report = launch(&kernel, &Launch { grid: [1, 1, 1], arguments }, &memory, &Options::default())?;
//!
//! assert!(memory.is_written(y));
//! assert_eq!(memory.read(y)[12..16], 6f32.to_le_bytes());
//! assert_eq!(report.counters.global_loads.sectors, 4);
//! # Ok::<(), flashcore_sim::SimError>(())
//! ```
//!
//! # Values
//!
//! A warp executes one operation at a time for its active lanes. Control flow is structured, so the active lanes are
//! known exactly: a choice executes its first branch for the lanes that take it, then its second for the others; lanes
//! leave a loop one by one and wait at its end. An operation that needs all lanes (a shuffle, `mma`, a barrier) faults
//! if one is missing, and a branch that was promised to be uniform faults if lanes disagree.
//!
//! Integer operations and conversions are bit-exact. `add`, `sub`, `mul`, `fma` and `div` of floats are IEEE, rounded to
//! nearest even, with subnormals; a NaN that they return is the canonical one (`0x7fffffff`, or `0x7fff` in 16 bits). The
//! approximate functions are computed in `f64` and rounded once, where hardware may be off by the ULPs that the manual
//! grants. `mma` sums exact products in `f64` and rounds once; hardware keeps fewer bits.
//!
//! # Memory
//!
//! Global memory is a set of named buffers with nothing in between; shared memory begins at address 1024. Every access
//! is checked for alignment, bounds, a value (bytes that neither the host nor the kernel wrote cannot be read) and
//! races. The memory model, and how races are found, stand above the code in `race.rs`. Clusters run in parallel and
//! are never ordered.
//!
//! # Asynchrony
//!
//! A copy (`cp.async`, a TMA store) takes effect at the last moment: when the thread that started it waits for it.
//! Until then its target, and the source of a TMA store, must not be touched by anyone. After the wait the bytes count
//! as written by that thread, so others need a barrier as well. A TMA store sees a write of the generic proxy only if
//! the writing thread executed a proxy fence before the barrier that orders the two.
//!
//! A TMA load arrives when the seed decides, between its start and the time when no warp can proceed. Its bytes belong
//! to the phase of the `mbarrier` in which it arrives: threads that have not seen that phase complete, nor synchronised
//! with one that has, must not touch them. A `wgmma` uses its registers and its operands in shared memory until the
//! wait that covers it; all four warps execute the same `wgmma` operations, and a `wgmma.fence` stands between other
//! uses of a register and that of a `wgmma`.
//!
//! # Launches
//!
//! The launches of a [`Stream`] run one after the other, and may overlap as far as programmatic dependent launch (PDL) lets
//! them: an access that meets one of a launch which is not known to have ended is a fault. The model stands above the code
//! in `stream.rs`. A [`launch`] alone overlaps with nothing.
//!
//! # Time
//!
//! The warps of a CTA, and of all CTAs of a cluster, take turns in an order that [`Options::seed`] decides. A kernel
//! without faults gives the same result under every seed, except for what atomics return.
//!
//! # Errors
//!
//! A [`Fault`] is a mistake of the kernel, with its location; a [`LaunchError`] one of the caller; an [`InternalError`]
//! one of ours.

mod clocks;
mod counters;
mod error;
mod execute;
mod fault;
mod fp8;
mod launch;
mod memory;
mod numeric;
mod placement;
mod program;
mod race;
mod random;
mod schedule;
mod state;
mod stream;
mod tensor_sum;

pub use counters::{Counters, GlobalTraffic, SharedTraffic};
pub use error::{InternalError, LaunchError, SimError};
pub use fault::{
    AccessKind, BarrierProblem, ClusterBarrierProblem, CopySize, Fault, FaultKind, InFlight, LaunchAccess, Location,
    MbarrierProblem, MbarrierState, Nearest, TooEarly, WaitingWarp, WaitsFor, WarpgroupProblem,
};
pub use flashcore_ir::Argument;
pub use launch::{Launch, Options, Report, launch};
pub use memory::global::GlobalMemory;
pub use stream::Stream;
pub use tensor_sum::{Factor, TensorSum};
