//! Tensors of torch: device, address, and what belongs to the key.
//!
//! DLPack's C exchange table (`__dlpack_c_exchange_api__`, in torch 2.10 and later) fills a struct without making an object
//! of Python; attributes take ten times as long.

use std::ffi::c_void;

use crate::interpreter::{Interpreter, Owned, Ref};
use crate::key::Key;

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

impl DlTensor {
    fn address(&self) -> u64 {
        (self.data as u64).wrapping_add(self.byte_offset)
    }
}

const DL_CPU: i32 = 1;
const DL_CUDA: i32 = 2;

/// DLPackExchangeAPI of version 1.
#[repr(C)]
pub(crate) struct Exchange {
    major: u32,
    minor: u32,
    previous: *const Exchange,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    from_object: Option<unsafe extern "C" fn(Ref, *mut DlTensor) -> i32>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32>,
}

/// The functions of an exchange table that are used here.
#[derive(Clone, Copy)]
pub(crate) struct ExchangeFunctions {
    from_object: unsafe extern "C" fn(Ref, *mut DlTensor) -> i32,
    current_stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32,
}

impl ExchangeFunctions {
    /// The functions of a table, if it is of a version that is known.
    ///
    /// # Safety
    ///
    /// `table` must be null or an exchange table that stays.
    pub(crate) unsafe fn new(table: *const Exchange) -> Option<Self> {
        // SAFETY: by the caller; the version, which comes first in every table, is looked at before the rest.
        let table = unsafe { table.as_ref() }?;
        if table.major != 1 {
            return None;
        }
        Some(Self { from_object: table.from_object?, current_stream: table.current_stream? })
    }
}

/// Names of attributes and methods of tensors, as interned objects.
pub(crate) struct Names {
    pub(crate) shape: Ref,
    pub(crate) dtype: Ref,
    pub(crate) is_cpu: Ref,
    pub(crate) is_cuda: Ref,
    pub(crate) requires_grad: Ref,
    pub(crate) stride: Ref,
    pub(crate) data_ptr: Ref,
    pub(crate) get_device: Ref,
    pub(crate) is_neg: Ref,
    pub(crate) new_empty: Ref,
    pub(crate) is_captured: Ref,
}

/// Address and device of a tensor; the ordinal of a GPU, -1 for the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) address: u64,
    pub(crate) device: i32,
}

/// The way to read tensors.
pub(crate) struct Reader {
    pub(crate) interpreter: Interpreter,
    pub(crate) exchange: Option<ExchangeFunctions>,
    pub(crate) names: Names,
}

impl Reader {
    /// Reads a tensor and writes it into the key. None, without an error, for what has no address or another device.
    ///
    /// # Safety
    ///
    /// `object` must be a live tensor of exactly the type that the exchange table belongs to; the lock must be held.
    pub(crate) unsafe fn read(&self, object: Ref, key: &mut Key) -> Option<Tensor> {
        // SAFETY: by the caller.
        unsafe {
            match self.exchange {
                Some(exchange) => self.read_dlpack(exchange, object, key),
                None => self.read_attributes(object, key),
            }
        }
    }

    /// # Safety
    ///
    /// As for `read`.
    unsafe fn read_dlpack(&self, exchange: ExchangeFunctions, object: Ref, key: &mut Key) -> Option<Tensor> {
        // SAFETY: by the caller.
        let tensor = unsafe { self.exchanged(exchange, object) }?;
        let device = match tensor.device_type {
            DL_CPU => -1,
            DL_CUDA => tensor.device_id,
            _ => return None,
        };
        let dimensions = usize::try_from(tensor.ndim).ok()?;
        if dimensions > 0 && (tensor.shape.is_null() || tensor.strides.is_null()) {
            return None;
        }
        let element = u64::from(tensor.code) << 24 | u64::from(tensor.bits) << 16 | u64::from(tensor.lanes);
        key.push((element << 32) | (dimensions as u64 + 1));
        key.push(i64::from(device) as u64);
        for dimension in 0..dimensions {
            // SAFETY: both arrays have `ndim` entries, and belong to the tensor, which lives.
            unsafe {
                key.push(tensor.shape.add(dimension).read() as u64);
                key.push(tensor.strides.add(dimension).read() as u64);
            }
        }
        Some(Tensor { address: tensor.address(), device })
    }

    /// # Safety
    ///
    /// As for `read`.
    unsafe fn exchanged(&self, exchange: ExchangeFunctions, object: Ref) -> Option<DlTensor> {
        let mut tensor = std::mem::MaybeUninit::<DlTensor>::zeroed();
        // SAFETY: the object is a tensor of the table's type, by the caller, and the struct can be written.
        unsafe {
            if (exchange.from_object)(object, tensor.as_mut_ptr()) != 0 {
                (self.interpreter.error_clear)();
                return None;
            }
            Some(tensor.assume_init())
        }
    }

