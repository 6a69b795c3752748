//! Operations: builtin functions of Python with a table of launches.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::interpreter::{FASTCALL, Interpreter, MethodDef, Owned, Ref};
use crate::key::Key;
use crate::launch::{INVALID_PLAN, Kind, Launch, MOST_OUTPUTS};
use crate::table::Table;
use crate::tensor::{Exchange, ExchangeFunctions, Names, Reader};

/// Most arguments of an operation.
const MOST_ARGUMENTS: usize = 40;

/// An operation: each argument is a tensor or None, or a number, a flag, a tuple of integers, a type of elements or None.
struct Operation {
    reader: Reader,
    tensor_type: Ref,
    float_type: Ref,
    int_type: Ref,
    tuple_type: Ref,
    /// The type of torch's types of elements.
    dtype_type: Ref,
    none: Ref,
    yes: Ref,
    no: Ref,
    float32: Ref,
    float16: Ref,
    bfloat16: Ref,
    uint8: Ref,
    /// ("dtype",), the names of keyword arguments.
    dtype_keyword: Ref,
    /// Functions that say whether something listens to the dispatcher: modes, tracers.
    listeners: Vec<Ref>,
    is_grad_enabled: Ref,
    stream: Ref,
    is_capturing: Ref,
    /// Function for calls that are not plain; null if the operation is below the dispatcher.
    dispatch: Ref,
    miss: Ref,
    fail: Ref,
    /// True for arguments that are tensors or None.
    are_tensors: Vec<bool>,
    /// Number of arguments without a default.
    required: usize,
    defaults: Vec<Ref>,
    launches: Table,
}

/// Result of a launch.
enum Outcome {
    /// The result, or null with an error set.
    Done(Ref),
    /// Nothing was launched, and the Python way is to be taken: the plan was evicted meanwhile, or torch has changed.
    Gone,
}

/// A MethodDef that stays.
struct Method(MethodDef);

// SAFETY: it is never written, and points to static text.
unsafe impl Sync for Method {}

static METHOD: Method = Method(MethodDef {
    name: c"operation".as_ptr(),
    function: call,
    flags: FASTCALL,
    doc: c"An operation of flashcore: the plan is found by the arguments.".as_ptr(),
});

/// Makes an operation: a builtin function of Python, or null with an error set, or null without one if `settings` are of
/// another version. It stays until the process ends.
///
/// `settings` is the tuple that `flashcore/_fast.py` makes.
///
/// # Safety
///
/// `addresses` must point to `count` addresses of the functions that [`crate::flashcore_python_symbols`] names, `settings`
/// must live, and the thread must hold the lock of the interpreter. What `miss` returns must be launches of libflashcore.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_python_operation(
    addresses: *const usize,
    count: usize,
    settings: *mut c_void,
) -> *mut c_void {
    // SAFETY: by the caller.
    unsafe {
        let addresses = std::slice::from_raw_parts(addresses, count);
        let Some(python) = Interpreter::new(addresses) else { return std::ptr::null_mut() };
        let Some(operation) = Operation::new(python, settings.cast()) else { return std::ptr::null_mut() };
        let operation = Box::into_raw(Box::new(operation));
        let capsule = (python.capsule_new)(operation.cast(), std::ptr::null(), std::ptr::null());
        if capsule.is_null() {
            drop(Box::from_raw(operation));
            return std::ptr::null_mut();
        }
        let function = (python.function_new)(&raw const METHOD.0, capsule, std::ptr::null_mut());
        (python.dec_ref)(capsule);
        function.cast()
    }
}

/// Forgets all launches of an operation; `capsule` is the `__self__` of its function.
///
/// # Safety
///
/// `capsule` must be that of a function of [`flashcore_python_operation`], and the thread must hold the lock of the
/// interpreter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_python_clear(capsule: *mut c_void) {
    // SAFETY: by the caller.
    if let Some(operation) = unsafe { operation_of(capsule.cast()) } {
        operation.launches.clear();
    }
}

