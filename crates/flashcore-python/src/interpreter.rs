//! Functions of CPython's stable ABI, by addresses.

use std::ffi::{c_char, c_int, c_void};

use crate::functions::functions;

/// An object of Python: its layout is the interpreter's business.
#[repr(C)]
pub(crate) struct Object {
    _private: [u8; 0],
}

/// A pointer to an object; null where a function failed.
pub(crate) type Ref = *mut Object;

/// PyMethodDef, whose layout belongs to the stable ABI.
#[repr(C)]
pub(crate) struct MethodDef {
    pub(crate) name: *const c_char,
    pub(crate) function: unsafe extern "C" fn(Ref, *const Ref, isize) -> Ref,
    pub(crate) flags: c_int,
    pub(crate) doc: *const c_char,
}

/// METH_FASTCALL: arguments as an array.
pub(crate) const FASTCALL: c_int = 0x80;

functions! {
    /// Functions of the interpreter. All of them need its lock (GIL), but for those that take it: `restore_thread` and
    /// `take_lock`.
    Interpreter;
    inc_ref = "Py_IncRef" (Ref);
    dec_ref = "Py_DecRef" (Ref);
    type_of = "PyObject_Type" (Ref) -> Ref;
    get_attr = "PyObject_GetAttr" (Ref, Ref) -> Ref;
    set_attr = "PyObject_SetAttr" (Ref, Ref, Ref) -> c_int;
    is_true = "PyObject_IsTrue" (Ref) -> c_int;
    call_no_args = "PyObject_CallNoArgs" (Ref) -> Ref;
    call_method = "PyObject_VectorcallMethod" (Ref, *const Ref, usize, Ref) -> Ref;
    call = "PyObject_Call" (Ref, Ref, Ref) -> Ref;
    tuple_new = "PyTuple_New" (isize) -> Ref;
    tuple_set = "PyTuple_SetItem" (Ref, isize, Ref) -> c_int;
    tuple_get = "PyTuple_GetItem" (Ref, isize) -> Ref;
    tuple_size = "PyTuple_Size" (Ref) -> isize;
    long_as_i64 = "PyLong_AsLongLong" (Ref) -> i64;
    long_as_u64 = "PyLong_AsUnsignedLongLong" (Ref) -> u64;
    long_from_i64 = "PyLong_FromLongLong" (i64) -> Ref;
    float_as_f64 = "PyFloat_AsDouble" (Ref) -> f64;
    bytes_as_slice = "PyBytes_AsStringAndSize" (Ref, *mut *mut c_char, *mut isize) -> c_int;
    error_occurred = "PyErr_Occurred" () -> Ref;
    error_clear = "PyErr_Clear" ();
    save_thread = "PyEval_SaveThread" () -> *mut c_void;
    restore_thread = "PyEval_RestoreThread" (*mut c_void);
    take_lock = "PyGILState_Ensure" () -> c_int;
    give_lock = "PyGILState_Release" (c_int);
    capsule_new = "PyCapsule_New" (*mut c_void, *const c_char, *const c_void) -> Ref;
    capsule_get = "PyCapsule_GetPointer" (Ref, *const c_char) -> *mut c_void;
    function_new = "PyCFunction_NewEx" (*const MethodDef, Ref, Ref) -> Ref;
}

/// An owned reference, given back when it goes. It may be null, which is a failure of the interpreter.
pub(crate) struct Owned {
    pub(crate) object: Ref,
    dec_ref: unsafe extern "C" fn(Ref),
}

impl Owned {
    /// Takes a reference that the caller owns.
    ///
    /// # Safety
    ///
    /// `object` must be null or an owned reference of the interpreter, whose lock the thread holds now and when it goes.
    pub(crate) unsafe fn new(interpreter: &Interpreter, object: Ref) -> Self {
        Self { object, dec_ref: interpreter.dec_ref }
    }

    /// A new reference to an object that lives.
    ///
    /// # Safety
    ///
    /// As for `new`; `object` must live.
    pub(crate) unsafe fn borrow(interpreter: &Interpreter, object: Ref) -> Self {
        // SAFETY: the object lives and the lock is held, by the caller.
        unsafe { (interpreter.inc_ref)(object) };
        Self { object, dec_ref: interpreter.dec_ref }
    }

    /// Hands the reference over.
    pub(crate) fn into_ref(mut self) -> Ref {
        std::mem::replace(&mut self.object, std::ptr::null_mut())
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.object.is_null() {
            // SAFETY: the reference is owned, and the lock is held, by the contract of `new`.
            unsafe { (self.dec_ref)(self.object) };
        }
    }
}

impl Interpreter {
    /// The items of a tuple, borrowed; none if it is no tuple.
    ///
    /// # Safety
    ///
    /// `tuple` must live, and the lock must be held.
    pub(crate) unsafe fn items(&self, tuple: Ref) -> Option<Vec<Ref>> {
        // SAFETY: by the caller; indices are below the size.
        unsafe {
            let size = (self.tuple_size)(tuple);
            (0..size)
                .map(|index| Some((self.tuple_get)(tuple, index)).filter(|item| !item.is_null()))
                .collect::<Option<_>>()
                .filter(|_| size >= 0)
        }
    }

    /// A number; none, with the error cleared, if it is none.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    pub(crate) unsafe fn integer(&self, object: Ref) -> Option<i64> {
        // SAFETY: by the caller.
        unsafe {
            let value = (self.long_as_i64)(object);
            if value == -1 && !(self.error_occurred)().is_null() {
                (self.error_clear)();
                return None;
            }
            Some(value)
        }
    }

    /// An address; none, with the error cleared, if it is none.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    pub(crate) unsafe fn address(&self, object: Ref) -> Option<u64> {
        // SAFETY: by the caller.
        unsafe {
            let value = (self.long_as_u64)(object);
            if value == u64::MAX && !(self.error_occurred)().is_null() {
                (self.error_clear)();
                return None;
            }
            Some(value)
        }
    }
}

/// The lock of the interpreter, given back when it goes.
pub(crate) struct Lock<'a> {
    interpreter: &'a Interpreter,
    state: c_int,
}

impl<'a> Lock<'a> {
    /// Takes the lock; a thread that holds it may take it again.
    pub(crate) fn take(interpreter: &'a Interpreter) -> Self {
        // SAFETY: the function may be called by every thread while the interpreter lives.
        Self { interpreter, state: unsafe { (interpreter.take_lock)() } }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // SAFETY: the state is that of the lock that this thread took.
        unsafe { (self.interpreter.give_lock)(self.state) };
    }
}
