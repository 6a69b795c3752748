//! Merge of partial results on a GPU.

use flashcore_cuda::{CudaError, Stream};
use flashcore_kernels::merge::{MergePlan as KernelPlan, MergeSpec, MergeValues};
use flashcore_problem::{InputViews, MergeProblem, OutputViews, ProblemError, merge_oracle};
use zerocopy::IntoBytes;

use super::Gpu;
use super::append::too_many_tokens;
use super::device_tensors::check_address;
use super::operation::{Operation, Uploads};
use crate::{Error, Invalid, Reason};

/// Device addresses of the parts of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartAddresses {
    /// Parts at equal distances: `[part, ...]` in one tensor of outputs and one of LSEs.
    Stacked {
        /// Output of the first part.
        output: u64,
        /// Elements from the output of a part to that of the next.
        output_stride: u64,
        /// LSE of the first part.
        lse: u64,
        /// Elements from the LSE of a part to that of the next.
        lse_stride: u64,
    },
    /// Two parts anywhere.
    Two {
        /// Output of each part.
        outputs: [u64; 2],
        /// LSE of each part.
        lses: [u64; 2],
    },
}

/// Device addresses of the tensors of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MergeTensors {
    /// The parts.
    pub parts: PartAddresses,
    /// The merged output.
    pub output: u64,
    /// The merged LSE; 0 where the problem has none.
    pub lse: u64,
    /// Tokens of this launch, at most those of the plan; `None` for as many.
    pub tokens: Option<usize>,
}

impl MergeTensors {
    /// Parts and output.
    pub const fn new(parts: PartAddresses, output: u64) -> Self {
        Self { parts, output, lse: 0, tokens: None }
    }

    /// Sets the merged LSE.
    #[must_use]
    pub const fn with_lse(mut self, lse: u64) -> Self {
        self.lse = lse;
        self
    }

    /// Sets the tokens of this launch.
    #[must_use]
    pub const fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// The words of a launch. A distance between two parts may be negative: it counts modulo 2^64.
    const fn values(&self, problem: &MergeProblem, tokens: usize) -> MergeValues {
        let (part, part_stride, part_lse, part_lse_stride) = match self.parts {
            PartAddresses::Stacked { output, output_stride, lse, lse_stride } => {
                let element = problem.part_dtype.size_bytes() as u64;
                (output, output_stride.wrapping_mul(element), lse, lse_stride.wrapping_mul(4))
            }
            PartAddresses::Two { outputs, lses } => {
                (outputs[0], outputs[1].wrapping_sub(outputs[0]), lses[0], lses[1].wrapping_sub(lses[0]))
            }
        };
        let (output, lse) = (self.output, self.lse);
        MergeValues { part, part_lse, part_stride, part_lse_stride, output, lse, tokens: tokens as u64 }
    }

    /// Checks what can be known without the GPU, for a valid problem with the tokens of this launch. Allocates nothing.
    fn check(&self, problem: &MergeProblem, plan: &KernelPlan) -> Result<(), Error> {
        let strides = problem.strides;
        let part = strides.part.extent(problem.shape()).unwrap_or(0) as u64;
        let part_lse = strides.part_lse.extent(problem.lse_shape()).unwrap_or(0) as u64;
        let output = strides.output.extent(problem.shape()).unwrap_or(0) as u64;
        let lse = if problem.lse { strides.lse.extent(problem.lse_shape()).unwrap_or(0) as u64 } else { 0 };
        let part_bytes = part * problem.part_dtype.size_bytes() as u64;
        let [part_multiple, output_multiple] = plan.alignments();
        match self.parts {
            PartAddresses::Stacked { output, output_stride, lse, lse_stride } => {
                let element = problem.part_dtype.size_bytes() as u64;
                let last = problem.num_parts as u64 - 1;
                let reach = |stride: u64, element: u64, bytes: u64| {
                    stride.saturating_mul(element).saturating_mul(last).saturating_add(bytes)
                };
                let bytes = if part == 0 { 0 } else { reach(output_stride, element, part_bytes) };
                check_address("the output of the parts", output, bytes, part_multiple)?;
                let stride_bytes = output_stride.wrapping_mul(element);
                if !stride_bytes.is_multiple_of(part_multiple) {
                    let argument = "the stride in bytes between the outputs of parts";
                    return Err(Error::Misaligned { argument, address: stride_bytes, multiple: part_multiple });
                }
                let bytes = if part_lse == 0 { 0 } else { reach(lse_stride, 4, part_lse * 4) };
                check_address("the lse of the parts", lse, bytes, 4)?;
            }
            PartAddresses::Two { outputs, lses } => {
                if problem.num_parts != 2 {
                    return Err(Error::Invalid(Invalid::from(vec![ProblemError::OutOfRange {
                        argument: "num_parts",
                        value: problem.num_parts.to_string(),
                        allowed: "2 for addresses of two parts; more parts are stacked".to_owned(),
                    }])));
                }
                for (argument, address) in ["the output of part 0", "the output of part 1"].into_iter().zip(outputs) {
                    check_address(argument, address, part_bytes, part_multiple)?;
                }
                for (argument, address) in ["the lse of part 0", "the lse of part 1"].into_iter().zip(lses) {
                    check_address(argument, address, part_lse * 4, 4)?;
                }
            }
        }
        check_address("output", self.output, output * problem.dtype.size_bytes() as u64, output_multiple)?;
        if !problem.lse && self.lse != 0 {
            return Err(Error::Unexpected { argument: "lse", address: self.lse });
        }
        check_address("lse", self.lse, lse * 4, 4)?;
        if output > 0 && problem.lse && self.output == self.lse {
            return Err(Error::Aliased { written: "output", other: "lse", address: self.output });
        }
        Ok(())
    }
}

