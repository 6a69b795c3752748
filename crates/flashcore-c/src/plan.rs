//! Plans: made, run, launched, described, destroyed.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use api::{Config, Device, Error, Operand, Plan, PlanOptions, Problem as ApiProblem};

use crate::operands::{self, Inputs, Outputs, Tensors};
use crate::problem::Problem;
use crate::registry::{self, Entry};
use crate::sized;
use crate::status::{FLASHCORE_UNSUPPORTED, Failure, Status, c_text, guarded};

/// A problem on a device, ready to be run any number of times, by any number of threads at once.
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

/// Like flashcore_plan_create(), with a GPU kernel config by name: "ampere" or "scalar" for the default of a kernel, one of
/// flashcore_configs(), or any other of that form.
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
    let make = || {
        // SAFETY: the caller promises that it is null or a problem of its size, with texts that end.
        let problem = unsafe { sized::read("problem", problem)?.to_api() }?;
        let config = if config.is_null() {
            None
        } else {
            // SAFETY: not null, and the caller promises a terminating zero.
            let name = unsafe { CStr::from_ptr(config) };
            Some(name.to_string_lossy().parse::<Config>().map_err(Error::from)?)
        };
        let device = crate::device::open(device_kind, ordinal)?;
        let options = PlanOptions::default().with_config(config);
        let made = Plan::with_options(&problem, &device, options)?;
        let description = c_text(&made.report().to_string());
        Ok(Entry { plan: made, description })
    };
    // SAFETY: the caller promises of `plan` what is asked here.
    unsafe { registry::create(plan, make) }
}

/// Launches a plan for a GPU on a CUDA stream and returns before it has finished: flashcore_plan_launch_tensors() for
/// problems that have no operands but these. Others are refused.
///
/// # Safety
///
/// As for flashcore_plan_launch_tensors().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_launch(
    plan: *const PlanHandle,
    stream: *mut c_void,
    query: *const c_void,
    key: *const c_void,
    value: *const c_void,
    output: *mut c_void,
    lse: *mut f32,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        check_on_cuda(entry.plan.device(), "flashcore_plan_launch", "flashcore_plan_run_host")?;
        check_simple(entry.plan.problem())?;
        let tensors = Tensors { query, key, value, output, lse, ..sized::zeroed() };
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { entry.plan.launch(stream, tensors.to_api()?) }.map_err(Failure::from)
    })
}

/// Launches a plan for a GPU on a CUDA stream and returns before it has finished, with every operand that a problem can
/// have.
///
/// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
///
/// A plan may be launched by any threads on any streams at once, and a launch can be captured into a CUDA graph. Where
/// flashcore_plan_workspace_bytes() is not 0 and the launch brings no workspace, it takes that of the stream, which all plans
/// share: it is allocated when the stream has none as large, in the place of a smaller one, and from the 33rd stream on in
/// the place of another stream's, which waits for the device. A captured launch brings its workspace, or is an error: a graph
/// can be executed on any stream, beside anything.
/// Nothing else is allocated, and nothing else is waited for.
///
/// # Safety
///
/// `tensors` must be null, which is an error, or point to a flashcore_tensors_t. Until the launch has finished, and
/// whenever a graph with it is executed, the memory that it names must hold the whole tensors, as far as the problem's
/// strides reach, and nobody may write the inputs or use the outputs or a workspace that the launch brings. Of the
/// executable graphs made from one captured launch, one may be executed at a time. The plan must not be destroyed before
/// the stream has finished, or before a graph with the launch is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_launch_tensors(
    plan: *const PlanHandle,
    stream: *mut c_void,
    tensors: *const Tensors,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        // SAFETY: the caller promises that it is null or tensors of their size.
        let tensors = unsafe { sized::read("tensors", tensors) }?.to_api()?;
        check_on_cuda(entry.plan.device(), "flashcore_plan_launch_tensors", "flashcore_plan_run_host")?;
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { entry.plan.launch(stream, tensors) }.map_err(Failure::from)
    })
}

