//! Conformance cases: a kernel of one operation, its inputs, its outputs, and how closely two machines must agree on them.

use core::fmt;

use flashcore_ir::{Arch, Instruction, Kernel, Statement, TensorMap, Type, VerifiedKernel, VerifyError};
use flashcore_problem::SplitMix64;

use super::hash::Fnv;
use super::inputs::Fill;
use super::products::Products;

/// One operation in one form, with its inputs.
#[derive(Debug, Clone)]
pub struct ConformanceCase {
    /// The row of the table and the form, unique in the suite.
    pub name: String,
    /// The row of [`flashcore_ir::TABLE`] that it is about.
    pub operation: &'static str,
    /// The kernel. Its parameters are the addresses of the inputs, those of the outputs, and the scalars, in this order.
    pub kernel: Kernel,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Inputs.
    pub inputs: Vec<Input>,
    /// Outputs.
    pub outputs: Vec<Output>,
    /// Scalar parameters, after the addresses.
    pub scalars: Vec<Scalar>,
    /// Tensor maps over the buffers, after the scalars.
    pub tensor_maps: Vec<BufferMap>,
    /// Tolerance between two machines.
    pub tolerance: Tolerance,
    /// The lowest architecture that has its operations.
    pub arch: Arch,
}

/// A buffer that a kernel reads.
#[derive(Debug, Clone)]
pub struct Input {
    /// The name of the operand.
    pub name: String,
    /// The type of its elements.
    pub ty: Type,
    /// The number of its elements.
    pub count: usize,
    /// Contents of the elements.
    pub fill: Fill,
}

/// A buffer that a kernel writes, all zeros before.
#[derive(Debug, Clone)]
pub struct Output {
    /// The name of the result.
    pub name: String,
    /// The type of its elements. Predicates are stored as words, 0 or 1.
    pub ty: Type,
    /// The number of its elements.
    pub count: usize,
}

impl Output {
    /// Bytes of the buffer.
    pub const fn bytes(&self) -> usize {
        self.count * self.ty.bytes() as usize
    }
}

/// The value of a parameter that is no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scalar {
    /// The type of the parameter.
    pub ty: Type,
    /// The bits of the value; a parameter of 32 bits takes the lower ones.
    pub bits: u64,
}

/// A tensor that begins where a buffer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferMap {
    /// Which buffer: the inputs are counted first, then the outputs.
    pub buffer: usize,
    /// The tensor, as if at address 0.
    pub map: TensorMap,
}

impl BufferMap {
    /// The tensor in buffers at these addresses.
    pub fn at(&self, addresses: &[u64]) -> TensorMap {
        TensorMap { base: addresses.get(self.buffer).copied().unwrap_or_default(), ..self.map }
    }
}

/// Tolerance between two machines, for each element of the outputs.
///
/// Infinities agree with themselves only, and a NaN with a NaN. Where two results are zero, their signs agree, except
/// in sums of products, whose zero may come from either side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// Equal bits, those of a NaN included: operations that move bits.
    Bits,
    /// Equal bits, but any NaN equals any other: operations that PTX defines exactly.
    Exact,
    /// At most so many units in the last place apart.
    Ulps {
        /// The most.
        most: u32,
        /// True if the operation flushes subnormals to zero: then zero and the least normal number are adjacent.
        flushed: bool,
    },
    /// Apart by at most `relative` times the result of the simulator, or by `absolute`, whichever is more.
    Within {
        /// Relative to the result.
        relative: f64,
        /// Absolute.
        absolute: f64,
    },
    /// Apart by at most `relative` times `sum |a·b| + |c|`, or by `absolute`, whichever is more: tensor cores, which
    /// truncate in between, so that the error follows the largest term and not the result.
    Sum {
        /// The products whose terms an element adds up.
        products: Products,
        /// Relative to the sum of magnitudes.
        relative: f64,
        /// Absolute.
        absolute: f64,
    },
}

impl Tolerance {
    /// True if a hash of the results is enough to compare them.
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::Bits | Self::Exact)
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bits => formatter.write_str("the same bits"),
            Self::Exact => formatter.write_str("the same value"),
            Self::Ulps { most, flushed: false } => write!(formatter, "{most} ULP"),
            Self::Ulps { most, flushed: true } => write!(formatter, "{most} ULP, subnormals flushed"),
            Self::Within { relative, absolute } => {
                write!(formatter, "{relative:.2e} of the result or {absolute:.2e}")
            }
            Self::Sum { relative, absolute, .. } => {
                write!(formatter, "{relative:.2e} of sum |ab| + |c| or {absolute:.2e}")
            }
        }
    }
}

impl ConformanceCase {
    /// The kernel, verified for an architecture.
    pub fn verified(&self, arch: Arch) -> Result<VerifiedKernel, Vec<VerifyError>> {
        self.kernel.clone().verify(arch)
    }

    /// The bytes of the inputs under a seed. They are the same on every machine.
    pub fn input_bytes(&self, seed: u64) -> Vec<Vec<u8>> {
        let name = Fnv::of(self.name.as_bytes()) as u64;
        let mut buffers = Vec::with_capacity(self.inputs.len());
        for (index, input) in self.inputs.iter().enumerate() {
            let mut random = SplitMix64::stream(seed ^ name, index as u64);
            let width = input.ty.bytes() as usize;
            let values = input.fill.values(input.ty, input.count, &mut random);
            buffers.push(values.into_iter().flat_map(|bits| bits.to_le_bytes().into_iter().take(width)).collect());
        }
        buffers
    }

    /// The bytes of each output.
    pub fn output_lengths(&self) -> Vec<usize> {
        self.outputs.iter().map(Output::bytes).collect()
    }

    /// Fingerprint of everything that decides the results: the program, the launch and the inputs. Source lines, the
    /// names of
    /// registers and the text of the printer are no part of it.
    pub fn fingerprint(&self, inputs: &[Vec<u8>]) -> String {
        let (threads, shared) = (self.kernel.threads, self.kernel.shared_bytes);
        let mut lines = vec![format!("{threads} threads, {shared} shared, {:?}, {:?}", self.grid, self.scalars)];
        if self.kernel.cluster != [1; 3] || !self.tensor_maps.is_empty() {
            lines.push(format!("clusters of {:?}, {:?}", self.kernel.cluster, self.tensor_maps));
        }
        describe(&self.kernel.body.statements, &mut lines);
        let mut hash = Fnv::new();
        hash.add(lines.join("\n").as_bytes());
        for input in inputs {
            hash.add(input);
        }
        hash.text()
    }
}

/// Appends the program, without where it was written.
fn describe(statements: &[Statement], lines: &mut Vec<String>) {
    for statement in statements {
        match statement {
            Statement::Instruction(Instruction { op, guard: None, .. }) => lines.push(op.to_string()),
            Statement::Instruction(Instruction { op, guard: Some(guard), .. }) => {
                lines.push(format!("@{}{} {op}", if guard.negated { "!" } else { "" }, guard.predicate));
            }
            Statement::If(choice) => {
                lines.push(format!("if {} {{", choice.condition));
                describe(&choice.then.statements, lines);
                lines.push("} else {".to_owned());
                describe(&choice.otherwise.statements, lines);
                lines.push("}".to_owned());
            }
            Statement::Loop(repetition) => {
                lines.push("loop {".to_owned());
                describe(&repetition.header.statements, lines);
                lines.push(format!("}} while {} {{", repetition.condition));
                describe(&repetition.body.statements, lines);
                lines.push("}".to_owned());
            }
        }
    }
}