/// A merge on a GPU, ready to be launched.
#[derive(Clone)]
pub(crate) struct GpuMerge {
    operation: Operation,
    plan: KernelPlan,
}

impl GpuMerge {
    /// Puts the kernel on a stream, for a problem that the plan was made for. Allocates nothing.
    ///
    /// # Safety
    ///
    /// See [`MergePlan::launch`](crate::MergePlan::launch).
    pub(crate) unsafe fn launch(
        &self,
        problem: &MergeProblem,
        stream: &Stream,
        tensors: &MergeTensors,
    ) -> Result<(), Error> {
        let tokens = tensors.tokens.unwrap_or(problem.tokens);
        if tokens > problem.tokens {
            return Err(too_many_tokens(tokens, problem.tokens));
        }
        tensors.check(&problem.with_tokens(tokens), &self.plan)?;
        if tokens == 0 {
            return Ok(());
        }
        let words = tensors.values(problem, tokens).words();
        // SAFETY: the contract of this function.
        unsafe { self.operation.launch(stream, self.plan.grid(tokens), &words) }?;
        Ok(())
    }

    /// Merges tensors of the host, which validated.
    pub(crate) fn run(
        &self,
        problem: &MergeProblem,
        inputs: &InputViews<'_>,
        outputs: OutputViews<'_>,
    ) -> Result<(), Error> {
        Ok(run(&self.operation, &self.plan, problem, inputs, outputs)?)
    }
}

fn run(
    operation: &Operation,
    plan: &KernelPlan,
    problem: &MergeProblem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) -> Result<(), CudaError> {
    if problem.tokens == 0 {
        return Ok(());
    }
    let stream = &operation.stream;
    let mut uploads = Uploads::new(stream);
    let part = problem.strides.part.extent(problem.shape()).unwrap_or(0) * problem.part_dtype.size_bytes();
    // Each part begins where the widest access may.
    let part_stride = part.next_multiple_of(16);
    let part_lse = problem.strides.part_lse.extent(problem.lse_shape()).unwrap_or(0);
    let (mut stacked, mut stacked_lse) = (vec![0; part_stride * problem.num_parts], Vec::new());
    for (target, source) in stacked.chunks_exact_mut(part_stride).zip(inputs.part_outputs.iter()) {
        target[..part].copy_from_slice(&source.data[..part]);
    }
    inputs.part_lses.iter().for_each(|lse| stacked_lse.extend_from_slice(&lse.data[..part_lse * size_of::<f32>()]));
    let output = uploads.add(outputs.output.data)?;
    let lse = outputs.lse.as_ref().map_or(Ok(0), |rows| uploads.add(rows.as_bytes()))?;
    let values = MergeValues {
        part: uploads.add(&stacked)?,
        part_lse: uploads.add(&stacked_lse)?,
        part_stride: part_stride as u64,
        part_lse_stride: part_lse as u64 * 4,
        output,
        lse,
        tokens: problem.tokens as u64,
    };
    // SAFETY: the buffers hold the whole tensors, which validated, and are used by nobody else; freeing them waits for the
    // kernel. The stream was made in the context of the kernel.
    unsafe { operation.launch(stream, plan.grid(problem.tokens), &values.words()) }?;
    uploads.read(output, outputs.output.data)?;
    outputs.lse.map_or(Ok(()), |rows| uploads.read(lse, rows.as_mut_bytes()))
}

impl Gpu {
    /// The merge for a problem, or every reason against it.
    pub(crate) fn merge(&self, problem: &MergeProblem) -> Result<GpuMerge, Vec<Reason>> {
        let reasons =
            |reasons: Vec<flashcore_kernels::Reason>| reasons.into_iter().map(Reason::from).collect::<Vec<_>>();
        let plan = KernelPlan::new(problem, self.target).map_err(reasons)?;
        let operation = self.operation(plan.key, &plan.template, || self.try_merge(problem))?;
        Ok(GpuMerge { operation, plan })
    }

