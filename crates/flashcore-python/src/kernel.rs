//! Kernels of torch's operators, registered through libtorch's C interface: calls of `torch.ops.flashcore.*` that were seen
//! before come here from the dispatcher, without a step of the interpreter and without its lock.
//!
//! The rest, calls of a new kind and failures, goes to a Python function as in an operation.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use crate::interpreter::{Interpreter, Lock, Owned, Ref};
use crate::key::Key;
use crate::launch::{INVALID_PLAN, Kind, Launch, MOST_OUTPUTS};
use crate::table::Table;
use crate::torch::{self, Handle, Place, Torch, Value};

/// Most arguments of an operator.
const MOST_ARGUMENTS: usize = 40;
/// Most operators: a kernel gets nothing but its arguments, so that each has a function of its own.
const MOST_KERNELS: usize = 8;

/// The type of an argument, by its letter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ArgumentType {
    Tensor,
    OptionalTensor,
    /// An integer or a float: its bits.
    Number,
    /// True or false, in the lowest byte; the others may hold anything.
    Flag,
    OptionalNumber,
}

impl ArgumentType {
    fn new(letter: u8) -> Option<Self> {
        Some(match letter {
            b'T' => Self::Tensor,
            b't' => Self::OptionalTensor,
            b'N' => Self::Number,
            b'b' => Self::Flag,
            b'n' => Self::OptionalNumber,
            _ => return None,
        })
    }

    fn is_tensor(self) -> bool {
        matches!(self, Self::Tensor | Self::OptionalTensor)
    }
}

/// An operator's kernel.
struct Operator {
    python: Interpreter,
    torch: Torch,
    cuda: i32,
    float32: i32,
    float16: i32,
    bfloat16: i32,
    uint8: i32,
    types: Vec<ArgumentType>,
    /// True for an operator that has no kernel for autograd: Python refuses tensors that require grad.
    refuses_grad: bool,
    /// aoti_torch_get_current_cuda_stream, or 0.
    stream: usize,
    /// cuStreamIsCapturing, or 0.
    is_capturing: usize,
    miss: Ref,
    fail: Ref,
    is_captured: Ref,
    yes: Ref,
    launches: Table,
}

// SAFETY: the references to objects live as long as the process, and are used with the lock of the interpreter held only.
unsafe impl Send for Operator {}
// SAFETY: as above.
unsafe impl Sync for Operator {}

static OPERATORS: [OnceLock<Operator>; MOST_KERNELS] = [const { OnceLock::new() }; MOST_KERNELS];

/// The function of one operator.
unsafe extern "C-unwind" fn kernel<const INDEX: usize>(stack: *mut Value, count: u64, results: u64) {
    let Some(operator) = OPERATORS[INDEX].get() else { return };
    // SAFETY: the dispatcher hands over as many values as the schema has arguments. Nothing is left to drop but the text.
    unsafe {
        if let Err(text) = operator.call(stack, count, results) {
            // The exception copies the text, and nobody frees it after that: it is kept in the thread until the next one.
            operator.torch.fail(keep(text));
        }
    }
}

/// Puts a text where it lives until the thread has another one.
fn keep(text: CString) -> &'static CStr {
    thread_local! {
        static TEXT: std::cell::Cell<*mut c_char> = const { std::cell::Cell::new(std::ptr::null_mut()) };
    }
    let text = text.into_raw();
    let before = TEXT.replace(text);
    // SAFETY: both come from `into_raw`; the one before was thrown, and copied, long ago.
    unsafe {
        if !before.is_null() {
            drop(CString::from_raw(before));
        }
        CStr::from_ptr(text)
    }
}

const KERNELS: [torch::Kernel; MOST_KERNELS] =
    [kernel::<0>, kernel::<1>, kernel::<2>, kernel::<3>, kernel::<4>, kernel::<5>, kernel::<6>, kernel::<7>];

/// Names of the functions of libtorch whose addresses [`flashcore_python_kernel`] takes, in order, one a line.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_python_torch_symbols() -> *const c_char {
    Torch::SYMBOLS.as_ptr().cast()
}