/// Number of launches in the table of an operation.
///
/// # Safety
///
/// As for [`flashcore_python_clear`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_python_count(capsule: *mut c_void) -> usize {
    // SAFETY: by the caller.
    unsafe { operation_of(capsule.cast()) }.map_or(0, |operation| operation.launches.count())
}

/// Address of PyCapsule_GetPointer, by which a call finds its operation: a process has one Python.
static CAPSULE_GET: AtomicUsize = AtomicUsize::new(0);

/// # Safety
///
/// As for [`flashcore_python_clear`].
unsafe fn operation_of(capsule: Ref) -> Option<&'static Operation> {
    let address = CAPSULE_GET.load(Ordering::Relaxed);
    if address == 0 {
        return None;
    }
    // SAFETY: the address was taken from the table of functions before the first capsule was made; the capsule has a pointer
    // to an operation, which is never freed.
    unsafe {
        let get = std::mem::transmute::<usize, unsafe extern "C" fn(Ref, *const c_char) -> *mut c_void>(address);
        get(capsule, std::ptr::null()).cast::<Operation>().as_ref()
    }
}

/// The function of Python.
unsafe extern "C" fn call(this: Ref, arguments: *const Ref, count: isize) -> Ref {
    // SAFETY: Python calls this with the capsule that the function was made with, and `count` live arguments.
    unsafe {
        let Some(operation) = operation_of(this) else { return std::ptr::null_mut() };
        let given = match usize::try_from(count) {
            Ok(count) if count > 0 => std::slice::from_raw_parts(arguments, count),
            _ => &[],
        };
        operation.call(given)
    }
}

impl Operation {
    /// # Safety
    ///
    /// `settings` must live, and the lock must be held.
    unsafe fn new(python: Interpreter, settings: Ref) -> Option<Self> {
        // SAFETY: by the caller. Everything that is kept gets a reference that is never given back.
        unsafe {
            let items = python.items(settings)?;
            for &item in &items {
                (python.inc_ref)(item);
            }
            let &[
                tensor_type,
                float_type,
                int_type,
                none,
                yes,
                no,
                float32,
                float16,
                bfloat16,
                uint8,
                dtype_keyword,
                listeners,
                is_grad_enabled,
                stream,
                is_capturing,
                names,
                exchange,
                dispatch,
                miss,
                fail,
                are_tensors,
                required,
                defaults,
            ] = items.as_slice()
            else {
                return None;
            };
            let &[
                shape,
                dtype,
                is_cpu,
                is_cuda,
                requires_grad,
                stride,
                data_ptr,
                get_device,
                is_neg,
                new_empty,
                is_captured,
            ] = python.items(names)?.as_slice()
            else {
                return None;
            };
            let names = Names {
                shape,
                dtype,
                is_cpu,
                is_cuda,
                requires_grad,
                stride,
                data_ptr,
                get_device,
                is_neg,
                new_empty,
                is_captured,
            };
            let exchange = ExchangeFunctions::new(python.address(exchange)? as *const Exchange);
            let defaults = python.items(defaults)?;
            let are_tensors: Vec<bool> = python.items(are_tensors)?.into_iter().map(|item| item == yes).collect();
            let required = usize::try_from(python.integer(required)?).ok()?;
            if defaults.len() > MOST_ARGUMENTS || are_tensors.len() != defaults.len() || required > defaults.len() {
                return None;
            }
            CAPSULE_GET.store(python.capsule_get as usize, Ordering::Relaxed);
            Some(Self {
                reader: Reader { interpreter: python, exchange, names },
                tensor_type,
                float_type,
                int_type,
                // The type of a tuple, which lives as long as the interpreter.
                tuple_type: Owned::new(&python, (python.type_of)(dtype_keyword)).object,
                dtype_type: Owned::new(&python, (python.type_of)(float32)).object,
                none,
                yes,
                no,
                float32,
                float16,
                bfloat16,
                uint8,
                dtype_keyword,
                listeners: python.items(listeners)?,
                is_grad_enabled,
                stream,
                is_capturing,
                dispatch: if dispatch == none { std::ptr::null_mut() } else { dispatch },
                miss,
                fail,
                are_tensors,
                required,
                defaults,
                launches: Table::default(),
            })
        }
    }

