//! Typed device buffers of `cudarc`: launches without `unsafe`.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use flashcore::cudarc::{TypedTensors, launch};
//! use flashcore::{DType, Device, Plan, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let problem = Problem::new(2, 8, 1000, 64, DType::F32).with_lse(true);
//! let plan = Plan::new(&problem, &Device::cuda(0)?)?;
//!
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let elements = 2 * 8 * 1000 * 64;
//! let (query, key) = (stream.alloc_zeros::<f32>(elements)?, stream.alloc_zeros::<f32>(elements)?);
//! let (mut output, mut lse) = (stream.alloc_zeros::<f32>(elements)?, stream.alloc_zeros::<f32>(2 * 8 * 1000)?);
//! launch(&plan, &stream, TypedTensors::new(&query, &key, &key, &mut output).with_lse(&mut lse))?;
//! # Ok(())
//! # }
//! ```
//!
//! The cargo feature `cudarc` chooses no CUDA version: the program does, by a feature of its own dependency on `cudarc`
//! (`cuda-12000` and later). `CudaSlice<f16>` can be filled from the host with `cudarc`'s feature `f16`.

use std::sync::Arc;

use ::cudarc::driver::sys::CUstreamCaptureStatus;
use ::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, DriverError,
    SyncOnDrop,
};
use flashcore_cuda::{CudaError, Failure};
use flashcore_problem::{BiasStrides, CallStrides, DType, Invalid, Operand, ScaleStrides, TensorError, operands};
use half::{bf16, f16};

use crate::operation::Use;
use crate::{DeviceTensors, Error, Operation, Plan};

mod sealed {
    pub trait Sealed {}
}

/// An element type of query, key, value and output: `f16`, `bf16` or `f32`, or `u8` for the bytes of any of them.
pub trait DeviceElement: sealed::Sealed + 'static {
    /// The element type; `None` for bytes.
    const DTYPE: Option<DType>;
}

macro_rules! device_elements {
    ($($type:ty: $dtype:expr;)*) => {
        $(impl sealed::Sealed for $type {}

        impl DeviceElement for $type {
            const DTYPE: Option<DType> = $dtype;
        })*
    };
}

device_elements! {
    f16: Some(DType::F16);
    bf16: Some(DType::Bf16);
    f32: Some(DType::F32);
    u8: None;
}

/// A buffer that is read: a `&CudaSlice`, or a `CudaView` of a part of one.
#[derive(Debug)]
pub struct Input<'a, T>(CudaView<'a, T>);

/// A buffer that is written: a `&mut CudaSlice`, or a `CudaViewMut` of a part of one.
#[derive(Debug)]
pub struct Output<'a, T>(CudaViewMut<'a, T>);

impl<'a, T> From<&'a CudaSlice<T>> for Input<'a, T> {
    fn from(slice: &'a CudaSlice<T>) -> Self {
        Self(slice.as_view())
    }
}

impl<'a, T> From<CudaView<'a, T>> for Input<'a, T> {
    fn from(view: CudaView<'a, T>) -> Self {
        Self(view)
    }
}

impl<'a, T> From<&'a mut CudaSlice<T>> for Output<'a, T> {
    fn from(slice: &'a mut CudaSlice<T>) -> Self {
        Self(slice.as_view_mut())
    }
}

impl<'a, T> From<CudaViewMut<'a, T>> for Output<'a, T> {
    fn from(view: CudaViewMut<'a, T>) -> Self {
        Self(view)
    }
}

/// A buffer of any element type.
trait Buffer {
    fn bytes(&self) -> usize;
    fn context(&self) -> &Arc<CudaContext>;
    /// Makes `stream` wait for earlier uses that conflict. Later ones wait for what is enqueued until the guard is dropped.
    fn claim<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>);
}

impl<T> Buffer for Input<'_, T> {
    fn bytes(&self) -> usize {
        self.0.num_bytes()
    }

    fn context(&self) -> &Arc<CudaContext> {
        self.0.stream().context()
    }

    fn claim<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        self.0.device_ptr(stream)
    }
}