    /// Runs the kernel on a small problem. Gives what is wrong with the result, if anything is.
    fn try_merge(&self, problem: &MergeProblem) -> Result<Option<String>, CudaError> {
        let small = trial(problem);
        let Ok(plan) = KernelPlan::new(&small, self.target) else {
            return Ok(Some("the trial is no problem of this kernel".to_owned()));
        };
        let (kernel, _) = self.load(plan.key)?;
        let operation = Operation::new(kernel, &plan.template, self.stream.clone())?;
        let (inputs, mut outputs) = (small.random(SEED), small.poisoned());
        run(&operation, &plan, &small, &inputs.views(), outputs.views_mut())?;
        Ok(match merge_oracle(&small, &inputs.views()) {
            Ok(expected) => expected.check(&small, &outputs).err(),
            Err(invalid) => Some(invalid.to_string()),
        })
    }
}

pub(super) const SEED: u64 = 0x5EED;

/// The trial of the kernel of a problem: all that is compiled in is the same.
pub(super) fn trial(problem: &MergeProblem) -> MergeProblem {
    let wanted = MergeSpec::of(problem);
    let parts = if wanted.unrolled.is_some() { problem.num_parts } else { 11 };
    let mut small = MergeProblem::new(parts, 37, 3, problem.value_dim, problem.dtype)
        .with_part_dtype(problem.part_dtype)
        .with_lse(problem.lse)
        .with_base(problem.base);
    // Rows that begin at multiples of so many elements and of no more, if that is less than an access.
    if MergeSpec::of(&small).vec != wanted.vec {
        small.strides.part.row = small.strides.part.row.next_multiple_of(16) + wanted.vec as usize;
    }
    small
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_problem::{DType, LseBase};

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it.
    #[test]
    fn the_trial_of_a_problem_has_its_kernel() {
        for part_dtype in [DType::F16, DType::F32] {
            for (parts, value_dim, padding) in [(2, 128, 0), (4, 128, 4), (5, 128, 2), (200, 33, 0), (3, 40, 1)] {
                let mut problem = MergeProblem::new(parts, 1000, 8, value_dim, DType::Bf16)
                    .with_part_dtype(part_dtype)
                    .with_lse(padding == 0)
                    .with_base(LseBase::Two);
                problem.strides.output.row += padding;
                let key = |problem| KernelPlan::new(problem, Arch::Sm90a).map(|plan| plan.key);
                assert_eq!(key(&trial(&problem)), key(&problem), "{problem:?}");
            }
        }
    }

    #[track_caller]
    fn check(parts: PartAddresses, count: usize, expected: &Result<(), Error>) {
        let problem = MergeProblem::new(count, 5, 2, 64, DType::F16);
        let plan = KernelPlan::new(&problem, Arch::Sm80).unwrap();
        assert_eq!(&MergeTensors::new(parts, 0x8000).with_lse(0x9000).check(&problem, &plan), expected);
    }

    #[test]
    fn addresses_are_checked() {
        let stacked = PartAddresses::Stacked { output: 0x1000, output_stride: 640, lse: 0x2000, lse_stride: 10 };
        check(stacked, 3, &Ok(()));
        let two = PartAddresses::Two { outputs: [0x3000, 0x1000], lses: [0x2004, 0x2000] };
        check(two, 2, &Ok(()));
        let refused = MergeTensors::new(two, 0x8000).with_lse(0x9000);
        let problem = MergeProblem::new(3, 5, 2, 64, DType::F16);
        let plan = KernelPlan::new(&problem, Arch::Sm80).unwrap();
        assert_eq!(
            refused.check(&problem, &plan).unwrap_err().to_string(),
            "num_parts is 3; it must be 2 for addresses of two parts; more parts are stacked"
        );
        let odd = PartAddresses::Stacked { output: 0x1000, output_stride: 641, lse: 0x2000, lse_stride: 10 };
        let argument = "the stride in bytes between the outputs of parts";
        check(odd, 3, &Err(Error::Misaligned { argument, address: 1282, multiple: 16 }));
    }

    /// The second part may lie before the first: distances count modulo 2^64.
    #[test]
    fn two_parts_lie_anywhere() {
        let parts = PartAddresses::Two { outputs: [0x3000, 0x1000], lses: [0x2000, 0x5000] };
        let problem = MergeProblem::new(2, 5, 2, 64, DType::F16);
        let values = MergeTensors::new(parts, 0x8000).values(&problem, 5);
        assert_eq!(values.part.wrapping_add(values.part_stride), 0x1000);
        assert_eq!(values.part_lse.wrapping_add(values.part_lse_stride), 0x5000);
    }
}