    /// # Safety
    ///
    /// As for `read`.
    unsafe fn read_attributes(&self, object: Ref, key: &mut Key) -> Option<Tensor> {
        let (python, names) = (&self.interpreter, &self.names);
        // SAFETY: the object lives and the lock is held, by the caller.
        unsafe {
            let device = if self.flag(object, names.is_cuda)? {
                i32::try_from(python.integer(self.method(object, names.get_device)?.object)?).ok()?
            } else if self.flag(object, names.is_cpu)? {
                -1
            } else {
                return None;
            };
            let shape = self.attribute(object, names.shape)?;
            let strides = self.method(object, names.stride)?;
            let dtype = self.attribute(object, names.dtype)?;
            let dimensions = (python.tuple_size)(shape.object);
            if dimensions < 0 || (python.tuple_size)(strides.object) != dimensions {
                (python.error_clear)();
                return None;
            }
            // Types are objects that torch never frees.
            key.push(dtype.object as u64);
            key.push(((i64::from(device) as u64) << 32) | (dimensions as u64 + 1));
            for dimension in 0..dimensions {
                key.push(python.integer((python.tuple_get)(shape.object, dimension))? as u64);
                key.push(python.integer((python.tuple_get)(strides.object, dimension))? as u64);
            }
            let address = python.address(self.method(object, names.data_ptr)?.object)?;
            Some(Tensor { address, device })
        }
    }

    /// The address of a tensor that was just made.
    ///
    /// # Safety
    ///
    /// As for `read`.
    pub(crate) unsafe fn address(&self, object: Ref) -> Option<u64> {
        // SAFETY: by the caller.
        unsafe {
            if let Some(exchange) = self.exchange {
                return self.exchanged(exchange, object).map(|tensor| tensor.address());
            }
            self.interpreter.address(self.method(object, self.names.data_ptr)?.object)
        }
    }

    /// The current stream of a GPU by the exchange table; none if there is no table.
    pub(crate) fn current_stream(&self, device: i32) -> Option<u64> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer can be written; the function asks torch for the stream of a GPU that a tensor is on.
        let status = unsafe { (self.exchange?.current_stream)(DL_CUDA, device, &raw mut stream) };
        if status != 0 {
            // SAFETY: the lock is held, as always in a call from Python.
            unsafe { (self.interpreter.error_clear)() };
            return None;
        }
        Some(stream as u64)
    }

    /// An attribute; none, without an error, if there is none.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    unsafe fn attribute(&self, object: Ref, name: Ref) -> Option<Owned> {
        // SAFETY: by the caller.
        unsafe { self.result((self.interpreter.get_attr)(object, name)) }
    }

    /// The result of a method without arguments; none, without an error, if it fails.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    unsafe fn method(&self, object: Ref, name: Ref) -> Option<Owned> {
        // SAFETY: by the caller.
        unsafe { self.result((self.interpreter.call_method)(name, &raw const object, 1, std::ptr::null_mut())) }
    }

    /// # Safety
    ///
    /// `object` must be null or an owned reference, and the lock must be held.
    unsafe fn result(&self, object: Ref) -> Option<Owned> {
        if object.is_null() {
            // SAFETY: the lock is held.
            unsafe { (self.interpreter.error_clear)() };
            return None;
        }
        // SAFETY: the reference is owned, by the caller.
        Some(unsafe { Owned::new(&self.interpreter, object) })
    }

    /// An attribute that is true or false.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    pub(crate) unsafe fn flag(&self, object: Ref, name: Ref) -> Option<bool> {
        // SAFETY: by the caller.
        unsafe { self.truth(&self.attribute(object, name)?) }
    }

    /// A method without arguments that is true or false.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    pub(crate) unsafe fn asked(&self, object: Ref, name: Ref) -> Option<bool> {
        // SAFETY: by the caller.
        unsafe { self.truth(&self.method(object, name)?) }
    }

    /// # Safety
    ///
    /// The lock must be held.
    pub(crate) unsafe fn truth(&self, object: &Owned) -> Option<bool> {
        // SAFETY: the object is owned.
        match unsafe { (self.interpreter.is_true)(object.object) } {
            0 => Some(false),
            1 => Some(true),
            _ => {
                // SAFETY: the lock is held.
                unsafe { (self.interpreter.error_clear)() };
                None
            }
        }
    }
}