/// Registers a kernel for an operator that is defined: its number, or a negative number if it cannot be.
///
/// `settings` is the tuple that `flashcore/torch/_stable.py` makes.
///
/// # Safety
///
/// Both arrays must have the addresses of the functions of [`crate::flashcore_python_symbols`] and
/// [`flashcore_python_torch_symbols`]; `settings` must live, and the thread must hold the lock of the interpreter. What
/// `miss` returns must be launches of libflashcore.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_python_kernel(
    python: *const usize,
    python_count: usize,
    torch: *const usize,
    torch_count: usize,
    settings: *mut c_void,
) -> i32 {
    // SAFETY: by the caller.
    unsafe {
        let Some(python) = Interpreter::new(std::slice::from_raw_parts(python, python_count)) else { return -1 };
        let Some(torch) = Torch::new(std::slice::from_raw_parts(torch, torch_count)) else { return -2 };
        register(python, torch, settings.cast()).unwrap_or(-3)
    }
}

/// Forgets all launches of a kernel.
///
/// # Safety
///
/// The thread must hold the lock of the interpreter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_python_kernel_clear(index: i32) {
    if let Some(operator) = operator(index) {
        operator.launches.clear();
    }
}

/// Number of launches in the table of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_python_kernel_count(index: i32) -> usize {
    operator(index).map_or(0, |operator| operator.launches.count())
}

fn operator(index: i32) -> Option<&'static Operator> {
    OPERATORS.get(usize::try_from(index).ok()?)?.get()
}

/// # Safety
///
/// `settings` must live, and the lock must be held.
unsafe fn register(python: Interpreter, torch: Torch, settings: Ref) -> Option<i32> {
    // SAFETY: by the caller. Everything that is kept gets a reference that is never given back.
    unsafe {
        let items = python.items(settings)?;
        for &item in &items {
            (python.inc_ref)(item);
        }
        let &[namespace, name, keys, letters, refuses_grad, stream, is_capturing, miss, fail, is_captured, yes] =
            items.as_slice()
        else {
            return None;
        };
        let types: Vec<ArgumentType> = text_of(&python, letters)?
            .to_bytes()
            .iter()
            .map(|&letter| ArgumentType::new(letter))
            .collect::<Option<_>>()?;
        if types.len() > MOST_ARGUMENTS || types.first() != Some(&ArgumentType::Tensor) {
            return None;
        }
        let operator = Operator {
            python,
            torch,
            cuda: (torch.cuda)(),
            float32: (torch.float32)(),
            float16: (torch.float16)(),
            bfloat16: (torch.bfloat16)(),
            uint8: (torch.uint8)(),
            types,
            refuses_grad: refuses_grad == yes,
            stream: usize::try_from(python.address(stream)?).ok()?,
            is_capturing: usize::try_from(python.address(is_capturing)?).ok()?,
            miss,
            fail,
            is_captured,
            yes,
            launches: Table::default(),
        };
        let index = OPERATORS.iter().position(|place| place.get().is_none())?;
        OPERATORS[index].set(operator).ok()?;
        for key in python.items(keys)? {
            let mut library = std::ptr::null_mut();
            let (namespace, key) = (text_of(&python, namespace)?, text_of(&python, key)?);
            let failed =
                (torch.new_library)(namespace.as_ptr(), key.as_ptr(), c"flashcore".as_ptr(), 0, &raw mut library);
            // The library stays: its end would take the kernel away.
            if failed != 0 || (torch.implement)(library, text_of(&python, name)?.as_ptr(), KERNELS[index]) != 0 {
                return None;
            }
        }
        i32::try_from(index).ok()
    }
}

/// The text of a bytes object, which lives as long as the object.
///
/// # Safety
///
/// `object` must live as long as the process, and the lock must be held.
unsafe fn text_of(python: &Interpreter, object: Ref) -> Option<&'static CStr> {
    let (mut data, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: by the caller; bytes have a zero after their end.
    unsafe {
        if (python.bytes_as_slice)(object, &raw mut data, &raw mut size) != 0 {
            (python.error_clear)();
            return None;
        }
        Some(CStr::from_ptr(data))
    }
}

