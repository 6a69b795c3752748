//! Continuation: attention over more keys, merged into an output and an LSE that are given.

use std::ffi::c_void;

use api::ContinuePlan;

use crate::operands::{self, Inputs, Outputs, Tensors};
use crate::plan::check_on_cuda;
use crate::problem::Problem;
use crate::registry;
use crate::sized;
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
    let make = || {
        // SAFETY: the caller promises that it is null or a problem of its size, with texts that end.
        let problem = unsafe { sized::read("problem", problem)?.to_api() }?;
        let device = crate::device::open(device_kind, ordinal)?;
        Ok(ContinuePlan::new(&problem, &device)?)
    };
    // SAFETY: the caller promises of `plan` what is asked here.
    unsafe { registry::create(plan, make) }
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
    tensors: *const Tensors,
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
    registry::number_of(plan, ContinuePlan::workspace_bytes)
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

/// Like flashcore_continue_run_host(), with the struct of a launch: addresses of the host's memory, without numbers of bytes.
///
/// # Safety
///
/// As for flashcore_plan_run_tensors(); the outputs are read too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_continue_run_tensors(
    plan: *const ContinueHandle,
    tensors: *const Tensors,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that it is null or tensors of their size.
        let (inputs, outputs) = unsafe { sized::read("tensors", tensors) }?.to_host(plan.problem())?;
        // SAFETY: the caller promises that the memory holds the whole tensors during this call.
        let (inputs, outputs) = unsafe { operands::views(&inputs, &outputs, plan.problem().dtypes()) }?;
        plan.run(inputs, outputs).map_err(Failure::from)
    })
}

/// Destroys a plan that continues. Null is nothing to destroy and fine; one that was destroyed before is an error.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_continue_destroy(plan: *mut ContinueHandle) -> Status {
    registry::destroy(plan)
}
