//! Statuses that functions return, and their messages.

use std::cell::Cell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use api::cuda::CudaError;
use api::{Error, KernelReason, Reason, Unsupported};

/// Success, or the kind of failure; flashcore_last_error() has the message.
pub type Status = i32;

/// Everything went well.
pub const FLASHCORE_OK: Status = 0;
/// An argument is wrong: null, misaligned, too short, out of range. Nothing was done.
pub const FLASHCORE_INVALID_ARGUMENT: Status = 1;
/// The arguments are right, and the device does not take the problem. Nothing was done.
pub const FLASHCORE_UNSUPPORTED: Status = 2;
/// There is no such device: no driver, no GPU, no GPU of this number, a GPU that is too old, or one that was opened before
/// a fork: CUDA does not survive it. The CPU works in forked processes.
pub const FLASHCORE_NO_DEVICE: Status = 3;
/// The driver or the GPU failed.
pub const FLASHCORE_CUDA_ERROR: Status = 4;
/// There is not enough memory on the GPU.
pub const FLASHCORE_OUT_OF_MEMORY: Status = 5;
/// The kernel, as this driver compiles it, gave a wrong result on a small problem and is not used.
pub const FLASHCORE_SELF_CHECK_FAILED: Status = 6;
/// The plan was destroyed before, or never created.
pub const FLASHCORE_INVALID_PLAN: Status = 7;
/// A bug of flashcore.
pub const FLASHCORE_INTERNAL: Status = 8;

/// A failure on its way to C.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self { status: FLASHCORE_INVALID_ARGUMENT, message: message.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::Unsupported(reasons) => reasons.iter().map(status_of_reason).max().unwrap_or(FLASHCORE_UNSUPPORTED),
            Error::Cuda(error) => status_of_cuda(error),
            Error::Forked(_) => FLASHCORE_NO_DEVICE,
            Error::NotOnCuda { .. } => FLASHCORE_UNSUPPORTED,
            _ => FLASHCORE_INVALID_ARGUMENT,
        };
        Self { status, message: error.to_string() }
    }
}

impl From<Unsupported> for Failure {
    fn from(unsupported: Unsupported) -> Self {
        Error::Unsupported(unsupported).into()
    }
}

fn status_of_reason(reason: &Reason) -> Status {
    match reason {
        Reason::Problem(_) | Reason::Kernel(KernelReason::Config { .. }) => FLASHCORE_INVALID_ARGUMENT,
        Reason::Cuda(error) => status_of_cuda(error),
        Reason::Forked(_) => FLASHCORE_NO_DEVICE,
        Reason::SelfCheck { .. } => FLASHCORE_SELF_CHECK_FAILED,
        _ => FLASHCORE_UNSUPPORTED,
    }
}

fn status_of_cuda(error: &CudaError) -> Status {
    match error {
        CudaError::NoDriver { .. }
        | CudaError::DriverTooOld { .. }
        | CudaError::MissingSymbol { .. }
        | CudaError::NoDevice
        | CudaError::UnknownDevice { .. }
        | CudaError::DeviceTooOld { .. } => FLASHCORE_NO_DEVICE,
        CudaError::OutOfMemory { .. } => FLASHCORE_OUT_OF_MEMORY,
        _ => FLASHCORE_CUDA_ERROR,
    }
}

/// Bytes of a thread's message, with the terminating zero.
const MESSAGE_BYTES: usize = 4096;
/// The end of a message that was cut.
const CUT: &str = "...";

thread_local! {
    /// The message of the last call, at one address for the whole life of the thread: C code keeps the pointer. There is
    /// nothing to drop, so it is readable while a thread ends.
    static LAST_ERROR: [Cell<u8>; MESSAGE_BYTES] = const { [const { Cell::new(0) }; MESSAGE_BYTES] };
}

/// A text for C. It cannot have a zero inside, and none of ours has.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

fn remember(message: &str) {
    const MOST: usize = MESSAGE_BYTES - 1;
    let text = message.replace('\0', "\u{fffd}");
    let (kept, end) = if text.len() <= MOST {
        (&text[..], "")
    } else {
        // As many whole characters as leave room for the end.
        let begins = text.char_indices().map(|(place, _)| place).take_while(|place| *place <= MOST - CUT.len());
        (&text[..begins.last().unwrap_or(0)], CUT)
    };
    LAST_ERROR.with(|last| {
        for (cell, byte) in last.iter().zip(kept.bytes().chain(end.bytes()).chain([0])) {
            cell.set(byte);
        }
    });
}

/// Runs the body of a function of the ABI: a failure is remembered and becomes its status, a panic becomes a failure.
pub(crate) fn guarded(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let message = format!("a bug of flashcore, please report it: {words}");
        Err(Failure { status: FLASHCORE_INTERNAL, message })
    });
    match result {
        Ok(()) => {
            LAST_ERROR.with(|last| last[0].set(0));
            FLASHCORE_OK
        }
        Err(Failure { status, message }) => {
            remember(&message);
            status
        }
    }
}

/// Message of the last call on this thread that returned a status; empty if it succeeded. Never null.
///
/// The pointer stays the same as long as the thread lives, and the text is that of the latest call: a call in the arguments
/// of the same printf() is safe. Copy a text to keep it. Other threads must not read it. A message has at most 4095 bytes of
/// UTF-8; a longer one is cut between two characters and ends with "...".
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.as_ptr().cast())
}

/// The name of a status, "FLASHCORE_OK" for 0. Never null, valid forever.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_status_name(status: Status) -> *const c_char {
    let name = match status {
        FLASHCORE_OK => c"FLASHCORE_OK",
        FLASHCORE_INVALID_ARGUMENT => c"FLASHCORE_INVALID_ARGUMENT",
        FLASHCORE_UNSUPPORTED => c"FLASHCORE_UNSUPPORTED",
        FLASHCORE_NO_DEVICE => c"FLASHCORE_NO_DEVICE",
        FLASHCORE_CUDA_ERROR => c"FLASHCORE_CUDA_ERROR",
        FLASHCORE_OUT_OF_MEMORY => c"FLASHCORE_OUT_OF_MEMORY",
        FLASHCORE_SELF_CHECK_FAILED => c"FLASHCORE_SELF_CHECK_FAILED",
        FLASHCORE_INVALID_PLAN => c"FLASHCORE_INVALID_PLAN",
        FLASHCORE_INTERNAL => c"FLASHCORE_INTERNAL",
        _ => c"an unknown status",
    };
    name.as_ptr()
}
