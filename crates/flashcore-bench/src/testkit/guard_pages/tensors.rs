//! The tensors of a problem in guarded buffers.

use std::io;
use std::sync::Arc;

use flashcore_problem::{
    Bias, BiasStrides, BiasView, DType, InputViews, Inputs, OutputViews, Outputs, Problem, Tensor, TensorView,
    TensorViewMut,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::pages::ReadOnly;
use super::{Edge, GuardedBuffer, Label};

/// Everything that a backend reads, each tensor in pages of its own that cannot be written.
#[derive(Debug)]
pub struct GuardedInputs {
    dtype: DType,
    query: ReadOnly,
    key: ReadOnly,
    value: ReadOnly,
    alibi_slopes: Option<ReadOnly>,
    sinks: Option<ReadOnly>,
    bias: Option<(ReadOnly, BiasStrides)>,
    seqused_k: Option<ReadOnly>,
    aux_f32: Option<ReadOnly>,
    aux_i32: Option<ReadOnly>,
}

impl GuardedInputs {
    /// A copy of `inputs`; `case` is what a fault is reported by.
    pub fn new(inputs: &Inputs, edge: Edge, case: &Arc<str>) -> io::Result<Self> {
        let guarded = |tensor: &'static str, bytes: &[u8]| {
            GuardedBuffer::new(bytes, edge, Label { tensor, case: Arc::clone(case) })?.read_only()
        };
        let optional = |tensor, bytes: Option<&[u8]>| bytes.map(|bytes| guarded(tensor, bytes)).transpose();
        let bias = |bias: &Bias| -> io::Result<_> { Ok((guarded("bias", bias.data.as_bytes())?, bias.strides)) };
        Ok(Self {
            dtype: inputs.query.dtype,
            query: guarded("query", &inputs.query.data)?,
            key: guarded("key", &inputs.key.data)?,
            value: guarded("value", &inputs.value.data)?,
            alibi_slopes: optional("alibi_slopes", inputs.alibi_slopes.as_deref().map(IntoBytes::as_bytes))?,
            sinks: optional("sinks", inputs.sinks.as_deref().map(IntoBytes::as_bytes))?,
            bias: inputs.bias.as_ref().map(bias).transpose()?,
            seqused_k: optional("seqused_k", inputs.seqused_k.as_deref().map(IntoBytes::as_bytes))?,
            aux_f32: optional("aux_f32", inputs.aux_f32.as_deref().map(IntoBytes::as_bytes))?,
            aux_i32: optional("aux_i32", inputs.aux_i32.as_deref().map(IntoBytes::as_bytes))?,
        })
    }

    /// Borrows the inputs as views.
    pub fn views(&self) -> InputViews<'_> {
        let tensor = |buffer| TensorView { dtype: self.dtype, data: ReadOnly::bytes(buffer) };
        let mut views = InputViews::new(tensor(&self.query), tensor(&self.key), tensor(&self.value));
        views.alibi_slopes = self.alibi_slopes.as_ref().map(numbers);
        views.sinks = self.sinks.as_ref().map(numbers);
        views.bias = self.bias.as_ref().map(|(bias, strides)| BiasView { data: numbers(bias), strides: *strides });
        views.seqused_k = self.seqused_k.as_ref().map(numbers);
        views.aux_f32 = self.aux_f32.as_ref().map(numbers);
        views.aux_i32 = self.aux_i32.as_ref().map(numbers);
        views
    }
}

/// Everything that a backend writes, each tensor in pages of its own.
#[derive(Debug)]
pub struct GuardedOutputs {
    dtype: DType,
    output: GuardedBuffer,
    lse: Option<GuardedBuffer>,
}

impl GuardedOutputs {
    /// [Poisoned](Outputs::poisoned) outputs; `case` is what a fault is reported by.
    pub fn poisoned(problem: &Problem, edge: Edge, case: &Arc<str>) -> io::Result<Self> {
        let Outputs { output, lse } = Outputs::poisoned(problem);
        let guarded = |tensor: &'static str, bytes: &[u8]| {
            GuardedBuffer::new(bytes, edge, Label { tensor, case: Arc::clone(case) })
        };
        Ok(Self {
            dtype: problem.dtype,
            output: guarded("output", &output.data)?,
            lse: lse.map(|rows| guarded("lse", rows.as_bytes())).transpose()?,
        })
    }

    /// Borrows the outputs as views.
    pub fn views_mut(&mut self) -> OutputViews<'_> {
        let lse = self.lse.as_mut().map(|buffer| {
            <[f32]>::mut_from_bytes(buffer.bytes_mut()).expect("whole numbers at either end of a page are aligned")
        });
        let mut views = OutputViews::new(TensorViewMut { dtype: self.dtype, data: self.output.bytes_mut() });
        views.lse = lse;
        views
    }

    /// Copies the outputs into ordinary memory.
    pub fn to_outputs(&self) -> Outputs {
        let rows = |buffer: &GuardedBuffer| numbers_in(buffer.bytes()).to_vec();
        Outputs {
            output: Tensor { dtype: self.dtype, data: self.output.bytes().to_vec() },
            lse: self.lse.as_ref().map(rows),
        }
    }
}

fn numbers<T: FromBytes + Immutable>(buffer: &ReadOnly) -> &[T] {
    numbers_in(buffer.bytes())
}

fn numbers_in<T: FromBytes + Immutable>(bytes: &[u8]) -> &[T] {
    <[T]>::ref_from_bytes(bytes).expect("whole numbers at either end of a page are aligned")
}
