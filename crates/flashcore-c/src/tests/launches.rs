//! Launches, as far as they go without a GPU: what reaches the launch, and what is refused before it.

use super::*;
use crate::plan::check_simple;

/// Every field has a place of its own in what is launched.
#[test]
fn every_device_tensor_reaches_its_place() {
    let address = ptr::without_provenance_mut::<c_void>;
    let tensors = Tensors {
        query: address(0x10),
        key: address(0x20),
        value: address(0x30),
        output: address(0x40),
        lse: address(0x50).cast(),
        seqused_k: address(0x60).cast(),
        alibi_slopes: address(0x70).cast(),
        sinks: address(0x80).cast(),
        bias: address(0x90).cast(),
        bias_strides: BiasStrides { batch: 1, head: 2, row: 3, key: 4 },
        aux_f32: address(0xA0).cast(),
        aux_i32: address(0xB0).cast(),
        workspace: address(0xC0),
        cu_seqlens_q: address(0xD0).cast(),
        cu_seqlens_k: address(0xE0).cast(),
        seqused_q: address(0xF0).cast(),
        leftpad_k: address(0x100).cast(),
        kv_batch_idx: address(0x110).cast(),
        page_table: address(0x120).cast(),
        ..zeroed()
    };
    let expected = api::DeviceTensors::new(0x10, 0x20, 0x30, 0x40)
        .with_lse(0x50)
        .with_seqused_k(0x60)
        .with_alibi_slopes(0x70)
        .with_sinks(0x80)
        .with_bias(0x90, api::BiasStrides { batch: 1, head: 2, row: 3, key: 4 })
        .with_aux_f32(0xA0)
        .with_aux_i32(0xB0)
        .with_workspace(0xC0)
        .with_cu_seqlens_q(0xD0)
        .with_cu_seqlens_k(0xE0)
        .with_seqused_q(0xF0)
        .with_leftpad_k(0x100)
        .with_kv_batch_idx(0x110)
        .with_page_table(0x120);
    assert_eq!(tensors.to_api(), Ok(expected));
    assert_eq!(zeroed::<Tensors>().to_api(), Ok(api::DeviceTensors::new(0, 0, 0, 0)));
}

/// The launch with few parameters names the one that has all of them.
#[test]
fn a_simple_launch_refuses_what_it_has_no_parameter_for() {
    let words = |change: fn(&mut Problem)| {
        let mut problem = problem(1, 2, 4, 8, FLASHCORE_DTYPE_F16);
        change(&mut problem);
        check_simple(&to_api(&problem)).map_err(|failure| failure.message)
    };
    let refused = |operands: &str| {
        Err(format!(
            "the problem has {operands}, and flashcore_plan_launch takes no such tensor; use flashcore_plan_launch_tensors"
        ))
    };
    assert_eq!(words(|_| {}), Ok(()));
    assert_eq!(words(|problem| (problem.lse, problem.mask) = (1, FLASHCORE_MASK_CAUSAL)), Ok(()));
    assert_eq!(words(|problem| problem.sinks = 1), refused("sinks"));
    assert_eq!(words(|problem| (problem.alibi, problem.seqused_k) = (1, 1)), refused("seqused_k and alibi_slopes"));
    assert_eq!(words(|problem| problem.bias = 1), refused("bias"));
    assert_eq!(words(|problem| (problem.cu_seqlens_q, problem.total_q) = (1, 4)), refused("cu_seqlens_q"));
}

#[test]
fn launches_on_the_cpu_name_what_to_use() {
    let none = zeroed::<Tensors>();
    let plan = create(&problem(1, 1, 1, 8, FLASHCORE_DTYPE_F16)).unwrap();
    let null = ptr::null_mut::<c_void>();
    // SAFETY: a plan on the CPU launches nothing.
    let status = unsafe { flashcore_plan_launch(plan, null, null, null, null, null, ptr::null_mut()) };
    assert_eq!(status, FLASHCORE_UNSUPPORTED);
    let device = api::Device::cpu();
    let rest = format!(
        "is for tensors on a GPU, and this plan is on {device}; use flashcore_plan_run_host, or plan for \
         FLASHCORE_DEVICE_CUDA"
    );
    assert_eq!(text(flashcore_last_error()), format!("flashcore_plan_launch {rest}"));
    // SAFETY: a plan on the CPU launches nothing.
    let status = unsafe { flashcore_plan_launch_tensors(plan, null, &raw const none) };
    assert_eq!(status, FLASHCORE_UNSUPPORTED);
    assert_eq!(text(flashcore_last_error()), format!("flashcore_plan_launch_tensors {rest}"));
    // SAFETY: a plan on the CPU reads nothing.
    let status = unsafe { flashcore_plan_check_lengths(plan, null, &raw const none) };
    assert_eq!(status, FLASHCORE_UNSUPPORTED);
    assert_eq!(text(flashcore_last_error()), format!("flashcore_plan_check_lengths {rest}"));
    // SAFETY: null is looked at.
    let status = unsafe { flashcore_plan_launch_tensors(plan, null, ptr::null()) };
    assert_eq!(
        (status, text(flashcore_last_error()).as_str()),
        (FLASHCORE_INVALID_ARGUMENT, "tensors is null; it must not be")
    );
    assert_eq!(flashcore_plan_workspace_bytes(plan), 0);
    assert_eq!(text(flashcore_last_error()), "");
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);

    assert_eq!(flashcore_plan_workspace_bytes(plan), 0);
    assert_ne!(text(flashcore_last_error()), "");
    // SAFETY: there is no such plan, so nothing is launched.
    let status = unsafe { flashcore_plan_launch_tensors(plan, null, &raw const none) };
    assert_eq!(status, FLASHCORE_INVALID_PLAN);
}
