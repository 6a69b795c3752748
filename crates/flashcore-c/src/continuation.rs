//! Continuation: attention over more keys, merged into an output and an LSE that are given.

use std::ffi::c_void;
use std::ptr;

use api::ContinuePlan;

use crate::operands::{self, DeviceTensors, Inputs, Outputs};
use crate::plan::check_on_cuda;
use crate::problem::Problem;
use crate::registry;
use crate::sized::{self, check_pointer};
use crate::status::{Failure, Status, guarded};

/// Attention over more keys that continues from an output and an LSE, ready to be run any number of times, by any number of
/// threads at once.
pub struct ContinueHandle {
    _opaque: (),
}

/// Makes a plan for attention over more keys, merged into an output and an LSE that are given: those of attention over other
/// keys, or the start, an output of 0 and an LSE of minus infinity. The problem is that of the new keys; its lse must be 1,
/// and its lse_without_sink 0 with sinks. A sink counts each time, so it belongs to one of the plans.
///
/// # Safety
///
/// As for flashcore_plan_create().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_continue_create(
    problem: *const Problem,
    device_kind: i32,
    ordinal: i32,
    plan: *mut *mut ContinueHandle,
) -> Status {
    guarded(|| {
        check_pointer("plan", plan)?;
        // SAFETY: not null and aligned, and the caller promises that it can be written.
        unsafe { plan.write(ptr::null_mut()) };
        // SAFETY: the caller promises that it is null or a problem of its size.
        let problem = unsafe { sized::read("problem", problem) }?.to_api()?;
        let device = crate::device::open(device_kind, ordinal)?;
        let handle = registry::insert(ContinuePlan::new(&problem, &device)?);
        // SAFETY: as for the write above.
        unsafe { plan.write(handle) };
        Ok(())
    })
}

/// Launches attention and the merge on a CUDA stream and returns before they have finished. tensors.output and tensors.lse
/// are read and replaced; rows that no sequence has stay as they are. Otherwise like flashcore_plan_launch_tensors(), with
/// the workspace of flashcore_continue_workspace_bytes().
///
/// # Safety
///
/// As for flashcore_plan_launch_tensors().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_continue_launch(
    plan: *const ContinueHandle,
    stream: *mut c_void,
    tensors: *const DeviceTensors,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that it is null or tensors of their size.
        let tensors = unsafe { sized::read("tensors", tensors) }?.to_api()?;
        check_on_cuda(plan.device(), "flashcore_continue_launch", "flashcore_continue_run_host")?;
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { plan.launch(stream, tensors) }.map_err(Failure::from)
    })
}

/// Bytes of device memory that a launch uses: for the output and LSE of the new keys, and for what attention needs; 0 on the
/// CPU, and if it is no plan, which flashcore_last_error() then says.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_continue_workspace_bytes(plan: *const ContinueHandle) -> u64 {
    let mut bytes = 0;
    guarded(|| {
        bytes = registry::find(plan)?.workspace_bytes() as u64;
        Ok(())
    });
    bytes
}

/// Attends tensors in the host's memory and merges the result into outputs, which are read and replaced. On a GPU this copies
/// everything there and back: convenient, not fast.
///
/// # Safety
///
/// As for flashcore_plan_run_host(); the outputs are read too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_continue_run_host(
    plan: *const ContinueHandle,
    inputs: *const Inputs,
    outputs: *const Outputs,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (inputs, outputs) = unsafe { (sized::read("inputs", inputs)?, sized::read("outputs", outputs)?) };
        // SAFETY: the caller promises that the memory can be used as the structs say during this call.
        let (inputs, outputs) = unsafe { operands::views(&inputs, &outputs, plan.problem().dtypes()) }?;
        plan.run(inputs, outputs).map_err(Failure::from)
    })
}

/// Destroys a plan that continues. Null is nothing to destroy and fine; one that was destroyed before is an error.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_continue_destroy(plan: *mut ContinueHandle) -> Status {
    guarded(|| if plan.is_null() { Ok(()) } else { registry::remove(plan) })
}