    /// # Safety
    ///
    /// `given` must be live arguments, and the lock must be held.
    unsafe fn call(&self, given: &[Ref]) -> Ref {
        let count = self.defaults.len();
        if given.len() > count || given.len() < self.required {
            // SAFETY: by the caller. Python's function says what is wrong with the number of arguments.
            return unsafe { self.slow(given, None) };
        }
        let mut arguments = [std::ptr::null_mut(); MOST_ARGUMENTS];
        arguments[..given.len()].copy_from_slice(given);
        arguments[given.len()..count].copy_from_slice(&self.defaults[given.len()..]);
        let arguments = &arguments[..count];
        // SAFETY: by the caller, and defaults live as long as the operation.
        unsafe {
            let mut key = Key::new();
            let mut addresses = [0; MOST_ARGUMENTS + MOST_OUTPUTS];
            let Some(device) = self.read(arguments, &mut key, &mut addresses) else {
                return self.leave(given);
            };
            let Some(words) = key.words() else { return self.slow(given, None) };
            match self.launches.find(words) {
                Some(launch) => match self.launch(&launch, arguments, &mut addresses, device) {
                    Outcome::Done(result) => result,
                    Outcome::Gone => self.slow(given, Some(words)),
                },
                None => self.slow(given, Some(words)),
            }
        }
    }

    /// Reads all arguments into the key; the device of the first tensor. None for a call that is not plain.
    ///
    /// # Safety
    ///
    /// `arguments` must live, and the lock must be held.
    unsafe fn read(&self, arguments: &[Ref], key: &mut Key, addresses: &mut [u64]) -> Option<i32> {
        let reader = &self.reader;
        let mut device = None;
        // SAFETY: by the caller.
        unsafe {
            let is_below = self.dispatch.is_null();
            let is_watched = !is_below && self.ask(self.is_grad_enabled)?;
            if !is_below {
                for &listener in &self.listeners {
                    if self.ask(listener)? {
                        return None;
                    }
                }
            }
            for (index, (&argument, &is_tensor)) in arguments.iter().zip(&self.are_tensors).enumerate() {
                if argument == self.none {
                    key.push(0);
                } else if is_tensor {
                    if self.type_of(argument) != self.tensor_type {
                        return None;
                    }
                    let tensor = reader.read(argument, key)?;
                    if is_watched && reader.flag(argument, reader.names.requires_grad)? {
                        return None;
                    }
                    // Values of a negative view are those of its memory with the other sign; the dispatcher computes them.
                    if !is_below && reader.asked(argument, reader.names.is_neg)? {
                        return None;
                    }
                    addresses[index] = tensor.address;
                    device = device.or(Some(tensor.device));
                } else {
                    self.read_value(argument, key)?;
                }
            }
        }
        device
    }

    /// Writes a flag, a number, a tuple of integers or a type of elements into the key. None for what is none of them.
    ///
    /// # Safety
    ///
    /// `argument` must live, and the lock must be held.
    unsafe fn read_value(&self, argument: Ref, key: &mut Key) -> Option<()> {
        let python = &self.reader.interpreter;
        // SAFETY: by the caller; items of a tuple live as long as the tuple.
        unsafe {
            if argument == self.no || argument == self.yes {
                key.push(1 + u64::from(argument == self.yes));
                return Some(());
            }
            let argument_type = self.type_of(argument);
            if argument_type == self.float_type {
                key.push(3);
                key.push((python.float_as_f64)(argument).to_bits());
            } else if argument_type == self.int_type {
                key.push(4);
                key.push(python.integer(argument)? as u64);
            } else if argument_type == self.tuple_type {
                let size = (python.tuple_size)(argument);
                key.push(5);
                key.push(size as u64);
                for index in 0..size {
                    let item = (python.tuple_get)(argument, index);
                    if self.type_of(item) != self.int_type {
                        return None;
                    }
                    key.push(python.integer(item)? as u64);
                }
            } else if argument_type == self.dtype_type {
                // Types of elements are objects that torch never frees.
                key.push(6);
                key.push(argument as u64);
            } else {
                return None;
            }
            Some(())
        }
    }