/// Handles of results and workspaces, deleted unless they are handed over.
struct Outputs<'a> {
    torch: &'a Torch,
    handles: [Handle; MOST_OUTPUTS],
}

impl Drop for Outputs<'_> {
    fn drop(&mut self) {
        for handle in self.handles {
            if !handle.is_null() {
                // SAFETY: the handle is owned.
                unsafe { (self.torch.delete)(handle) };
            }
        }
    }
}

/// Arguments without their boxes: a handle or a number, and whether there is one.
struct Arguments {
    values: [Value; MOST_ARGUMENTS],
    are_given: [bool; MOST_ARGUMENTS],
}

impl Operator {
    /// Takes the arguments from the stack and puts the results there; the text of the exception if it failed.
    ///
    /// # Safety
    ///
    /// `stack` must have `count` values of the schema's types, all of them owned, and room for `results`.
    unsafe fn call(&self, stack: *mut Value, count: u64, results: u64) -> Result<(), CString> {
        if count != self.types.len() as u64 || results != 2 {
            return Err(c"flashcore: the operator was called with other arguments than those of its schema".into());
        }
        // SAFETY: by the caller.
        unsafe {
            let arguments = self.take(stack);
            let mut key = Key::new();
            let mut addresses = [0; MOST_ARGUMENTS + MOST_OUTPUTS];
            let place = self.read(&arguments, &mut key, &mut addresses);
            let words = key.words().filter(|_| place.is_some());
            let is_plain = !(self.refuses_grad && (self.torch.is_grad_enabled)());
            if is_plain
                && let (Some(words), Some(place)) = (words, place)
                && let Some(launch) = self.launches.find(words)
            {
                let outcome = self.launch(&launch, &mut addresses, place, stack);
                if let Some(last) = Arc::into_inner(launch) {
                    // The table has forgotten it meanwhile: it has references to objects.
                    let _lock = Lock::take(&self.python);
                    drop(last);
                }
                match outcome {
                    Ok(()) => {
                        self.delete(&arguments);
                        return Ok(());
                    }
                    Err(INVALID_PLAN) => {}
                    Err(status) => {
                        self.delete(&arguments);
                        return Err(self.reason(status));
                    }
                }
            }
            self.slow(&arguments, words, stack)
        }
    }

    /// Takes the arguments out of their boxes.
    ///
    /// # Safety
    ///
    /// As for `call`.
    unsafe fn take(&self, stack: *mut Value) -> Arguments {
        let mut arguments = Arguments { values: [0; MOST_ARGUMENTS], are_given: [true; MOST_ARGUMENTS] };
        for (index, &kind) in self.types.iter().enumerate() {
            // SAFETY: by the caller; the address of a box is that of one value, and the box is freed once.
            unsafe {
                let value = stack.add(index).read();
                arguments.values[index] = if kind == ArgumentType::Flag { value & 0xff } else { value };
                if matches!(kind, ArgumentType::OptionalTensor | ArgumentType::OptionalNumber) {
                    arguments.are_given[index] = value != 0;
                    if value != 0 {
                        let place = value as *mut Value;
                        arguments.values[index] = place.read();
                        (self.torch.delete_box)(place.cast());
                    }
                }
            }
        }
        arguments
    }

    /// Gives the tensors of the arguments back.
    ///
    /// # Safety
    ///
    /// They must be owned, and not be used after.
    unsafe fn delete(&self, arguments: &Arguments) {
        for (index, kind) in self.types.iter().enumerate() {
            if kind.is_tensor() && arguments.are_given[index] {
                // SAFETY: by the caller.
                unsafe { (self.torch.delete)(arguments.values[index] as Handle) };
            }
        }
    }

