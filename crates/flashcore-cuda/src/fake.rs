//! A fake driver of functions that record their calls: the device side of this crate, tested without a device.
//!
//! The memory is the host's, so copies copy; its kernels only leave their configuration and arguments; and any function
//! can be told to return an error. Each thread has a driver of its own.

#![expect(non_snake_case, reason = "the names of the driver")]

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::ptr;

use crate::api::{Api, Code};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::code;
use crate::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphNode, CUjit_option, CUjitInputType, CUlaunchConfig, CUlimit, CUlinkState, CUmodule, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle, CUuuid,
};

/// A launch as the driver saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenLaunch {
    pub(crate) function: usize,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) stream: usize,
    /// The number of each attribute, and its first three integers.
    pub(crate) attributes: Vec<(u32, [u32; 3])>,
    /// Eight bytes from each argument on.
    pub(crate) arguments: Vec<u64>,
}

/// The state of this thread's driver.
pub(crate) struct State {
    /// The number of calls of each function.
    pub(crate) calls: BTreeMap<&'static str, usize>,
    /// The error codes that functions return instead of doing something.
    pub(crate) failures: HashMap<&'static str, Code>,
    /// The number of arguments of the next launches.
    pub(crate) argument_count: usize,
    pub(crate) launches: Vec<SeenLaunch>,
    pub(crate) capturing: bool,
    /// True while calls are allowed that would invalidate a capture.
    pub(crate) relaxed: bool,
    /// The contexts current on this thread, innermost last.
    pub(crate) current: Vec<usize>,
    pub(crate) compute: (i32, i32),
    pub(crate) attributes: HashMap<u32, i32>,
    /// The contents of the compiler's two logs.
    pub(crate) info: &'static str,
    pub(crate) errors: &'static str,
    /// The options of the last link, as numbers.
    pub(crate) jit_options: Vec<(u32, usize)>,
    pub(crate) ptx: String,
    pub(crate) shared_allowed: c_int,
    /// The limit that was set last.
    pub(crate) limit: usize,
    allocations: HashMap<u64, Vec<u8>>,
    logs: [usize; 2],
    cubin: Vec<u8>,
    next_handle: usize,
}

/// The error for calls that a stream does not allow during capture.
const STREAM_CAPTURE_UNSUPPORTED: Code = 900;
/// The handle of the primary context.
pub(crate) const PRIMARY: usize = 0xC0;
pub(crate) const FREE_BYTES: usize = 1000;
pub(crate) const TOTAL_BYTES: usize = 5000;

impl State {
    fn new() -> Self {
        Self {
            calls: BTreeMap::new(),
            failures: HashMap::new(),
            argument_count: 0,
            launches: Vec::new(),
            capturing: false,
            relaxed: false,
            current: Vec::new(),
            compute: (9, 0),
            attributes: HashMap::new(),
            info: "info    : used 40 registers, 0 stack, 0 bytes smem, 360 bytes cmem[0], 0 bytes lmem",
            errors: "",
            jit_options: Vec::new(),
            ptx: String::new(),
            limit: 0,
            shared_allowed: 0,
            allocations: HashMap::new(),
            logs: [0; 2],
            cubin: Vec::new(),
            next_handle: 0x100,
        }
    }

    fn handle<T>(&mut self) -> *mut T {
        self.next_handle += 1;
        ptr::without_provenance_mut(self.next_handle)
    }

    /// Allocations that were not freed.
    pub(crate) fn live_allocations(&self) -> usize {
        self.allocations.len()
    }

    /// The number of calls of a function.
    pub(crate) fn count(&self, function: &str) -> usize {
        self.calls.get(function).copied().unwrap_or(0)
    }
}

thread_local! {
    static STATE: RefCell<State> = RefCell::new(State::new());
}

/// Reads or changes the state of this thread's driver.
pub(crate) fn state<T>(with: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(with)
}

/// Makes a function return an error from now on, or no more.
pub(crate) fn fail(function: &'static str, answer: Option<Code>) {
    state(|state| match answer {
        Some(answer) => state.failures.insert(function, answer),
        None => state.failures.remove(function),
    });
}

/// The driver of this thread.
pub(crate) fn driver() -> &'static Driver {
    // Tests are few, and end with the process.
    Box::leak(Box::new(Driver::initialise(API, Some("999.1".to_owned())).unwrap()))
}

/// The context of its one device.
pub(crate) fn context() -> Context {
    Context::new(&driver().device(0).unwrap()).unwrap()
}