    /// The type of an object, which lives as long as the object.
    ///
    /// # Safety
    ///
    /// `object` must live, and the lock must be held.
    unsafe fn type_of(&self, object: Ref) -> Ref {
        let python = &self.reader.interpreter;
        // SAFETY: by the caller; the address is compared and never followed.
        unsafe { Owned::new(python, (python.type_of)(object)).object }
    }

    /// The answer of a function without arguments.
    ///
    /// # Safety
    ///
    /// The lock must be held.
    unsafe fn ask(&self, function: Ref) -> Option<bool> {
        let python = &self.reader.interpreter;
        // SAFETY: the function lives as long as the operation.
        unsafe {
            let answer = Owned::new(python, (python.call_no_args)(function));
            if answer.object.is_null() {
                (python.error_clear)();
                return None;
            }
            self.reader.truth(&answer)
        }
    }

    /// Allocates the outputs and launches.
    ///
    /// # Safety
    ///
    /// `arguments` must live and be those of the launch's key, and the lock must be held.
    unsafe fn launch(&self, launch: &Launch, arguments: &[Ref], addresses: &mut [u64], device: i32) -> Outcome {
        let (reader, python) = (&self.reader, &self.reader.interpreter);
        let mut outputs: [Option<Owned>; MOST_OUTPUTS] = [const { None }; MOST_OUTPUTS];
        // SAFETY: by the caller; sizes of the arrays were checked when the launch was made.
        unsafe {
            for (index, output) in launch.outputs.iter().enumerate() {
                let dtype = match output.kind {
                    Kind::Shared => {
                        outputs[index] = Some(Owned::borrow(python, output.shape.object));
                        continue;
                    }
                    Kind::Output => std::ptr::null_mut(),
                    Kind::Float => self.float32,
                    Kind::Float16 => self.float16,
                    Kind::BFloat16 => self.bfloat16,
                    Kind::Workspace => self.uint8,
                };
                let keywords = if dtype.is_null() { std::ptr::null_mut() } else { self.dtype_keyword };
                let values = [arguments[0], output.shape.object, dtype];
                let tensor = (python.call_method)(reader.names.new_empty, values.as_ptr(), 2, keywords);
                if tensor.is_null() {
                    return Outcome::Done(tensor);
                }
                outputs[index] = Some(Owned::new(python, tensor));
                match reader.address(tensor) {
                    Some(address) => addresses[arguments.len() + index] = address,
                    None => return Outcome::Gone,
                }
            }
            let mut stream = 0;
            if device >= 0 {
                match self.stream(device) {
                    Some(current) => stream = current,
                    None => return Outcome::Gone,
                }
                if !launch.is_captured.load(Ordering::Relaxed)
                    && self.ask(self.is_capturing) != Some(false)
                    && launch.mark_captured()
                {
                    (python.set_attr)(launch.owner.object, reader.names.is_captured, self.yes);
                }
            }
            let status = launch.run(python, addresses, stream);
            if status == INVALID_PLAN {
                return Outcome::Gone;
            }
            if status != 0 {
                let tuple = Owned::new(python, (python.tuple_new)(1));
                let number = (python.long_from_i64)(i64::from(status));
                if tuple.object.is_null() || number.is_null() {
                    return Outcome::Done(std::ptr::null_mut());
                }
                (python.tuple_set)(tuple.object, 0, number);
                return Outcome::Done((python.call)(self.fail, tuple.object, std::ptr::null_mut()));
            }
            let mut returned = launch
                .outputs
                .iter()
                .zip(&mut outputs)
                .filter(|(output, _)| output.kind != Kind::Workspace)
                .filter_map(|(_, tensor)| tensor.take());
            if !launch.returns_tuple {
                return Outcome::Done(returned.next().map_or(std::ptr::null_mut(), Owned::into_ref));
            }
            let tensors: Vec<Owned> = returned.collect();
            Outcome::Done(self.tuple(tensors))
        }
    }

