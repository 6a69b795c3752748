//! Plans: made, run, launched, described, destroyed.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use api::{Config, Device, Error, Operation, Plan, PlanOptions};

use crate::call;
use crate::problem::{self, ProblemBase};
use crate::registry::{self, Entry};
use crate::status::{FLASHCORE_UNSUPPORTED, Failure, Status, c_text, guarded};
use crate::tensor::{Tensor, Tensors};

/// A problem on a device, ready to be run any number of times, by any number of threads at once.
pub struct PlanHandle {
    _opaque: (),
}

/// Makes a plan for a problem of any operation on a device: `&problem.base` of its struct. On a GPU this compiles the
/// kernels, or finds them in the cache.
///
/// `config` names a GPU kernel config of attention: "ampere" or "scalar" for the default of a kernel, one of
/// flashcore_configs(), or any other of that form; null is the best that is known.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to the base of a problem of its operation. `config` must be null or
/// point to a text with a terminating zero. `plan` must be null, which is an error, or point to a pointer that can be
/// written: it becomes the plan, or null if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_create(
    problem: *const ProblemBase,
    device_kind: i32,
    ordinal: i32,
    config: *const c_char,
    plan: *mut *mut PlanHandle,
) -> Status {
    let make = || {
        // SAFETY: the caller promises that it is null or the base of a problem, with texts that end.
        let operation = unsafe { problem::read(problem) }?;
        let config = if config.is_null() {
            None
        } else {
            // SAFETY: not null, and the caller promises a terminating zero.
            let name = unsafe { CStr::from_ptr(config) };
            Some(name.to_string_lossy().parse::<Config>().map_err(Error::from)?)
        };
        if let (Some(config), Operation::Append(_) | Operation::Merge(_)) = (config, &operation) {
            let message = format!("config is {config}; it must be null, for the operation has one kernel");
            return Err(Failure::argument(message));
        }
        let device = crate::device::open(device_kind, ordinal)?;
        let plan = Plan::with_options(operation, &device, PlanOptions::default().with_config(config))?;
        let description = c_text(&plan.report().to_string());
        Ok(Entry { plan, description })
    };
    // SAFETY: the caller promises of `plan` what is asked here.
    unsafe { registry::create(plan, make) }
}

/// Computes tensors in the host's memory, and returns when the outputs are there. On a GPU this copies everything there and
/// back: convenient, not fast.
///
/// Everything is checked first: types, sizes, lengths, slots, pages, and that nothing that is written overlaps anything
/// else; on an error nothing is written. Two overlaps are allowed: the query output of an append may be its query, and the
/// value cache may lie among the rows of the key cache.
///
/// # Safety
///
/// `tensors` must be null, which is an error unless `count` is 0, or point to `count` tensors; what they point to must be
/// readable, and writable where the operand is written, for as many bytes as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_run(plan: *const PlanHandle, tensors: *const Tensor, count: u64) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        // SAFETY: the caller promises as many tensors.
        let tensors = unsafe { Tensors::read(tensors, count) }?;
        // SAFETY: the caller promises that the memory can be used as the tensors say during this call.
        unsafe { call::run(&entry.plan, &tensors) }
    })
}

/// Puts the kernels of a plan for a GPU on a CUDA stream and returns before they have finished.
///
/// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
///
/// A plan may be launched by any threads on any streams at once, and a launch can be captured into a CUDA graph. Where
/// flashcore_plan_workspace_bytes() is not 0 and there is no FLASHCORE_WORKSPACE, the launch takes that of the stream, which
/// all plans share: it is allocated when the stream has none as large, in the place of a smaller one, and from the 33rd
/// stream on in the place of another stream's, which waits for the device. A captured launch brings its workspace, or is an
/// error: a graph can be executed on any stream, beside anything. Nothing else is allocated, and nothing is waited for.
///
/// Types and sizes are checked. Lengths, offsets, pages, slots and positions are read when the kernels run, and clamped or
/// skipped where they are out of range; see flashcore_check().
///
/// # Safety
///
/// `tensors` must be null, which is an error unless `count` is 0, or point to `count` tensors. Until the launch has finished,
/// and whenever a graph with it is executed, the device memory that they name must hold as many bytes as they say, nobody
/// may write what is read, and nobody may use what is written or the workspace. Of the executable graphs made from one
/// captured launch, one may be executed at a time. The plan must not be destroyed before the stream has finished, or before
/// a graph with the launch is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_launch(
    plan: *const PlanHandle,
    stream: *mut c_void,
    tensors: *const Tensor,
    count: u64,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        check_on_cuda(entry.plan.device(), "flashcore_launch")?;
        // SAFETY: the caller promises as many tensors.
        let tensors = unsafe { Tensors::read(tensors, count) }?;
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { call::launch(&entry.plan, stream, &tensors) }
    })
}

/// Reads offsets, lengths, page tables, slots and positions of a launch back from the GPU and checks them, to explain wrong
/// results: a launch clamps them, and flashcore_run() checks them. FLASHCORE_INVALID_ARGUMENT if anything is wrong, which
/// flashcore_last_error() explains.
///
/// They are read in the order of the stream, and this waits for them: a debug aid. It is refused while the stream captures a
/// graph. With FLASHCORE_CHECK_LENGTHS=1 in the environment every launch does it first.
///
/// # Safety
///
/// As for flashcore_launch().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_check(
    plan: *const PlanHandle,
    stream: *mut c_void,
    tensors: *const Tensor,
    count: u64,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        check_on_cuda(entry.plan.device(), "flashcore_check")?;
        // SAFETY: the caller promises as many tensors.
        let tensors = unsafe { Tensors::read(tensors, count) }?;
        // SAFETY: what the caller promises of stream and memory is what the check asks for.
        unsafe { call::check(&entry.plan, stream, &tensors) }
    })
}

/// Bytes of device memory that the kernels of a launch use among themselves; 0 on the CPU, and if it is no plan, which
/// flashcore_last_error() then says.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_plan_workspace_bytes(plan: *const PlanHandle) -> u64 {
    let mut bytes = 0;
    guarded(|| {
        bytes = registry::find(plan)?.plan.workspace_bytes() as u64;
        Ok(())
    });
    bytes
}

fn check_on_cuda(device: &Device, call: &str) -> Result<(), Failure> {
    if device.is_cuda() {
        return Ok(());
    }
    let message = format!(
        "{call} is for tensors on a GPU, and this plan is on {device}; use flashcore_run, or plan for FLASHCORE_DEVICE_CUDA"
    );
    Err(Failure { status: FLASHCORE_UNSUPPORTED, message })
}

/// Describes a plan: problem, device, kernel, where the kernel came from and how long that took. Null if it is no plan.
/// The text is valid until the plan is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_plan_describe(plan: *const PlanHandle) -> *const c_char {
    let mut description = ptr::null();
    guarded(|| {
        description = registry::find(plan)?.description.as_ptr();
        Ok(())
    });
    description
}

/// Destroys a plan. Null is nothing to destroy and fine; a plan that was destroyed before is an error.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_plan_destroy(plan: *mut PlanHandle) -> Status {
    guarded(|| if plan.is_null() { Ok(()) } else { registry::remove(plan) })
}
