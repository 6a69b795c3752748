//! A plan with tensors of its own on the GPU: launches without `unsafe`.

use flashcore_cuda::{CudaError, DeviceBuffer, Graph, Stream};
use flashcore_problem::{InputViews, Problem, Shape, Strides};
use zerocopy::IntoBytes;

use crate::device_tensors::TENSOR_ALIGNMENT;
use crate::process::CUDA;
use crate::{DeviceTensors, Error, Plan};

/// The bytes of the tensors that a [`Bound`] begins with, each with `margin` bytes before and behind the tensor.
///
/// A margin of 0 is the tensor alone. With one, a harness can tell afterwards whether anything was written outside.
#[derive(Clone, Copy, Debug)]
pub struct BoundBytes<'a> {
    /// Of the query.
    pub query: &'a [u8],
    /// Of the key.
    pub key: &'a [u8],
    /// Of the value.
    pub value: &'a [u8],
    /// What the output holds before the first launch.
    pub output: &'a [u8],
    /// What the log-sum-exp holds before the first launch; empty where the problem does not ask for it.
    pub lse: &'a [u8],
    /// Bytes before and behind each tensor, a multiple of 16.
    pub margin: usize,
    /// The tensors of numbers that the problem has; query, key and value of it are not looked at.
    pub numbers: InputViews<'a>,
}

/// A plan with tensors of its own on the GPU, and the stream it is launched on.
///
/// It owns the memory that its launches touch, and everything that touches it goes through one stream, so launches and
/// copies are ordered and nothing is freed under a running kernel.
#[derive(Debug)]
pub struct Bound {
    plan: Plan,
    stream: Stream,
    query: DeviceBuffer,
    key: DeviceBuffer,
    value: DeviceBuffer,
    output: DeviceBuffer,
    lse: DeviceBuffer,
    /// Held for the launches that read them.
    _numbers: [DeviceBuffer; NUMBERS],
    tensors: DeviceTensors,
}

/// The tensors of a [`Bound`] as they are on the GPU, each with its margins.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BoundContents {
    /// Of the query.
    pub query: Vec<u8>,
    /// Of the key.
    pub key: Vec<u8>,
    /// Of the value.
    pub value: Vec<u8>,
    /// Of the output.
    pub output: Vec<u8>,
    /// Of the log-sum-exp.
    pub lse: Vec<u8>,
}

/// Several launches of a [`Bound`], recorded: what is timed is the kernel and not the host.
#[derive(Debug)]
pub struct BoundGraph<'a> {
    bound: &'a Bound,
    graph: Graph,
}

impl Plan {
    /// Copies tensors to the GPU and ties the plan to them.
    pub fn bind(&self, bytes: BoundBytes<'_>) -> Result<Bound, Error> {
        let Some(context) = self.device().context() else {
            return Err(Error::NotOnCuda { call: "bind", device: self.device().to_string() });
        };
        CUDA.check()?;
        let problem = self.problem();
        bytes.check(problem)?;
        let stream = Stream::new(context)?;
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(&stream, bytes);
        let (query, key, value) = (upload(bytes.query)?, upload(bytes.key)?, upload(bytes.value)?);
        let (output, lse) = (upload(bytes.output)?, upload(bytes.lse)?);
        let payload = |buffer: &DeviceBuffer| buffer.address() + bytes.margin as u64;
        let mut tensors = DeviceTensors::new(payload(&query), payload(&key), payload(&value), payload(&output));
        if problem.lse {
            tensors.lse = payload(&lse);
        }
        let numbers = upload_numbers(&stream, &bytes.numbers, &mut tensors)?;
        tensors.check(problem)?;
        Ok(Bound { plan: self.clone(), stream, query, key, value, output, lse, _numbers: numbers, tensors })
    }
}

/// Optional tensors of numbers.
const NUMBERS: usize = 6;