/// Reads offsets, lengths and page tables of a launch back from the GPU and checks them, to explain wrong results: a launch
/// clamps them, and flashcore_plan_run_host() checks them. FLASHCORE_INVALID_ARGUMENT if anything is wrong, which
/// flashcore_last_error() explains.
///
/// They are read in the order of the stream, and this waits for them: a debug aid. It is refused while the stream captures a
/// graph. With FLASHCORE_CHECK_LENGTHS=1 in the environment every launch does it first.
///
/// # Safety
///
/// As for flashcore_plan_launch_tensors().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_check_lengths(
    plan: *const PlanHandle,
    stream: *mut c_void,
    tensors: *const Tensors,
) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        // SAFETY: the caller promises that it is null or tensors of their size.
        let tensors = unsafe { sized::read("tensors", tensors) }?.to_api()?;
        check_on_cuda(entry.plan.device(), "flashcore_plan_check_lengths", "flashcore_plan_run_host")?;
        // SAFETY: what the caller promises of stream and memory is what the check asks for.
        unsafe { entry.plan.check_lengths(stream, tensors) }.map_err(Failure::from)
    })
}

/// Bytes of device memory that the kernels of a launch use among themselves, for split-KV; 0 without it, on the CPU, and if
/// it is no plan, which flashcore_last_error() then says.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_plan_workspace_bytes(plan: *const PlanHandle) -> u64 {
    registry::number_of(plan, |entry| entry.plan.workspace_bytes())
}

pub(crate) fn check_on_cuda(device: &Device, call: &str, on_host: &str) -> Result<(), Failure> {
    if device.is_cuda() {
        return Ok(());
    }
    let message = format!(
        "{call} is for tensors on a GPU, and this plan is on {device}; use {on_host}, or plan for FLASHCORE_DEVICE_CUDA"
    );
    Err(Failure { status: FLASHCORE_UNSUPPORTED, message })
}

/// Checks that the problem has no operands but those that flashcore_plan_launch() has parameters for.
pub(crate) fn check_simple(problem: &ApiProblem) -> Result<(), Failure> {
    let others = Operand::optional().filter(|&operand| operand != Operand::Lse && operand.is_present(problem));
    let others: Vec<&str> = others.map(Operand::name).collect();
    if others.is_empty() {
        return Ok(());
    }
    let others = others.join(" and ");
    Err(Failure::argument(format!(
        "the problem has {others}, and flashcore_plan_launch takes no such tensor; use flashcore_plan_launch_tensors"
    )))
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
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (inputs, outputs) = unsafe { (sized::read("inputs", inputs)?, sized::read("outputs", outputs)?) };
        // SAFETY: the caller promises that the memory can be used as the structs say during this call.
        let (inputs, outputs) = unsafe { operands::views(&inputs, &outputs, entry.plan.problem().dtypes()) }?;
        entry.plan.run(inputs, outputs).map_err(Failure::from)
    })
}

/// Like flashcore_plan_run_host(), with the struct of a launch: addresses of the host's memory, without numbers of bytes.
///
/// # Safety
///
/// `tensors` must be null, which is an error, or point to a flashcore_tensors_t. The memory that it names must hold the
/// whole tensors, as far as the problem's strides reach; outputs must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_plan_run_tensors(plan: *const PlanHandle, tensors: *const Tensors) -> Status {
    guarded(|| {
        let entry = registry::find(plan)?;
        let problem = entry.plan.problem();
        // SAFETY: the caller promises that it is null or tensors of their size.
        let (inputs, outputs) = unsafe { sized::read("tensors", tensors) }?.to_host(problem)?;
        // SAFETY: the caller promises that the memory holds the whole tensors during this call.
        let (inputs, outputs) = unsafe { operands::views(&inputs, &outputs, problem.dtypes()) }?;
        entry.plan.run(inputs, outputs).map_err(Failure::from)
    })
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
    registry::destroy(plan)
}
