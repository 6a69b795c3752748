//! Plans: made, run, launched, described, destroyed.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use api::{Config, DeviceTensors, Error, Plan, PlanOptions};

use crate::problem::Problem;
use crate::registry::{self, Entry};
use crate::status::{Failure, Status, c_text, guarded};
use crate::tensors::{self, Inputs, Outputs, check_pointer};

/// A problem on a device, ready to be run any number of times, from any thread.
pub struct PlanHandle {
    _opaque: (),
}

/// Makes a plan for a problem on a device. On a GPU this compiles the kernel, or finds it in the cache.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_problem_t. `plan` must be null, which is an error,
/// or point to a pointer that can be written: it becomes the plan, or null if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_create(
    problem: *const Problem,
    device_kind: i32,
    ordinal: i32,
    plan: *mut *mut PlanHandle,
) -> Status {
    // SAFETY: the contract is the same; a null config is the default one.
    unsafe { flashcore_plan_create_with_config(problem, device_kind, ordinal, ptr::null(), plan) }
}

/// Like flashcore_plan_create(), with a GPU kernel config by name: "ampere" or "scalar" for
/// the default of a kernel, one of flashcore_configs(), or any other of that form.
///
/// # Safety
///
/// As for flashcore_plan_create(). `config` must be null, for the default, or point to a text with a terminating zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_create_with_config(
    problem: *const Problem,
    device_kind: i32,
    ordinal: i32,
    config: *const c_char,
    plan: *mut *mut PlanHandle,
) -> Status {
    guarded(|| {
        check_pointer("plan", plan)?;
        // SAFETY: not null and aligned, and the caller promises that it can be written.
        unsafe { plan.write(ptr::null_mut()) };
        check_pointer("problem", problem)?;
        // SAFETY: not null and aligned, and the caller promises that it is a problem; every bit pattern is one.
        let problem = unsafe { problem.read() }.to_api()?;
        let config = if config.is_null() {
            None
        } else {
            // SAFETY: not null, and the caller promises a terminating zero.
            let name = unsafe { CStr::from_ptr(config) };
            Some(name.to_string_lossy().parse::<Config>().map_err(Error::from)?)
        };
        let device = crate::device::open(device_kind, ordinal)?;
        let options = PlanOptions::default().with_config(config);
        let made = Plan::new(&problem, &device, options)?;
        let description = c_text(&made.report().to_string());
        let handle = registry::insert(Entry { plan: made, description });
        // SAFETY: as for the write above.
        unsafe { plan.write(handle) };
        Ok(())
    })
}

/// Puts the kernel of a plan for a GPU on a CUDA stream and returns before it has finished.
///
/// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream. The others are
/// addresses of device memory: 16-byte aligned, the log-sum-exp 4-byte aligned, null if the problem does not want it.
/// Allocates no device memory and waits for nothing, so it can be captured into a CUDA graph.
///
/// # Safety
///
/// Until the launch has finished, and whenever a graph with it is executed, the memory must hold the whole tensors, and
/// nobody may write the inputs or use the outputs; the plan must not be destroyed before a graph with it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_launch(
    plan: *const PlanHandle,
    stream: *mut c_void,
    query: *const c_void,
    key: *const c_void,
    value: *const c_void,
    output: *mut c_void,
    log_sum_exp: *mut f32,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        let mut tensors =
            DeviceTensors::new(query.addr() as u64, key.addr() as u64, value.addr() as u64, output.addr() as u64);
        tensors.log_sum_exp = log_sum_exp.addr() as u64;
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { entry.plan.launch(stream, tensors) }.map_err(Failure::from)
    })
}

/// Computes attention of tensors in the host's memory, and returns when the outputs are there. On a GPU this copies
/// everything there and back: convenient, not fast.
///
/// # Safety
///
/// `inputs` and `outputs` must be null, which is an error, or point to their structs; what those point to must be
/// readable, and writable where it is an output, for as many bytes as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_run_host(
    plan: *const PlanHandle,
    inputs: *const Inputs,
    outputs: *const Outputs,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        check_pointer("inputs", inputs)?;
        check_pointer("outputs", outputs)?;
        // SAFETY: not null and aligned, and the caller promises that they are these structs; any bits are.
        let (inputs, outputs) = unsafe { (inputs.read(), outputs.read()) };
        // SAFETY: the caller promises that the memory can be used as the structs say during this call.
        let (inputs, outputs) = unsafe { tensors::views(&inputs, &outputs, entry.plan.problem().dtype) }?;
        entry.plan.run(inputs, outputs).map_err(Failure::from)
    })
}

/// What a plan is made of, in words: problem, device, kernel, where it came from and how long that took. Null if it is no
/// plan. The text is valid until the plan is destroyed.
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
