//! libtorch's plain C interface (`aoti_torch_*`, in torch 2.7 and later), by addresses, and exceptions of C++.

use std::ffi::{CStr, c_char, c_void};

use crate::functions::functions;

/// A tensor of libtorch; the interface hands out owned ones.
pub(crate) type Handle = *mut c_void;

/// A value on the stack of an operator: a number, a handle, or the address of a box with one of them for optional values.
pub(crate) type Value = u64;

/// A kernel of an operator. An exception may leave it.
pub(crate) type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);

functions! {
    /// Functions of libtorch and of the C++ runtime that it uses. None of them needs the interpreter's lock.
    Torch;
    dimensions = "aoti_torch_get_dim" (Handle, *mut i64) -> i32;
    sizes = "aoti_torch_get_sizes" (Handle, *mut *const i64) -> i32;
    strides = "aoti_torch_get_strides" (Handle, *mut *const i64) -> i32;
    dtype = "aoti_torch_get_dtype" (Handle, *mut i32) -> i32;
    device_type = "aoti_torch_get_device_type" (Handle, *mut i32) -> i32;
    device_index = "aoti_torch_get_device_index" (Handle, *mut i32) -> i32;
    data = "aoti_torch_get_data_ptr" (Handle, *mut *mut c_void) -> i32;
    empty = "aoti_torch_empty_strided" (i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> i32;
    delete = "aoti_torch_delete_tensor_object" (Handle) -> i32;
    cuda = "aoti_torch_device_type_cuda" () -> i32;
    is_grad_enabled = "aoti_torch_grad_mode_is_enabled" () -> bool;
    float32 = "aoti_torch_dtype_float32" () -> i32;
    float16 = "aoti_torch_dtype_float16" () -> i32;
    bfloat16 = "aoti_torch_dtype_bfloat16" () -> i32;
    uint8 = "aoti_torch_dtype_uint8" () -> i32;
    new_library = "aoti_torch_library_init_impl" (*const c_char, *const c_char, *const c_char, u32, *mut *mut c_void) -> i32;
    implement = "aoti_torch_library_impl" (*mut c_void, *const c_char, Kernel) -> i32;
    delete_box = "_ZdlPv" (*mut c_void);
    new_exception = "__cxa_allocate_exception" (usize) -> *mut c_void;
    throw = "__cxa_throw" (*mut c_void, *const c_void, *const c_void);
    runtime_error = "_ZNSt13runtime_errorC1EPKc" (*mut c_void, *const c_char);
    runtime_error_type = "_ZTISt13runtime_error" ();
    runtime_error_end = "_ZNSt13runtime_errorD1Ev" (*mut c_void);
}

/// Type and device of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) dtype: i32,
    pub(crate) device_type: i32,
    pub(crate) device_index: i32,
}

impl Torch {
    /// Looks up type and device.
    ///
    /// # Safety
    ///
    /// `tensor` must be a live handle.
    pub(crate) unsafe fn place(&self, tensor: Handle) -> Option<Place> {
        let mut place = Place { dtype: 0, device_type: 0, device_index: 0 };
        // SAFETY: by the caller; the functions write one number each.
        unsafe {
            let failed = (self.dtype)(tensor, &raw mut place.dtype)
                | (self.device_type)(tensor, &raw mut place.device_type)
                | (self.device_index)(tensor, &raw mut place.device_index);
            (failed == 0).then_some(place)
        }
    }

    /// Sizes and strides of a tensor.
    ///
    /// # Safety
    ///
    /// `tensor` must be a live handle; the slices live as long as it does and is not resized.
    pub(crate) unsafe fn shape<'a>(&self, tensor: Handle) -> Option<(&'a [i64], &'a [i64])> {
        let (mut count, mut sizes, mut strides) = (0, std::ptr::null(), std::ptr::null());
        // SAFETY: by the caller; both arrays have as many entries as there are dimensions.
        unsafe {
            let failed = (self.dimensions)(tensor, &raw mut count)
                | (self.sizes)(tensor, &raw mut sizes)
                | (self.strides)(tensor, &raw mut strides);
            let count = usize::try_from(count).ok().filter(|_| failed == 0)?;
            if count == 0 {
                return Some((&[], &[]));
            }
            Some((std::slice::from_raw_parts(sizes, count), std::slice::from_raw_parts(strides, count)))
        }
    }

    /// Address of a tensor's first element.
    ///
    /// # Safety
    ///
    /// `tensor` must be a live handle.
    pub(crate) unsafe fn address(&self, tensor: Handle) -> Option<u64> {
        let mut data = std::ptr::null_mut();
        // SAFETY: by the caller.
        (unsafe { (self.data)(tensor, &raw mut data) } == 0).then_some(data as u64)
    }

    /// Throws a `std::runtime_error`, the one way for a kernel to fail; it never returns.
    ///
    /// # Safety
    ///
    /// The caller must be a kernel of an operator, with nothing left to drop.
    pub(crate) unsafe fn fail(&self, text: &CStr) -> ! {
        /// Enough for the object, which has two pointers.
        const BYTES: usize = 64;
        // SAFETY: the exception is new memory, and the constructor copies the text. The C++ runtime takes it from there.
        unsafe {
            let exception = (self.new_exception)(BYTES);
            (self.runtime_error)(exception, text.as_ptr());
            let throw = std::mem::transmute::<
                unsafe extern "C" fn(*mut c_void, *const c_void, *const c_void),
                unsafe extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> !,
            >(self.throw);
            throw(exception, self.runtime_error_type as *const c_void, self.runtime_error_end as *const c_void)
        }
    }
}
