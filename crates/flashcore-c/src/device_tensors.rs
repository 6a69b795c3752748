//! Tensors on a GPU, as C has them.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::ptr;

use api::DeviceTensors as ApiDeviceTensors;

use crate::sized::SizedStruct;
use crate::status::Failure;
use crate::tensors::{BiasStrides, bias_strides};

/// Addresses of device memory: everything that a launch reads and writes. Set all of it to zero first; what the problem
/// has switched off stays null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensors {
    /// sizeof(flashcore_device_tensors_t) of the caller.
    pub struct_size: u64,
    /// The query, of the problem's dtype, 16-byte aligned.
    pub query: *const c_void,
    /// The key, of the problem's dtype, 16-byte aligned.
    pub key: *const c_void,
    /// The value, of the problem's dtype, 16-byte aligned.
    pub value: *const c_void,
    /// The output, of the problem's dtype, 16-byte aligned.
    pub output: *mut c_void,
    /// One float per row, contiguous [batch, query head, query row].
    pub lse: *mut f32,
    /// One uint32_t per batch. One that is larger than the problem's key_length counts as that.
    pub seqused_k: *const u32,
    /// One float per query head.
    pub alibi_slopes: *const f32,
    /// One float per query head.
    pub sinks: *const f32,
    /// Floats.
    pub bias: *const f32,
    /// Where the floats of the bias lie.
    pub bias_strides: BiasStrides,
    /// Floats that expressions read. Problems in C have no expressions yet: null.
    pub aux_f32: *const f32,
    /// Integers that expressions read. Problems in C have no expressions yet: null.
    pub aux_i32: *const i32,
    /// flashcore_plan_workspace_bytes() bytes, 16-byte aligned, that nobody else uses until the launch has finished; null
    /// for the workspace that the plan keeps for the stream.
    pub workspace: *mut c_void,
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for DeviceTensors {
    const NAME: &'static str = "flashcore_device_tensors_t";
    const LEAST_BYTES: usize = offset_of!(Self, lse);
}

impl DeviceTensors {
    /// No tensor at all.
    pub(crate) const NONE: Self = Self {
        struct_size: size_of::<Self>() as u64,
        query: ptr::null(),
        key: ptr::null(),
        value: ptr::null(),
        output: ptr::null_mut(),
        lse: ptr::null_mut(),
        seqused_k: ptr::null(),
        alibi_slopes: ptr::null(),
        sinks: ptr::null(),
        bias: ptr::null(),
        bias_strides: BiasStrides { batch: 0, head: 0, row: 0, key: 0 },
        aux_f32: ptr::null(),
        aux_i32: ptr::null(),
        workspace: ptr::null_mut(),
    };

    /// The tensors in Rust.
    pub(crate) fn to_api(self) -> Result<ApiDeviceTensors, Failure> {
        let address = |pointer: *const c_void| pointer.addr() as u64;
        let mut tensors = ApiDeviceTensors::new(
            address(self.query),
            address(self.key),
            address(self.value),
            address(self.output.cast_const()),
        );
        tensors.lse = address(self.lse.cast());
        tensors.seqused_k = address(self.seqused_k.cast());
        tensors.alibi_slopes = address(self.alibi_slopes.cast());
        tensors.sinks = address(self.sinks.cast());
        tensors.bias = address(self.bias.cast());
        tensors.bias_strides = bias_strides(self.bias_strides)?;
        tensors.aux_f32 = address(self.aux_f32.cast());
        tensors.aux_i32 = address(self.aux_i32.cast());
        tensors.workspace = address(self.workspace.cast_const());
        Ok(tensors)
    }
}