    /// Reads all arguments into the key; the first tensor's type and device. None for what cannot be read.
    ///
    /// # Safety
    ///
    /// The tensors must live.
    unsafe fn read(&self, arguments: &Arguments, key: &mut Key, addresses: &mut [u64]) -> Option<Place> {
        let mut first = None;
        for (index, kind) in self.types.iter().enumerate() {
            if !arguments.are_given[index] {
                key.push(0);
            } else if kind.is_tensor() {
                let tensor = arguments.values[index] as Handle;
                // SAFETY: by the caller.
                unsafe {
                    let place = self.torch.place(tensor)?;
                    let (sizes, strides) = self.torch.shape(tensor)?;
                    key.push(((place.dtype as u64) << 32) | (sizes.len() as u64 + 1));
                    key.push(((place.device_type as u64) << 32) | u64::from(place.device_index as u32));
                    for (&size, &stride) in sizes.iter().zip(strides) {
                        key.push(size as u64);
                        key.push(stride as u64);
                    }
                    addresses[index] = self.torch.address(tensor)?;
                    first = first.or(Some(place));
                }
            } else {
                key.push(1);
                key.push(arguments.values[index]);
            }
        }
        first
    }

    /// Allocates the outputs, launches, and puts the results onto the stack; the status if it failed.
    ///
    /// # Safety
    ///
    /// `addresses` must be those of the arguments of the launch's key, which live, and `stack` must have room.
    unsafe fn launch(
        &self,
        launch: &Launch,
        addresses: &mut [u64],
        place: Place,
        stack: *mut Value,
    ) -> Result<(), i32> {
        let torch = &self.torch;
        let mut outputs = Outputs { torch, handles: [std::ptr::null_mut(); MOST_OUTPUTS] };
        // SAFETY: by the caller; sizes and strides of an output have as many entries.
        unsafe {
            for (index, output) in launch.outputs.iter().enumerate() {
                let dtype = match output.kind {
                    Kind::Output => place.dtype,
                    Kind::Float => self.float32,
                    Kind::Float16 => self.float16,
                    Kind::BFloat16 => self.bfloat16,
                    Kind::Workspace => self.uint8,
                    Kind::Shared => return Err(INVALID_PLAN),
                };
                let failed = (torch.empty)(
                    output.sizes.len() as i64,
                    output.sizes.as_ptr(),
                    output.strides.as_ptr(),
                    dtype,
                    place.device_type,
                    place.device_index,
                    &raw mut outputs.handles[index],
                );
                // Without memory the Python way fails with torch's own words.
                let address = if failed == 0 { torch.address(outputs.handles[index]) } else { None };
                addresses[self.types.len() + index] = address.ok_or(INVALID_PLAN)?;
            }
            let mut stream = 0;
            if place.device_type == self.cuda {
                stream = self.current_stream(place.device_index).ok_or(INVALID_PLAN)?;
                self.mark(launch, stream);
            }
            let status = launch.run_unlocked(addresses, stream);
            if status != 0 {
                return Err(status);
            }
            let results =
                launch.outputs.iter().zip(&mut outputs.handles).filter(|(output, _)| output.kind != Kind::Workspace);
            for (index, (_, handle)) in results.enumerate().take(2) {
                stack.add(index).write(std::mem::replace(handle, std::ptr::null_mut()) as Value);
            }
            Ok(())
        }
    }

    /// The current stream of a GPU; none if torch does not tell.
    ///
    /// # Safety
    ///
    /// The GPU must be one that a tensor is on.
    unsafe fn current_stream(&self, device: i32) -> Option<u64> {
        if self.stream == 0 {
            return None;
        }
        let mut stream = std::ptr::null_mut();
        // SAFETY: the address is that of aoti_torch_get_current_cuda_stream.
        unsafe {
            let current = std::mem::transmute::<usize, unsafe extern "C" fn(i32, *mut *mut c_void) -> i32>(self.stream);
            (current(device, &raw mut stream) == 0).then_some(stream as u64)
        }
    }

    /// Tells the plan that a CUDA graph has captured it, if that may be.
    ///
    /// # Safety
    ///
    /// `stream` must be a stream of the driver.
    unsafe fn mark(&self, launch: &Launch, stream: u64) {
        if launch.is_captured.load(Ordering::Relaxed) {
            return;
        }
        let mut status = 0;
        if self.is_capturing != 0 {
            // SAFETY: the address is that of cuStreamIsCapturing.
            let failed = unsafe {
                std::mem::transmute::<usize, unsafe extern "C" fn(u64, *mut i32) -> i32>(self.is_capturing)(
                    stream,
                    &raw mut status,
                )
            };
            if failed == 0 && status == 0 {
                return;
            }
        }
        // Captured, or nobody can say: such a plan stays.
        if launch.mark_captured() {
            let _lock = Lock::take(&self.python);
            // SAFETY: the plan lives as long as the launch, and the lock is held.
            unsafe {
                if (self.python.set_attr)(launch.owner.object, self.is_captured, self.yes) != 0 {
                    (self.python.error_clear)();
                }
            }
        }
    }