/// Copies key lengths, slopes, sinks, bias and tables to the GPU, where there are any.
pub(crate) fn upload_numbers(
    stream: &Stream,
    inputs: &InputViews<'_>,
    tensors: &mut DeviceTensors,
) -> Result<[DeviceBuffer; NUMBERS], CudaError> {
    let upload = |bytes: Option<&[u8]>, address: &mut u64| {
        let buffer = DeviceBuffer::from_host(stream, bytes.unwrap_or(&[]))?;
        *address = if bytes.is_some() { buffer.address() } else { 0 };
        Ok::<_, CudaError>(buffer)
    };
    if let Some(bias) = inputs.bias {
        tensors.bias_strides = bias.strides;
    }
    Ok([
        upload(inputs.seqused_k.map(IntoBytes::as_bytes), &mut tensors.seqused_k)?,
        upload(inputs.alibi_slopes.map(IntoBytes::as_bytes), &mut tensors.alibi_slopes)?,
        upload(inputs.sinks.map(IntoBytes::as_bytes), &mut tensors.sinks)?,
        upload(inputs.bias.map(|bias| bias.data.as_bytes()), &mut tensors.bias)?,
        upload(inputs.aux_f32.map(IntoBytes::as_bytes), &mut tensors.aux_f32)?,
        upload(inputs.aux_i32.map(IntoBytes::as_bytes), &mut tensors.aux_i32)?,
    ])
}

impl BoundBytes<'_> {
    /// Each tensor has the bytes that the problem's strides reach, and its margins.
    fn check(&self, problem: &Problem) -> Result<(), Error> {
        let strides = problem.strides();
        let element = problem.dtype.size_bytes();
        let extent = |strides: Strides, shape: Shape| strides.extent(shape).unwrap_or(0) * element;
        let rows = problem.batch * problem.query_heads * problem.query_length;
        let needed = [
            ("query", self.query, extent(strides.query, problem.query_shape())),
            ("key", self.key, extent(strides.key, problem.key_shape())),
            ("value", self.value, extent(strides.value, problem.value_shape())),
            ("output", self.output, extent(strides.output, problem.output_shape())),
            ("lse", self.lse, if problem.lse { rows * 4 } else { 0 }),
        ];
        if !(self.margin as u64).is_multiple_of(TENSOR_ALIGNMENT) {
            let (argument, multiple) = ("margin", TENSOR_ALIGNMENT);
            return Err(Error::Misaligned { argument, address: self.margin as u64, multiple });
        }
        self.numbers.validate_numbers(problem)?;
        for (argument, bytes, tensor) in needed {
            let expected =
                if tensor == 0 && argument == "lse" { 0 } else { tensor.saturating_add(self.margin.saturating_mul(2)) };
            if bytes.len() != expected {
                return Err(Error::BoundLength { argument, actual: bytes.len(), expected });
            }
        }
        Ok(())
    }
}

impl Bound {
    /// The plan.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The stream that launches and copies go through.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Puts one launch on the stream.
    pub fn launch(&self) -> Result<(), Error> {
        // SAFETY: the addresses are those of this value's own buffers, which hold the whole tensors, as `bind` checked,
        // and begin apart from each other; whatever else touches them goes through the same stream. The stream is one of
        // the plan's context.
        unsafe { self.plan.launch(&self.stream, self.tensors) }
    }

    /// Records `launches` launches, one after another.
    pub fn record(&self, launches: usize) -> Result<BoundGraph<'_>, Error> {
        let graph = Graph::capture::<Error>(&self.stream, |_| (0..launches).try_for_each(|_| self.launch()))?;
        Ok(BoundGraph { bound: self, graph })
    }

    /// Waits for the launches, and copies output and log-sum-exp, with their margins, back to what they were at first.
    pub fn reset_outputs(&mut self, output: &[u8], lse: &[u8]) -> Result<(), Error> {
        self.output.copy_from_host(&self.stream, output)?;
        Ok(self.lse.copy_from_host(&self.stream, lse)?)
    }

    /// Waits for the launches and copies everything to the host.
    pub fn contents(&self) -> Result<BoundContents, Error> {
        let stream = &self.stream;
        Ok(BoundContents {
            query: self.query.to_host(stream)?,
            key: self.key.to_host(stream)?,
            value: self.value.to_host(stream)?,
            output: self.output.to_host(stream)?,
            lse: self.lse.to_host(stream)?,
        })
    }

    /// Waits for the launches and copies the output, with its margins, to the host.
    pub fn output(&self) -> Result<Vec<u8>, Error> {
        Ok(self.output.to_host(&self.stream)?)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // The buffers are freed behind this; an error of the stream is the context's to remember.
        let _ = self.stream.synchronize();
    }
}

impl BoundGraph<'_> {
    /// Puts the recorded launches on the stream.
    pub fn launch(&self) -> Result<(), Error> {
        // SAFETY: what was recorded refers to the buffers and the kernel of `bound`, which is borrowed and goes on
        // owning them; everything else that touches them goes through the same stream.
        Ok(unsafe { self.graph.launch(&self.bound.stream) }?)
    }
}