macro_rules! functions {
    ($(fn $name:ident($state:ident $(, $argument:ident: $ty:ty)* $(,)?) $body:block)*) => {
        $(unsafe extern "C" fn $name($($argument: $ty),*) -> Code {
            state(|$state| {
                *$state.calls.entry(stringify!($name)).or_default() += 1;
                if let Some(&answer) = $state.failures.get(stringify!($name)) {
                    return answer;
                }
                // SAFETY: the tests call these functions through this crate, which promises the driver valid pointers.
                #[allow(unused_unsafe, reason = "some functions have nothing to do")]
                unsafe {
                    $body
                }
            })
        })*

        pub(crate) const API: Api = Api { $($name,)* };
    };
}

functions! {
    fn cuInit(_state, _flags: c_uint) { code::SUCCESS }
    fn cuDriverGetVersion(_state, version: *mut c_int) { *version = 13_000; code::SUCCESS }
    fn cuGetErrorName(_state, error: Code, text: *mut *const c_char) {
        *text = match error {
            code::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY".as_ptr(),
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS".as_ptr(),
            _ => return code::INVALID_VALUE,
        };
        code::SUCCESS
    }
    fn cuGetErrorString(_state, error: Code, text: *mut *const c_char) {
        *text = match error {
            700 => c"an illegal memory access was encountered".as_ptr(),
            _ => return code::INVALID_VALUE,
        };
        code::SUCCESS
    }
    fn cuDeviceGetCount(_state, count: *mut c_int) { *count = 1; code::SUCCESS }
    fn cuDeviceGet(_state, device: *mut CUdevice, ordinal: c_int) { *device = ordinal; code::SUCCESS }
    fn cuDeviceGetName(_state, name: *mut c_char, _bytes: c_int, _device: CUdevice) {
        ptr::copy_nonoverlapping(c"Fake H200".as_ptr(), name, 10);
        code::SUCCESS
    }
    fn cuDeviceGetUuid_v2(_state, uuid: *mut CUuuid, _device: CUdevice) { (*uuid).bytes = [1; 16]; code::SUCCESS }
    fn cuDeviceTotalMem_v2(_state, bytes: *mut usize, _device: CUdevice) { *bytes = TOTAL_BYTES; code::SUCCESS }
    fn cuDeviceGetAttribute(state, value: *mut c_int, attribute: CUdevice_attribute, _device: CUdevice) {
        *value = match attribute {
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => state.compute.0,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => state.compute.1,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 1024,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 227 * 1024,
            other => state.attributes.get(&(other as u32)).copied().unwrap_or(other as i32),
        };
        code::SUCCESS
    }
    fn cuDevicePrimaryCtxRetain(_state, context: *mut CUcontext, _device: CUdevice) {
        *context = ptr::without_provenance_mut(PRIMARY);
        code::SUCCESS
    }
    fn cuDevicePrimaryCtxRelease_v2(_state, _device: CUdevice) { code::SUCCESS }
    fn cuCtxGetCurrent(state, context: *mut CUcontext) {
        *context = ptr::without_provenance_mut(state.current.last().copied().unwrap_or(0));
        code::SUCCESS
    }
    fn cuCtxPushCurrent_v2(state, context: CUcontext) { state.current.push(context.addr()); code::SUCCESS }
    fn cuCtxPopCurrent_v2(state, context: *mut CUcontext) {
        *context = ptr::without_provenance_mut(state.current.pop().unwrap());
        code::SUCCESS
    }
    fn cuCtxSynchronize(_state) { code::SUCCESS }
    fn cuCtxSetLimit(state, _limit: CUlimit, value: usize) {
        state.limit = value;
        code::SUCCESS
    }
    fn cuStreamCreate(state, stream: *mut CUstream, _flags: c_uint) { *stream = state.handle(); code::SUCCESS }
    fn cuStreamDestroy_v2(_state, _stream: CUstream) { code::SUCCESS }
    fn cuStreamSynchronize(_state, _stream: CUstream) { code::SUCCESS }
    fn cuStreamWaitEvent(_state, _stream: CUstream, _event: CUevent, _flags: c_uint) { code::SUCCESS }
    fn cuStreamIsCapturing(state, _stream: CUstream, status: *mut CUstreamCaptureStatus) {
        *status = CUstreamCaptureStatus(u32::from(state.capturing));
        code::SUCCESS
    }
    fn cuStreamGetId(state, stream: CUstream, id: *mut c_ulonglong) {
        if state.capturing {
            return STREAM_CAPTURE_UNSUPPORTED;
        }
        *id = stream.addr() as u64;
        code::SUCCESS
    }
    fn cuThreadExchangeStreamCaptureMode(state, mode: *mut CUstreamCaptureMode) {
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let before = if state.relaxed { relaxed } else { CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL };
        state.relaxed = *mode == relaxed;
        *mode = before;
        code::SUCCESS
    }
    fn cuStreamBeginCapture_v2(state, _stream: CUstream, _mode: CUstreamCaptureMode) {
        state.capturing = true;
        code::SUCCESS
    }
    fn cuStreamEndCapture(state, _stream: CUstream, graph: *mut CUgraph) {
        state.capturing = false;
        *graph = state.handle();
        code::SUCCESS
    }
    fn cuGraphInstantiateWithFlags(state, executable: *mut CUgraphExec, _graph: CUgraph, _flags: c_ulonglong) {
        *executable = state.handle();
        code::SUCCESS
    }
    fn cuGraphGetNodes(state, _graph: CUgraph, _nodes: *mut CUgraphNode, count: *mut usize) {
        *count = state.launches.len();
        code::SUCCESS
    }
    fn cuGraphLaunch(_state, _graph: CUgraphExec, _stream: CUstream) { code::SUCCESS }
    fn cuGraphExecDestroy(_state, _graph: CUgraphExec) { code::SUCCESS }
    fn cuGraphDestroy(_state, _graph: CUgraph) { code::SUCCESS }
    fn cuEventCreate(state, event: *mut CUevent, _flags: c_uint) { *event = state.handle(); code::SUCCESS }
    fn cuEventDestroy_v2(_state, _event: CUevent) { code::SUCCESS }
    fn cuEventRecord(_state, _event: CUevent, _stream: CUstream) { code::SUCCESS }
    fn cuEventQuery(_state, _event: CUevent) { code::SUCCESS }
    fn cuEventSynchronize(_state, _event: CUevent) { code::SUCCESS }
    fn cuEventElapsedTime(_state, milliseconds: *mut f32, start: CUevent, end: CUevent) {
        *milliseconds = (end.addr() - start.addr()) as f32;
        code::SUCCESS
    }
    fn cuMemGetInfo_v2(_state, free: *mut usize, total: *mut usize) {
        (*free, *total) = (FREE_BYTES, TOTAL_BYTES);
        code::SUCCESS
    }
    fn cuMemAlloc_v2(state, address: *mut CUdeviceptr, bytes: usize) {
        let memory = vec![0xAA; bytes];
        *address = memory.as_ptr().expose_provenance() as u64;
        state.allocations.insert(*address, memory);
        code::SUCCESS
    }
    fn cuMemFree_v2(state, address: CUdeviceptr) {
        state.allocations.remove(&address).unwrap();
        code::SUCCESS
    }
    fn cuMemcpyHtoDAsync_v2(_state, to: CUdeviceptr, from: *const c_void, bytes: usize, _stream: CUstream) {
        ptr::copy_nonoverlapping(from.cast::<u8>(), device(to), bytes);
        code::SUCCESS
    }
    fn cuMemcpyDtoHAsync_v2(_state, to: *mut c_void, from: CUdeviceptr, bytes: usize, _stream: CUstream) {
        ptr::copy_nonoverlapping(device(from), to.cast::<u8>(), bytes);
        code::SUCCESS
    }
    fn cuMemcpyDtoDAsync_v2(_state, to: CUdeviceptr, from: CUdeviceptr, bytes: usize, _stream: CUstream) {
        ptr::copy_nonoverlapping(device(from), device(to), bytes);
        code::SUCCESS
    }
    fn cuMemsetD8Async(_state, address: CUdeviceptr, byte: u8, bytes: usize, _stream: CUstream) {
        ptr::write_bytes(device(address), byte, bytes);
        code::SUCCESS
    }
    fn cuLinkCreate_v2(
        state, count: c_uint, keys: *mut CUjit_option, values: *mut *mut c_void, link: *mut CUlinkState,
    ) {
        let all = (0..count as usize).map(|index| (*keys.add(index) as u32, (*values.add(index)).expose_provenance()));
        state.jit_options = all.collect();
        let log = |key: CUjit_option| state.jit_options.iter().find(|option| option.0 == key as u32).unwrap().1;
        state.logs = [log(CUjit_option::CU_JIT_INFO_LOG_BUFFER), log(CUjit_option::CU_JIT_ERROR_LOG_BUFFER)];
        *link = state.handle();
        code::SUCCESS
    }
    fn cuLinkAddData_v2(
        state, _link: CUlinkState, input: CUjitInputType, data: *mut c_void, bytes: usize, _name: *const c_char,
        _count: c_uint, _keys: *mut CUjit_option, _values: *mut *mut c_void,
    ) {
        assert_eq!(input, CUjitInputType::CU_JIT_INPUT_PTX);
        let text = CStr::from_ptr(data.cast());
        assert_eq!(text.to_bytes_with_nul().len(), bytes);
        state.ptx = text.to_str().unwrap().to_owned();
        for (log, said) in state.logs.into_iter().zip([state.info, state.errors]) {
            ptr::copy_nonoverlapping(said.as_ptr(), ptr::with_exposed_provenance_mut(log), said.len());
        }
        if state.errors.is_empty() { code::SUCCESS } else { code::INVALID_SOURCE }
    }
    fn cuLinkComplete(state, _link: CUlinkState, bytes: *mut *mut c_void, length: *mut usize) {
        state.cubin = [b"cubin of ", state.ptx.as_bytes()].concat();
        (*bytes, *length) = (state.cubin.as_mut_ptr().cast(), state.cubin.len());
        code::SUCCESS
    }
    fn cuLinkDestroy(_state, _link: CUlinkState) { code::SUCCESS }
    fn cuModuleLoadDataEx(
        state, module: *mut CUmodule, image: *const c_void, count: c_uint, keys: *mut CUjit_option,
        values: *mut *mut c_void,
    ) {
        let all = (0..count as usize).map(|index| (*keys.add(index) as u32, (*values.add(index)).expose_provenance()));
        state.jit_options = all.collect();
        state.ptx = CStr::from_ptr(image.cast()).to_str().unwrap().to_owned();
        for (key, said) in
            [(CUjit_option::CU_JIT_INFO_LOG_BUFFER, state.info), (CUjit_option::CU_JIT_ERROR_LOG_BUFFER, state.errors)]
        {
            let log = state.jit_options.iter().find(|option| option.0 == key as u32).unwrap().1;
            ptr::copy_nonoverlapping(said.as_ptr(), ptr::with_exposed_provenance_mut(log), said.len());
        }
        *module = state.handle();
        if state.errors.is_empty() { code::SUCCESS } else { code::INVALID_SOURCE }
    }
    fn cuModuleLoadData(state, module: *mut CUmodule, image: *const c_void) {
        if slice(image, 5) != b"cubin" {
            return code::INVALID_IMAGE;
        }
        *module = state.handle();
        code::SUCCESS
    }
    fn cuModuleUnload(_state, _module: CUmodule) { code::SUCCESS }
    fn cuModuleGetFunction(state, function: *mut CUfunction, _module: CUmodule, _name: *const c_char) {
        *function = state.handle();
        code::SUCCESS
    }
    fn cuFuncGetAttribute(_state, value: *mut c_int, attribute: CUfunction_attribute, _function: CUfunction) {
        *value = match attribute {
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS => 40,
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
            _ => 0,
        };
        code::SUCCESS
    }
    fn cuFuncSetAttribute(state, _function: CUfunction, _attribute: CUfunction_attribute, value: c_int) {
        state.shared_allowed = value;
        code::SUCCESS
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        _state, ctas: *mut c_int, _function: CUfunction, threads: c_int, _shared_bytes: usize,
    ) {
        *ctas = 2048 / threads;
        code::SUCCESS
    }
    fn cuTensorMapEncodeTiled(
        state, map: *mut CUtensorMap, element: CUtensorMapDataType, rank: u32, base: *mut c_void,
        dimensions: *const u64, strides: *const u64, box_dimensions: *const u32, element_strides: *const u32,
        interleave: CUtensorMapInterleave, swizzle: CUtensorMapSwizzle, _promotion: CUtensorMapL2promotion,
        fill: CUtensorMapFloatOOBfill,
    ) {
        let rank = rank as usize;
        let opaque = &mut (*map).opaque;
        opaque[0] = base.addr() as u64;
        opaque[1] = element as u64 | (interleave as u64) << 8 | (swizzle as u64) << 16 | (fill as u64) << 24;
        opaque[2..2 + rank].copy_from_slice(std::slice::from_raw_parts(dimensions, rank));
        opaque[7..6 + rank].copy_from_slice(std::slice::from_raw_parts(strides, rank - 1));
        for axis in 0..rank {
            opaque[11 + axis] = u64::from(*box_dimensions.add(axis)) << 8 | u64::from(*element_strides.add(axis));
        }
        let _ = state;
        code::SUCCESS
    }
    fn cuLaunchKernelEx(
        state, config: *const CUlaunchConfig, function: CUfunction, arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        assert!(extra.is_null());
        let config = *config;
        let attributes = (0..config.numAttrs as usize).map(|index| {
            let attribute = *config.attrs.add(index);
            (attribute.id as u32, *(&raw const attribute.value).cast::<[u32; 3]>())
        });
        let arguments = (0..state.argument_count).map(|index| *(*arguments.add(index)).cast::<u64>());
        let launch = SeenLaunch {
            function: function.addr(),
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared_bytes: config.sharedMemBytes,
            stream: config.hStream.addr(),
            attributes: attributes.collect(),
            arguments: arguments.collect(),
        };
        state.launches.push(launch);
        code::SUCCESS
    }
}

fn device(address: CUdeviceptr) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn slice<'image>(image: *const c_void, bytes: usize) -> &'image [u8] {
    // SAFETY: only called on images, which this crate passes in whole words, with more words after them.
    unsafe { std::slice::from_raw_parts(image.cast(), bytes) }
}