impl<T> Buffer for Output<'_, T> {
    fn bytes(&self) -> usize {
        self.0.num_bytes()
    }

    fn context(&self) -> &Arc<CudaContext> {
        self.0.stream().context()
    }

    fn claim<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        self.0.device_ptr_mut(stream)
    }
}

/// The element type of a kind of operand.
macro_rules! element {
    (Tensor $tensor:ident) => {
        $tensor
    };
    (Tensors $tensor:ident) => {
        $tensor
    };
    (Bias $tensor:ident) => {
        f32
    };
    (Scale $tensor:ident) => {
        f32
    };
    (Positions $tensor:ident) => {
        i64
    };
    ($element:ident $tensor:ident) => {
        $element
    };
}

/// The setter of an operand: with strides in elements where they come with each call.
macro_rules! setter {
    (reads Bias $T:ident $name:ident $Name:ident $with:ident) => {
        /// The bias that is added to the scores, and its strides in elements.
        #[must_use]
        pub fn $with(mut self, buffer: impl Into<Input<'a, f32>>, strides: BiasStrides) -> Self {
            (self.$name, self.strides.bias) = (Some(buffer.into()), strides);
            self
        }
    };
    (reads Scale $T:ident $name:ident $Name:ident $with:ident) => {
        #[doc = concat!("Adds the operand [`", stringify!($Name), "`](Operand::", stringify!($Name), ") and its strides in elements.")]
        #[must_use]
        pub fn $with(mut self, buffer: impl Into<Input<'a, f32>>, strides: ScaleStrides) -> Self {
            self.$name = Some(buffer.into());
            self.strides.scales[Operand::$Name as usize - Operand::PARAMETERS] = strides;
            self
        }
    };
    ($access:ident $kind:ident $T:ident $name:ident $Name:ident $with:ident) => {
        #[doc = concat!("Adds the operand [`", stringify!($Name), "`](Operand::", stringify!($Name), ").")]
        #[must_use]
        pub fn $with(mut self, buffer: impl Into<buffer!($access 'a, element!($kind $T))>) -> Self {
            self.$name = Some(buffer.into());
            self
        }
    };
}

macro_rules! buffer {
    (reads $a:lifetime, $element:ty) => { Input<$a, $element> };
    (writes $a:lifetime, $element:ty) => { Output<$a, $element> };
}

macro_rules! define_typed_tensors {
    ($($(#[$doc:meta])* $name:ident: $Name:ident, $with:ident,
        $(reads $in:ident)? $(writes $out:ident)? $(, or writes $computed:ident)?;)*) => {
        /// Buffers of the operands of a problem, borrowed for a [`launch`]. The elements lie where the problem's
        /// [strides](flashcore_problem::Problem::strides) say, from the first one of each buffer.
        pub struct TypedTensors<'a, T> {
            $($name: $(Option<Input<'a, element!($in T)>>)? $(Option<Output<'a, element!($out T)>>)?,)*
            strides: CallStrides,
        }

        impl<'a, T: DeviceElement> TypedTensors<'a, T> {
            /// Query, key, value and output, and nothing else.
            pub fn new(
                query: impl Into<Input<'a, T>>,
                key: impl Into<Input<'a, T>>,
                value: impl Into<Input<'a, T>>,
                output: impl Into<Output<'a, T>>,
            ) -> Self {
                let none = Self { $($name: None,)* strides: CallStrides::NONE };
                none.with_query(query).with_key(key).with_value(value).with_output(output)
            }

            $($(setter!(reads $in T $name $Name $with);)? $(setter!(writes $out T $name $Name $with);)?)*

            /// The buffer of each operand, in the order of the table.
            fn buffers(&mut self) -> [Option<&mut dyn Buffer>; Operand::COUNT] {
                [$(self.$name.as_mut().map(|buffer| buffer as _),)*]
            }
        }
    };
}

operands!(define_typed_tensors);

/// Puts the kernels of a plan on a stream of `cudarc`, and returns before they have finished.
///
/// Element type and length of each buffer are checked against the plan's [problem](Plan::problem); a buffer may be longer
/// than its tensor. The stream waits for earlier uses of the buffers on other streams, and later uses wait for the
/// launch, as with every call of `cudarc`. [`Plan::launch`] is for addresses, and for launches that are captured into a
/// CUDA graph, which is an error here: a graph does not keep the buffers it uses alive.
pub fn launch<T: DeviceElement>(
    plan: &Plan,
    stream: &Arc<CudaStream>,
    mut tensors: TypedTensors<'_, T>,
) -> Result<(), Error> {
    let Some(context) = plan.device().context() else {
        return Err(Error::NotOnCuda { call: "flashcore::cudarc::launch", device: plan.device().to_string() });
    };
    let device = || plan.device().to_string();
    let strides = tensors.strides;
    let mut buffers = tensors.buffers();
    check(plan.operation(), strides, T::DTYPE, &buffers.each_ref().map(|buffer| buffer.as_ref().map(|it| it.bytes())))?;
    if stream.context().cu_ctx().cast() != context.raw() {
        return Err(Error::OtherContext { argument: "stream", device: device() });
    }
    let mut addresses = DeviceTensors::new(0, 0, 0, 0);
    addresses.set_call_strides(strides);
    // Dropped when the launch is enqueued: the events that they record come after it.
    let mut guards = [const { None::<SyncOnDrop<'_>> }; Operand::COUNT];
    for ((&operand, buffer), guard) in Operand::ALL.iter().zip(&mut buffers).zip(&mut guards) {
        let Some(buffer) = buffer else { continue };
        // One that counts the streams of another `CudaContext` would not be tracked by events on this stream.
        if !Arc::ptr_eq(buffer.context(), stream.context()) {
            return Err(Error::OtherContext { argument: operand.name(), device: device() });
        }
        let (address, claimed) = buffer.claim(stream);
        addresses.set(operand, address);
        *guard = Some(claimed);
    }
    // A wait that failed leaves its error in the context, and a wait for a captured stream makes this one captured.
    stream.context().check_err().map_err(failure)?;
    if stream.capture_status().map_err(failure)? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Err(CudaError::Capturing { call: "flashcore::cudarc::launch" }.into());
    }
    // SAFETY:
    // * Addresses are those of buffers in the context of the plan that are as long as the tensors of its problem: both
    //   were checked above, and the fields of `Input` and `Output` are of types whose lengths are `cudarc`'s word.
    // * Outputs are borrowed exclusively, so they lie apart from all else, and nobody uses them before this call returns.
    //   Afterwards `cudarc` makes whoever uses or frees a buffer wait for the events that the guards record.
    // * Nothing that kernels read from the device leads past a tensor: lengths, offsets of sequences, page numbers and
    //   indices of tables are clamped in the kernel.
    // * The stream is one of the plan's context, and records no graph.
    // * A plan may be dropped before the launch has finished: `cuMemFree`, by which its workspace goes, returns after the
    //   work that uses it, and `cuModuleUnload`, by which its kernels go, after the launches of them.
    unsafe { plan.launch(stream.cu_stream(), addresses) }
}

/// Everything that is wrong with buffers of these bytes, by operand, and with elements of `dtype` for a valid operation.
fn check(
    operation: &Operation,
    strides: CallStrides,
    dtype: Option<DType>,
    bytes: &[Option<usize>; Operand::COUNT],
) -> Result<(), Invalid> {
    let mut errors = Vec::new();
    for ((&operand, &bytes), of) in Operand::ALL.iter().zip(bytes).zip(operation.uses(strides, None)) {
        let tensor = operand.name();
        match (of, bytes) {
            (Some(_), None) => errors.push(TensorError::Missing { tensor }),
            (None, Some(_)) => errors.push(TensorError::Unexpected { tensor }),
            (None, None) => {}
            (Some(Use { dtype: expected, element_bytes, elements: needed, .. }), Some(bytes)) => {
                if let (Some(expected), Some(actual)) = (expected, dtype)
                    && actual != expected
                {
                    errors.push(TensorError::DType { tensor, actual, expected });
                    continue;
                }
                let actual = bytes / element_bytes;
                if actual < needed {
                    errors.push(TensorError::TooShort { tensor, actual, needed });
                }
            }
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
}

/// An error of `cudarc` as one of the driver, which it is.
fn failure(error: DriverError) -> Error {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    let (name, description) = (text(error.error_name()), text(error.error_string()));
    let call = "a call of cudarc";
    CudaError::Call(Box::new(Failure { call, code: error.0 as u32, name, text: description, last_launch: None })).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{PagedKv, Problem};

    /// Elements of the operands of the problem in `checked`, in the order of the table.
    const ELEMENTS: [usize; Operand::PARAMETERS] = [960, 480, 480, 960, 60, 3, 3, 2, 2, 2, 2, 12, 6, 6, 7, 9, 150];
    const STRIDES: BiasStrides = BiasStrides { batch: 0, head: 25, row: 5, key: 1 };

    /// A problem with every operand, and the bytes of each.
    fn checked(dtype: Option<DType>, change: impl FnOnce(&mut Problem, &mut [Option<usize>])) -> Vec<TensorError> {
        let mut problem = Problem::new(2, 6, 5, 16, DType::F16);
        problem.key_heads = 3;
        (problem.lse, problem.seqused_k, problem.alibi, problem.sinks, problem.bias) = (true, true, true, true, true);
        (problem.aux_f32, problem.aux_i32) = (7, 9);
        (problem.total_q, problem.total_k, problem.kv_batch) = (Some(10), Some(10), Some(4));
        (problem.seqused_q, problem.leftpad_k) = (true, true);
        problem.paged = Some(PagedKv::new(5, 2, 3));
        // There are no scales.
        let mut bytes: [Option<usize>; Operand::COUNT] =
            std::array::from_fn(|index| Some(ELEMENTS.get(index)? * Operand::ALL[index].element_bytes(&problem)));
        change(&mut problem, &mut bytes);
        match check(&(&problem).into(), STRIDES.into(), dtype, &bytes) {
            Ok(()) => Vec::new(),
            Err(Invalid::Tensors(errors)) => errors,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn buffers_that_fit_are_taken() {
        for dtype in [Some(DType::F16), None] {
            assert_eq!(checked(dtype, |_, _| {}), []);
            assert_eq!(checked(dtype, |_, bytes| bytes.iter_mut().flatten().for_each(|bytes| *bytes += 4)), []);
        }
    }

    /// One element less, of each operand in turn, is an error of that operand.
    #[test]
    fn short_buffers_are_errors() {
        for (index, &operand) in Operand::ALL[..Operand::PARAMETERS].iter().enumerate() {
            let (tensor, needed) = (operand.name(), ELEMENTS[index]);
            let errors = checked(Some(DType::F16), |_, bytes| bytes[index] = bytes[index].map(|bytes| bytes - 1));
            assert_eq!(errors, [TensorError::TooShort { tensor, actual: needed - 1, needed }]);
        }
    }

    #[test]
    fn strides_reach_past_the_elements() {
        let errors = checked(None, |problem, _| {
            let mut strides = problem.strides();
            strides.key.batch += 8;
            problem.layout = flashcore_problem::Layout::Strided(strides);
        });
        assert_eq!(errors, [TensorError::TooShort { tensor: "key", actual: 480, needed: 488 }]);
    }

    #[test]
    fn operands_are_there_if_the_problem_has_them() {
        let missing =
            checked(None, |_, bytes| (bytes[Operand::Lse as usize], bytes[Operand::Bias as usize]) = (None, None));
        assert_eq!(missing, [TensorError::Missing { tensor: "lse" }, TensorError::Missing { tensor: "bias" }]);
        let unexpected = checked(None, |problem, _| problem.sinks = false);
        assert_eq!(unexpected, [TensorError::Unexpected { tensor: "sinks" }]);
    }

    #[test]
    fn another_element_type_is_an_error() {
        let (actual, expected) = (DType::Bf16, DType::F16);
        let errors = checked(Some(actual), |_, _| {});
        let tensors = ["query", "key", "value", "output"];
        assert_eq!(errors, tensors.map(|tensor| TensorError::DType { tensor, actual, expected }));
    }
}