    /// The current stream of a GPU, by the exchange table or torch's function.
    ///
    /// # Safety
    ///
    /// The lock must be held.
    unsafe fn stream(&self, device: i32) -> Option<u64> {
        if let Some(stream) = self.reader.current_stream(device) {
            return Some(stream);
        }
        let python = &self.reader.interpreter;
        // SAFETY: by the caller.
        unsafe {
            let arguments = self.tuple(vec![Owned::new(python, (python.long_from_i64)(i64::from(device)))]);
            let arguments = Owned::new(python, arguments);
            if arguments.object.is_null() {
                return None;
            }
            let stream = Owned::new(python, (python.call)(self.stream, arguments.object, std::ptr::null_mut()));
            if stream.object.is_null() {
                (python.error_clear)();
                return None;
            }
            python.address(stream.object)
        }
    }

    /// A tuple of objects.
    ///
    /// # Safety
    ///
    /// The lock must be held.
    unsafe fn tuple(&self, items: Vec<Owned>) -> Ref {
        let python = &self.reader.interpreter;
        // SAFETY: the tuple is new, and its places are filled before anyone sees it.
        unsafe {
            let tuple = (python.tuple_new)(items.len() as isize);
            if !tuple.is_null() {
                for (index, item) in items.into_iter().enumerate() {
                    (python.tuple_set)(tuple, index as isize, item.into_ref());
                }
            }
            tuple
        }
    }

    /// A call that is not plain.
    ///
    /// # Safety
    ///
    /// `given` must live, and the lock must be held.
    unsafe fn leave(&self, given: &[Ref]) -> Ref {
        // SAFETY: by the caller.
        unsafe {
            if self.dispatch.is_null() {
                return self.slow(given, None);
            }
            self.call_python(self.dispatch, given)
        }
    }

    /// # Safety
    ///
    /// `given` must live, and the lock must be held.
    unsafe fn call_python(&self, function: Ref, given: &[Ref]) -> Ref {
        let python = &self.reader.interpreter;
        // SAFETY: by the caller.
        unsafe {
            let given = given.iter().map(|&argument| Owned::borrow(python, argument)).collect();
            let arguments = Owned::new(python, self.tuple(given));
            if arguments.object.is_null() {
                return std::ptr::null_mut();
            }
            (python.call)(function, arguments.object, std::ptr::null_mut())
        }
    }

    /// The Python way, which returns (result, launch or None); the launch goes into the table under the key.
    ///
    /// # Safety
    ///
    /// `given` must live, the key must be theirs, and the lock must be held.
    unsafe fn slow(&self, given: &[Ref], key: Option<&[u64]>) -> Ref {
        let python = &self.reader.interpreter;
        // SAFETY: by the caller; `miss` returns launches of libflashcore, by the contract of the operation.
        unsafe {
            let pair = Owned::new(python, self.call_python(self.miss, given));
            if pair.object.is_null() {
                return std::ptr::null_mut();
            }
            let (result, launch) = ((python.tuple_get)(pair.object, 0), (python.tuple_get)(pair.object, 1));
            if result.is_null() || launch.is_null() {
                return std::ptr::null_mut();
            }
            let result = Owned::borrow(python, result);
            if let Some(key) = key
                && launch != self.none
                && let Some(launch) = Launch::parse(python, launch, self.defaults.len())
            {
                self.launches.keep(key, launch);
            }
            result.into_ref()
        }
    }
}