    /// The words of a launch that failed, of the same thread.
    fn reason(&self, status: i32) -> CString {
        let _lock = Lock::take(&self.python);
        let python = &self.python;
        // SAFETY: the lock is held, and the functions live as long as the process.
        unsafe {
            let number = Owned::new(python, (python.long_from_i64)(i64::from(status)));
            let text = Owned::new(python, self.call_python(self.fail, &[number.object]));
            self.text(text.object)
        }
    }

    /// A text of Python's; the lock must be held.
    ///
    /// # Safety
    ///
    /// `object` must be null or live.
    unsafe fn text(&self, object: Ref) -> CString {
        let (mut data, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: by the caller.
        unsafe {
            if object.is_null() || (self.python.bytes_as_slice)(object, &raw mut data, &raw mut size) != 0 {
                (self.python.error_clear)();
                return c"flashcore failed, and could not say why".into();
            }
            CStr::from_ptr(data).into()
        }
    }

    /// The result of a function of Python.
    ///
    /// # Safety
    ///
    /// `given` must live or be null, and the lock must be held.
    unsafe fn call_python(&self, function: Ref, given: &[Ref]) -> Ref {
        let python = &self.python;
        // SAFETY: by the caller; the tuple takes a reference of each.
        unsafe {
            let tuple = Owned::new(python, (python.tuple_new)(given.len() as isize));
            if tuple.object.is_null() || given.iter().any(|object| object.is_null()) {
                return std::ptr::null_mut();
            }
            for (index, &object) in given.iter().enumerate() {
                (python.tuple_set)(tuple.object, index as isize, Owned::borrow(python, object).into_ref());
            }
            (python.call)(function, tuple.object, std::ptr::null_mut())
        }
    }

    /// The Python way: `miss` takes the arguments, tensors as handles that it owns from then on, and returns (handles of the
    /// results or None, launch or None, text). The launch goes into the table under the key.
    ///
    /// # Safety
    ///
    /// The tensors must be owned, the key must be theirs, and `stack` must have room for two results.
    unsafe fn slow(&self, arguments: &Arguments, key: Option<&[u64]>, stack: *mut Value) -> Result<(), CString> {
        let _lock = Lock::take(&self.python);
        let python = &self.python;
        // SAFETY: by the caller; `miss` returns launches of libflashcore, by the contract of the kernel.
        unsafe {
            // Pairs of a flag and a value: 0 is a number as well as no number.
            let numbers: Vec<Owned> = (0..self.types.len())
                .flat_map(|index| [i64::from(arguments.are_given[index]), arguments.values[index] as i64])
                .map(|number| Owned::new(python, (python.long_from_i64)(number)))
                .collect();
            let given: Vec<Ref> = numbers.iter().map(|number| number.object).collect();
            let answer = Owned::new(python, self.call_python(self.miss, &given));
            let items = if answer.object.is_null() { None } else { python.items(answer.object) };
            let Some(&[results, launch, text]) = items.as_deref() else {
                (python.error_clear)();
                return Err(c"flashcore: the Python part of an operator failed".into());
            };
            let handles = python.items(results).unwrap_or_default();
            let handles: Vec<u64> = handles.into_iter().filter_map(|handle| python.address(handle)).collect();
            (python.error_clear)();
            let &[first, second] = handles.as_slice() else { return Err(self.text(text)) };
            stack.write(first);
            stack.add(1).write(second);
            if let Some(key) = key
                && let Some(launch) = Launch::parse(python, launch, self.types.len())
            {
                self.launches.keep(key, launch);
            }
            (python.error_clear)();
            Ok(())
        }
    }
}
