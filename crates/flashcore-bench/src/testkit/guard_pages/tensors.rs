//! The tensors of a problem in guarded buffers.

use std::io;
use std::sync::Arc;

use flashcore_problem::{DType, InputViews, Inputs, Operand, OutputViews, Outputs, Problem, Tensor, TensorViewMut};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::pages::ReadOnly;
use super::{Edge, GuardedBuffer, Label};

/// Everything that a backend reads, each tensor in pages of its own that cannot be written.
#[derive(Debug)]
pub struct GuardedInputs<'a> {
    /// The inputs, for everything but their memory.
    inputs: &'a Inputs,
    /// By operand.
    pages: Vec<Option<ReadOnly>>,
}

impl<'a> GuardedInputs<'a> {
    /// A copy of `inputs`; `case` is what a fault is reported by.
    pub fn new(inputs: &'a Inputs, edge: Edge, case: &Arc<str>) -> io::Result<Self> {
        let views = inputs.views();
        let guarded = |&operand: &Operand| {
            let label = Label { tensor: operand.name(), case: Arc::clone(case) };
            views.bytes(operand).map(|bytes| GuardedBuffer::new(bytes, edge, label)?.read_only()).transpose()
        };
        Ok(Self { inputs, pages: Operand::ALL.iter().map(guarded).collect::<io::Result<_>>()? })
    }

    /// Borrows the inputs as views.
    pub fn views(&self) -> InputViews<'_> {
        let bytes = |operand| self.pages[operand as usize].as_ref().map_or(&[][..], ReadOnly::bytes);
        self.inputs.views().in_other_memory(bytes)
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
        let Outputs { output, lse, .. } = Outputs::poisoned(problem);
        let guarded = |tensor: &'static str, bytes: &[u8]| {
            GuardedBuffer::new(bytes, edge, Label { tensor, case: Arc::clone(case) })
        };
        Ok(Self {
            dtype: problem.dtypes().output,
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
            ..Outputs::default()
        }
    }
}

fn numbers_in<T: FromBytes + Immutable>(bytes: &[u8]) -> &[T] {
    <[T]>::ref_from_bytes(bytes).expect("whole numbers at either end of a page are aligned")
}
