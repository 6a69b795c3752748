//! The ways a launch can fail: a fault of the kernel, a mistake of the caller, a bug of the simulator.

use flashcore_ir::{InvalidTensorMap, ParameterType};

use crate::fault::{Fault, FaultKind};

/// The reason why a launch did not complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// The kernel broke a rule.
    #[error(transparent)]
    Fault(Box<Fault>),
    /// The launch does not fit the kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The simulator has a bug.
    #[error(transparent)]
    Internal(#[from] InternalError),
}

impl SimError {
    /// The fault of the kernel, if the error is one.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Fault(fault) => Some(fault),
            Self::Launch(_) | Self::Internal(_) => None,
        }
    }
}

/// A launch that does not fit the kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of arguments is not that of the parameters.
    #[error("kernel `{kernel}` has {expected} parameters, but the launch gives {actual} arguments")]
    ArgumentCount {
        /// The kernel.
        kernel: String,
        /// Parameters of the kernel.
        expected: usize,
        /// Arguments given.
        actual: usize,
    },
    /// An argument does not have the type of its parameter.
    #[error("argument {index} is for parameter `{name}` of type {expected}, but the launch gives {actual}")]
    ArgumentType {
        /// The index of the argument.
        index: usize,
        /// The name of the parameter.
        name: String,
        /// The type of the parameter.
        expected: ParameterType,
        /// The type given.
        actual: ParameterType,
    },
    /// A tensor map that hardware cannot encode.
    #[error("argument {index} for parameter `{name}` is not a tensor map that hardware can encode: {reason}")]
    TensorMap {
        /// The index of the argument.
        index: usize,
        /// The name of the parameter.
        name: String,
        /// The reason.
        reason: InvalidTensorMap,
    },
    /// A grid without CTAs.
    #[error("a grid of {} × {} × {} CTAs is empty; each dimension must be at least 1", grid[0], grid[1], grid[2])]
    EmptyGrid {
        /// The grid given.
        grid: [u32; 3],
    },
    /// A grid beyond the limits of hardware or simulator.
    #[error(
        "a grid of {} × {} × {} CTAs is too large; x may be 2147483647, y and z 65535, and the simulator runs at most {most} CTAs",
        grid[0], grid[1], grid[2]
    )]
    GridTooLarge {
        /// The grid given.
        grid: [u32; 3],
        /// The most CTAs in all.
        most: u64,
    },
    /// A grid that is not a whole number of clusters.
    #[error(
        "a grid of {} × {} × {} CTAs is not a whole number of clusters of {} × {} × {}; make each dimension a multiple",
        grid[0], grid[1], grid[2], cluster[0], cluster[1], cluster[2]
    )]
    NotWholeClusters {
        /// The grid given.
        grid: [u32; 3],
        /// CTAs of a cluster.
        cluster: [u32; 3],
    },
    /// Another launch on the same memory: its writes could not be told from races.
    #[error("another launch is running on this memory; wait for it, or give each launch its own `GlobalMemory`")]
    MemoryInUse,
    /// More steps than the simulator can number.
    #[error("the kernel has {steps} steps; the simulator runs at most {most}: keep loops instead of unrolling them")]
    TooLong {
        /// The steps of the kernel.
        steps: usize,
        /// The most.
        most: usize,
    },
}

/// A bug of the simulator, or of the verifier that let the kernel pass.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bug of the simulator, please report it: {message}")]
pub struct InternalError {
    /// The unexpected condition.
    pub message: String,
}

/// The reason why a step did not succeed.
#[derive(Debug)]
pub(crate) enum Stop {
    Fault(Box<UnlocatedFault>),
    Internal(InternalError),
}

/// A fault whose location is the step that is being executed.
#[derive(Debug)]
pub(crate) struct UnlocatedFault {
    pub(crate) kind: FaultKind,
    pub(crate) lane: Option<u32>,
    pub(crate) address: Option<u64>,
}

impl Stop {
    /// A fault of the warp as a whole.
    pub(crate) fn warp(kind: FaultKind) -> Self {
        Self::Fault(Box::new(UnlocatedFault { kind, lane: None, address: None }))
    }

    /// A fault of a lane.
    pub(crate) fn lane(kind: FaultKind, lane: usize) -> Self {
        Self::Fault(Box::new(UnlocatedFault { kind, lane: Some(lane as u32), address: None }))
    }

    /// A fault of a lane at an address.
    pub(crate) fn address(kind: FaultKind, lane: usize, address: u64) -> Self {
        Self::Fault(Box::new(UnlocatedFault { kind, lane: Some(lane as u32), address: Some(address) }))
    }

    /// This fault as one of the warp as a whole.
    pub(crate) fn by_warp(self) -> Self {
        match self {
            Self::Fault(fault) => Self::Fault(Box::new(UnlocatedFault { lane: None, ..*fault })),
            Self::Internal(error) => Self::Internal(error),
        }
    }

    /// An operation in a form that the verifier should have refused.
    pub(crate) fn no_such_form(operation: &str, form: impl core::fmt::Display) -> Self {
        Self::Internal(InternalError { message: format!("{operation} has no form for {form}") })
    }
}
