//! Machines that execute cases: the simulator here, a GPU elsewhere.

use flashcore_ir::{Type, VerifiedKernel};
use flashcore_sim::{Argument, GlobalMemory, Launch, Options, SimError, TensorSum, launch};

use super::case::{BufferMap, ConformanceCase, Scalar};

/// A kernel with all that a launch of it needs. CTAs have [`flashcore_ir::Kernel::threads`] threads and
/// [`flashcore_ir::Kernel::shared_bytes`] of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Invocation<'a> {
    /// The kernel. Its parameters are the addresses of the inputs, those of the outputs, and the scalars, in this order.
    pub kernel: &'a VerifiedKernel,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// The bytes of the inputs.
    pub inputs: &'a [Vec<u8>],
    /// The bytes of each output, all zeros before the launch. Buffers begin at multiples of 256.
    pub output_lengths: &'a [usize],
    /// Scalar parameters, after the addresses.
    pub scalars: &'a [Scalar],
    /// Tensor maps over the buffers, after the scalars.
    pub tensor_maps: &'a [BufferMap],
}

/// Something that executes kernels.
pub trait Executor {
    /// Launches the kernel, waits for it and returns the bytes of each output.
    fn execute(&self, invocation: &Invocation<'_>) -> Result<Vec<Vec<u8>>, ExecuteError>;

    /// Executes a case on inputs made by [`ConformanceCase::input_bytes`].
    fn execute_case(
        &self,
        case: &ConformanceCase,
        kernel: &VerifiedKernel,
        inputs: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, ExecuteError> {
        let output_lengths = case.output_lengths();
        let (grid, scalars, tensor_maps) = (case.grid, &case.scalars[..], &case.tensor_maps[..]);
        let invocation = Invocation { kernel, grid, inputs, output_lengths: &output_lengths, scalars, tensor_maps };
        let outputs = self.execute(&invocation)?;
        let actual: Vec<usize> = outputs.iter().map(Vec::len).collect();
        if actual == output_lengths {
            Ok(outputs)
        } else {
            Err(ExecuteError::Outputs { expected: output_lengths, actual })
        }
    }
}

/// Reason why a kernel was not executed to its end.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The simulator stopped.
    #[error(transparent)]
    Simulator(#[from] SimError),
    /// A parameter of a type that launches do not have.
    #[error("a parameter of type {ty} cannot be passed; parameters are u32, s32, f32, u64 and s64")]
    Scalar {
        /// The type.
        ty: Type,
    },
    /// Outputs of other lengths than were asked for.
    #[error("expected outputs of {expected:?} bytes, got {actual:?}")]
    Outputs {
        /// The lengths asked for.
        expected: Vec<usize>,
        /// The lengths that came back.
        actual: Vec<usize>,
    },
    /// The device, its driver or its compiler failed.
    #[error("the device failed: {0}")]
    Device(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The simulator.
#[derive(Debug, Clone, Copy, Default)]
pub struct SimExecutor {
    /// Decides how the warps of a CTA interleave.
    pub seed: u64,
    /// The addition of tensor cores in `f32`.
    pub tensor_sum: TensorSum,
}

impl Executor for SimExecutor {
    fn execute(&self, invocation: &Invocation<'_>) -> Result<Vec<Vec<u8>>, ExecuteError> {
        let mut memory = GlobalMemory::new();
        let mut arguments = Vec::new();
        for (index, input) in invocation.inputs.iter().enumerate() {
            arguments.push(Argument::U64(memory.allocate(&format!("input {index}"), input)));
        }
        let mut outputs = Vec::new();
        for (index, length) in invocation.output_lengths.iter().enumerate() {
            let address = memory.allocate(&format!("output {index}"), &vec![0; *length]);
            arguments.push(Argument::U64(address));
            outputs.push(address);
        }
        let addresses: Vec<u64> = arguments
            .iter()
            .filter_map(|argument| if let Argument::U64(address) = argument { Some(*address) } else { None })
            .collect();
        for scalar in invocation.scalars {
            arguments.push(argument(*scalar)?);
        }
        arguments.extend(invocation.tensor_maps.iter().map(|map| Argument::TensorMap(map.at(&addresses))));
        let launch_of_case = Launch { grid: invocation.grid, arguments };
        let options = Options { seed: self.seed, tensor_sum: self.tensor_sum, ..Options::default() };
        launch(invocation.kernel, &launch_of_case, &memory, &options)?;
        Ok(outputs.into_iter().map(|address| memory.read(address)).collect())
    }
}

fn argument(scalar: Scalar) -> Result<Argument, ExecuteError> {
    let bits = scalar.bits;
    Ok(match scalar.ty {
        Type::U32 => Argument::U32(bits as u32),
        Type::S32 => Argument::S32(bits as i32),
        Type::F32 => Argument::F32(f32::from_bits(bits as u32)),
        Type::U64 => Argument::U64(bits),
        Type::S64 => Argument::S64(bits as i64),
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => {
            return Err(ExecuteError::Scalar { ty: scalar.ty });
        }
    })
}
