//! The short way of a call from Python: from tensors to a launch without a step of the interpreter in between.
//!
//! `flashcore_python_operation` makes a builtin function of Python. A call of it reads sizes, strides, types and addresses
//! of its tensors, finds the launch that belongs to them in a table, allocates the outputs, writes the addresses into the
//! tensors of the C ABI, and calls `libflashcore`. What the table does not have goes to a Python function (`miss`), which
//! does everything with its own checks, and returns the launch for the next call of the kind. What is no plain eager call,
//! tensor subclasses, fake tensors, tracing, gradients, goes to another one (`dispatch`).
//!
//! One file serves every Python from 3.9 on and every torch. It links to neither: functions of the interpreter come as
//! addresses by name ([`flashcore_python_symbols`]), objects are touched by those functions only, so that no layout of an
//! object matters, and tensors are read by DLPack's C exchange table where torch has it, else by attributes. Functions of
//! `libflashcore` are addresses too, and two versions of it can live beside each other.
//!
//! `flashcore_python_kernel` registers kernels of torch's operators through libtorch's plain C interface: the same table and
//! the same launches, for calls that come from the dispatcher, without the interpreter's lock.
//!
//! Nothing but these kernels is global: an operation belongs to the interpreter that made it. A lock guards the table, which
//! is only tried, never waited for: a call that finds it taken, since before a fork, goes the Python way.

#![expect(unsafe_code, reason = "objects of Python are raw pointers")]
#![expect(clippy::doc_markdown, reason = "names of Python and of DLPack")]

mod functions;
mod interpreter;
mod kernel;
mod key;
mod launch;
mod operation;
mod table;
mod tensor;
mod torch;

pub use kernel::{
    flashcore_python_kernel, flashcore_python_kernel_clear, flashcore_python_kernel_count,
    flashcore_python_torch_symbols,
};
pub use operation::{flashcore_python_clear, flashcore_python_count, flashcore_python_operation};

use std::ffi::c_char;

/// Names of the functions of Python whose addresses [`flashcore_python_operation`] takes, in order, one a line.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_python_symbols() -> *const c_char {
    interpreter::Interpreter::SYMBOLS.as_ptr().cast()
}
