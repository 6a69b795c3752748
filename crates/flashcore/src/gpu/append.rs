//! Append to a KV cache on a GPU.

use flashcore_cuda::{CudaError, Stream};
use flashcore_kernels::cache::{AppendPlan as KernelPlan, AppendSpec, AppendValues, QUANTIZE_WORDS, quantize_words};
use flashcore_problem::{
    AppendProblem, InputViews, Operand, OutputViews, ProblemError, Rotary, ScaleSource, ScaleStrides, ScaleView,
    ScaleViewMut, Shape, Strides, TensorView, append_oracle_with,
};
use zerocopy::IntoBytes;

use super::Gpu;
use super::device_tensors::{DeviceScale, check_address};
use super::operation::{Operation, Uploads};
use crate::{Error, Invalid, Reason};

/// Device addresses of the tensors of an append, each that of the first element; 0 for what the problem does not have.
///
/// ```
/// # use flashcore::AppendTensors;
/// # let (key, value, key_cache, value_cache, slots, query) = (0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000);
/// let tensors = AppendTensors::new(key, value, key_cache, value_cache, slots).with_query(query, query).with_tokens(17);
/// # assert_eq!(tensors.tokens, Some(17));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppendTensors {
    /// New keys.
    pub key: u64,
    /// New values.
    pub value: u64,
    /// The key cache.
    pub key_cache: u64,
    /// The value cache.
    pub value_cache: u64,
    /// Slot of each token, 64 bits, signed; one that the cache does not have is skipped, as -1 is.
    pub slot_mapping: u64,
    /// The query.
    pub query: u64,
    /// The query output; it may be the query, with the same strides.
    pub query_output: u64,
    /// Position of each token, of the problem's integer type.
    pub positions: u64,
    /// Cosines.
    pub cos: u64,
    /// Sines.
    pub sin: u64,
    /// Weights of the norm of the query.
    pub query_norm: u64,
    /// Weights of the norm of the key.
    pub key_norm: u64,
    /// The scale of keys in an FP8 cache: read where it is given, written where it is computed.
    pub k_scale: DeviceScale,
    /// The scale of values in an FP8 cache.
    pub v_scale: DeviceScale,
    /// Tokens of this launch, at most those of the plan; `None` for as many. In a captured graph it is fixed: skip tokens
    /// by their slots there.
    pub tokens: Option<usize>,
}

impl AppendTensors {
    /// Keys, values and caches, and nothing else.
    pub const fn new(key: u64, value: u64, key_cache: u64, value_cache: u64, slot_mapping: u64) -> Self {
        Self {
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            query: 0,
            query_output: 0,
            positions: 0,
            cos: 0,
            sin: 0,
            query_norm: 0,
            key_norm: 0,
            k_scale: DeviceScale::NONE,
            v_scale: DeviceScale::NONE,
            tokens: None,
        }
    }

    /// Sets query and query output.
    #[must_use]
    pub const fn with_query(mut self, query: u64, query_output: u64) -> Self {
        (self.query, self.query_output) = (query, query_output);
        self
    }

    /// Sets positions, cosines and sines.
    #[must_use]
    pub const fn with_rotary(mut self, positions: u64, cos: u64, sin: u64) -> Self {
        (self.positions, self.cos, self.sin) = (positions, cos, sin);
        self
    }

    /// Sets the weights of the norms; that of the query is 0 without one.
    #[must_use]
    pub const fn with_qk_norm(mut self, query_norm: u64, key_norm: u64) -> Self {
        (self.query_norm, self.key_norm) = (query_norm, key_norm);
        self
    }

    /// Sets the scale of keys and its strides.
    #[must_use]
    pub const fn with_k_scale(mut self, address: u64, strides: ScaleStrides) -> Self {
        self.k_scale = DeviceScale { address, strides };
        self
    }

    /// Sets the scale of values and its strides.
    #[must_use]
    pub const fn with_v_scale(mut self, address: u64, strides: ScaleStrides) -> Self {
        self.v_scale = DeviceScale { address, strides };
        self
    }

    /// The words of the scales, where the caches are FP8.
    fn scale_words(&self, problem: &AppendProblem) -> Option<[u64; QUANTIZE_WORDS]> {
        let words = || quantize_words([self.k_scale, self.v_scale].map(|scale| (scale.address, scale.strides)));
        problem.cache_dtype().is_float8().then(words)
    }

    /// Sets the tokens of this launch.
    #[must_use]
    pub const fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = Some(tokens);
        self
    }

    const fn values(&self, tokens: usize) -> AppendValues {
        AppendValues {
            key: self.key,
            value: self.value,
            key_cache: self.key_cache,
            value_cache: self.value_cache,
            slot_mapping: self.slot_mapping,
            query: self.query,
            query_output: self.query_output,
            positions: self.positions,
            cos: self.cos,
            sin: self.sin,
            query_norm: self.query_norm,
            key_norm: self.key_norm,
            tokens: tokens as u64,
        }
    }

    /// Checks what can be known without the GPU, for a valid problem with the tokens of this launch. Allocates nothing.
    fn check(&self, problem: &AppendProblem, plan: &KernelPlan) -> Result<(), Error> {
        let element = problem.dtype.size_bytes() as u64;
        let bytes = |shape: Shape, strides: Strides| strides.extent(shape).unwrap_or(0) as u64 * element;
        let strides = problem.strides;
        let [key_multiple, value_multiple, table_multiple] = plan.alignments();
        let [key_cache_multiple, value_cache_multiple] = plan.cache_alignments();
        let cache_element = problem.cache_dtype().size_bytes() as u64;
        let (tokens, columns) = (problem.tokens as u64, problem.head_dim as u64 * element);
        let query = bytes(problem.query_shape(), strides.query);
        let query_output = bytes(problem.query_shape(), strides.query_output);
        let position = problem.rotary.map_or(0, |rotary| rotary.positions.size_bytes() as u64);
        let table = problem.rotary.and_then(Rotary::table_extent).unwrap_or(0) as u64;
        let table = table * problem.table_dtype().size_bytes() as u64;
        let norm = if problem.qk_norm.is_some() { columns } else { 0 };
        let query_norm = if problem.query_heads > 0 { norm } else { 0 };
        let cache_bytes = [
            bytes(problem.key_cache_shape(), strides.key_cache) / element * cache_element,
            bytes(problem.value_cache_shape(), strides.value_cache) / element * cache_element,
        ];
        check_scales(problem, [self.k_scale, self.v_scale])?;
        let scale_bytes = |scale: DeviceScale| {
            if scale.address == 0 { 0 } else { scale_extent(problem, scale.strides).saturating_mul(4) }
        };
        let tensors = [
            ("key", self.key, bytes(problem.key_shape(), strides.key), key_multiple),
            ("value", self.value, bytes(problem.value_shape(), strides.value), value_multiple),
            ("key_cache", self.key_cache, cache_bytes[0], key_cache_multiple),
            ("value_cache", self.value_cache, cache_bytes[1], value_cache_multiple),
            ("slot_mapping", self.slot_mapping, tokens * 8, 8),
            ("query", self.query, query, key_multiple),
            ("query_output", self.query_output, query_output, key_multiple),
            ("positions", self.positions, tokens * position, position.max(1)),
            ("cos", self.cos, table, table_multiple),
            ("sin", self.sin, table, table_multiple),
            ("query_norm", self.query_norm, query_norm, key_multiple),
            ("key_norm", self.key_norm, norm, key_multiple),
            ("k_scale", self.k_scale.address, scale_bytes(self.k_scale), 4),
            ("v_scale", self.v_scale.address, scale_bytes(self.v_scale), 4),
        ];
        let absent = |argument| match argument {
            "query" | "query_output" => problem.query_heads == 0,
            "positions" | "cos" | "sin" => problem.rotary.is_none(),
            "query_norm" => problem.qk_norm.is_none() || problem.query_heads == 0,
            "key_norm" => problem.qk_norm.is_none(),
            _ => false,
        };
        for (argument, address, bytes, multiple) in tensors {
            if absent(argument) && address != 0 {
                return Err(Error::Unexpected { argument, address });
            }
            check_address(argument, address, bytes, multiple)?;
        }
        for (written, address, bytes, _) in tensors {
            let is_scale = problem.compute_scales && matches!(written, "k_scale" | "v_scale");
            if !is_scale && !matches!(written, "key_cache" | "value_cache" | "query_output") || bytes == 0 {
                continue;
            }
            let in_place =
                |other| matches!((written, other), ("query_output", "query")) && strides.query == strides.query_output;
            let same = |&(other, begin, bytes, _): &(&'static str, u64, u64, u64)| {
                other != written && begin == address && bytes > 0 && !in_place(other)
            };
            if let Some(&(other, ..)) = tensors.iter().find(|tensor| same(tensor)) {
                return Err(Error::Aliased { written, other, address });
            }
        }
        Ok(())
    }
}

/// Elements of a scale from the first to the last.
fn scale_extent(problem: &AppendProblem, strides: ScaleStrides) -> u64 {
    strides.extent_of_cache(problem.key_cache_shape()).unwrap_or(usize::MAX) as u64
}

/// Checks that scales are where the problem has them, and lie as the kernel takes them.
fn check_scales(problem: &AppendProblem, scales: [DeviceScale; 2]) -> Result<(), Error> {
    for (operand, scale) in [Operand::KScale, Operand::VScale].into_iter().zip(scales) {
        let (argument, address) = (operand.name(), scale.address);
        match problem.scale_source(operand) {
            ScaleSource::None if address != 0 => return Err(Error::Unexpected { argument, address }),
            ScaleSource::Given | ScaleSource::Computed if address == 0 => return Err(Error::Null { argument }),
            _ => {}
        }
        if let Some(error) = problem.scale_stride_error(operand, scale.strides) {
            return Err(Error::Invalid(Invalid::from(vec![error])));
        }
    }
    Ok(())
}

/// An append on a GPU, ready to be launched.
#[derive(Clone)]
pub(crate) struct GpuAppend {
    operation: Operation,
    plan: KernelPlan,
}

impl GpuAppend {
    /// Puts the kernel on a stream, for a problem that the plan was made for. Allocates nothing.
    ///
    /// # Safety
    ///
    /// See [`AppendPlan::launch`](crate::AppendPlan::launch).
    pub(crate) unsafe fn launch(
        &self,
        problem: &AppendProblem,
        stream: &Stream,
        tensors: &AppendTensors,
    ) -> Result<(), Error> {
        let tokens = tensors.tokens.unwrap_or(problem.tokens);
        if tokens > problem.tokens {
            return Err(too_many_tokens(tokens, problem.tokens));
        }
        tensors.check(&problem.with_tokens(tokens), &self.plan)?;
        if tokens == 0 {
            return Ok(());
        }
        if super::check_lengths::is_on() {
            // SAFETY: the contract of this function.
            unsafe { super::check_lengths::check_slots(problem, stream, tensors) }?;
        }
        // SAFETY: the contract of this function.
        unsafe {
            let (grid, words) = (self.plan.grid(tokens), tensors.values(tokens).words());
            self.operation.launch_quantized(stream, grid, tensors.scale_words(problem), &words)
        }?;
        Ok(())
    }

    /// Appends tensors of the host, which validated.
    pub(crate) fn run(
        &self,
        problem: &AppendProblem,
        inputs: &InputViews<'_>,
        outputs: OutputViews<'_>,
    ) -> Result<(), Error> {
        if let Some(offset) = outputs.value_offset {
            let size = problem.cache_dtype().size_bytes();
            let ([_, multiple], address) = (self.plan.cache_alignments(), (offset * size) as u64);
            if !address.is_multiple_of(multiple) {
                return Err(Error::Misaligned { argument: "the offset in bytes of value_cache", address, multiple });
            }
        }
        Ok(run(&self.operation, &self.plan, problem, inputs, outputs)?)
    }
}

pub(super) fn too_many_tokens(tokens: usize, most: usize) -> Error {
    let allowed = format!("at most {most}, the tokens of the plan");
    Error::Invalid(Invalid::from(vec![ProblemError::OutOfRange {
        argument: "tokens",
        value: tokens.to_string(),
        allowed,
    }]))
}

fn run(
    operation: &Operation,
    plan: &KernelPlan,
    problem: &AppendProblem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) -> Result<(), CudaError> {
    if problem.tokens == 0 {
        return Ok(());
    }
    let stream = &operation.stream;
    let mut uploads = Uploads::new(stream);
    let mut add = |view: TensorView<'_>| if view.is_empty() { Ok(0) } else { uploads.add(view.data) };
    let OutputViews { key_cache, value_cache, value_offset, query_output: query, k_scale, v_scale, .. } = outputs;
    let key_cache_address = add(key_cache.as_view())?;
    let value_cache_address = match value_offset {
        None => add(value_cache.as_view())?,
        Some(offset) => key_cache_address + (offset * problem.cache_dtype().size_bytes()) as u64,
    };
    let query_output = add(query.as_view())?;
    let mut values = AppendValues {
        key: add(inputs.new_key)?,
        value: add(inputs.new_value)?,
        key_cache: key_cache_address,
        value_cache: value_cache_address,
        query: if inputs.query.is_empty() { query_output } else { add(inputs.query)? },
        query_output,
        cos: add(inputs.cos)?,
        sin: add(inputs.sin)?,
        query_norm: add(inputs.query_norm)?,
        key_norm: add(inputs.key_norm)?,
        tokens: problem.tokens as u64,
        ..AppendValues::default()
    };
    values.slot_mapping = uploads.add(inputs.bytes(Operand::SlotMapping).unwrap_or_default())?;
    values.positions = inputs.bytes(Operand::Positions).map_or(Ok(0), |positions| uploads.add(positions))?;
    let mut tensors = AppendTensors::new(0, 0, 0, 0, 0);
    tensors.k_scale = upload_scale(&mut uploads, inputs.k_scale, k_scale.as_ref())?;
    tensors.v_scale = upload_scale(&mut uploads, inputs.v_scale, v_scale.as_ref())?;
    // SAFETY: the buffers hold the whole tensors, which validated, and are used by nobody else; freeing them waits for the
    // kernel. The stream was made in the context of the kernel.
    unsafe {
        let (grid, scales) = (plan.grid(problem.tokens), tensors.scale_words(problem));
        operation.launch_quantized(stream, grid, scales, &values.words())
    }?;
    for (scale, DeviceScale { address, .. }) in [(k_scale, tensors.k_scale), (v_scale, tensors.v_scale)] {
        scale.map_or(Ok(()), |scale| uploads.read(address, scale.data.as_mut_bytes()))?;
    }
    uploads.read(key_cache_address, key_cache.data)?;
    if value_offset.is_none() {
        uploads.read(value_cache_address, value_cache.data)?;
    }
    if query.data.is_empty() { Ok(()) } else { uploads.read(query_output, query.data) }
}

/// Copies a scale that is given, or one that is to be written, to the GPU.
pub(super) fn upload_scale(
    uploads: &mut Uploads<'_>,
    given: Option<ScaleView<'_>>,
    written: Option<&ScaleViewMut<'_>>,
) -> Result<DeviceScale, CudaError> {
    match written.map(ScaleViewMut::as_view).or(given) {
        Some(ScaleView { data, strides }) => Ok(DeviceScale { address: uploads.add(data.as_bytes())?, strides }),
        None => Ok(DeviceScale::NONE),
    }
}

impl Gpu {
    /// The append for a problem, or every reason against it.
    pub(crate) fn append(&self, problem: &AppendProblem) -> Result<GpuAppend, Vec<Reason>> {
        let reasons =
            |reasons: Vec<flashcore_kernels::Reason>| reasons.into_iter().map(Reason::from).collect::<Vec<_>>();
        let plan = KernelPlan::new(problem, self.target).map_err(reasons)?;
        let operation = self.operation(plan.key, &plan.template, || self.try_append(problem))?;
        Ok(GpuAppend { operation, plan })
    }

    /// Runs the kernel on a small problem. Gives what is wrong with the result, if anything is.
    fn try_append(&self, problem: &AppendProblem) -> Result<Option<String>, CudaError> {
        let small = trial(problem);
        let Ok(plan) = KernelPlan::new(&small, self.target) else {
            return Ok(Some("the trial is no problem of this kernel".to_owned()));
        };
        let (kernel, _) = self.load(plan.key)?;
        let operation = Operation::new(kernel, &plan.template, self.stream.clone())?;
        let data = small.random_with_strays(SEED);
        let before = small.poisoned();
        let mut after = before.clone();
        run(&operation, &plan, &small, &data.views(), after.views_mut())?;
        let expected = match append_oracle_with(&small, &data.views(), before.scale_strides(small.key_cache_shape())) {
            Ok(expected) => expected,
            Err(invalid) => return Ok(Some(invalid.to_string())),
        };
        Ok(expected.check(&before, &after).err())
    }
}

/// Elements of one access to contiguous tables.
fn natural_table_vec(problem: &AppendProblem, key_vec: u32) -> u32 {
    key_vec.min(16 / problem.table_dtype().size_bytes() as u32)
}

/// A rotary embedding with a small table, whose rows are aligned as those of the problem.
pub(super) fn trial_rotary(rotary: Rotary, problem: &AppendProblem, wanted: &AppendSpec) -> Rotary {
    let table_vec = wanted.rotary.map_or(1, |rotary| rotary.table_vec);
    // Rows of tables that begin at multiples of so many elements and of no more, if that is less than an access.
    let table_stride = (rotary.dim / 2).next_multiple_of(16) + table_vec as usize;
    let table_stride =
        if table_vec >= natural_table_vec(problem, wanted.key_vec) { rotary.dim / 2 } else { table_stride };
    Rotary { max_position: 50, table_stride, ..rotary }
}

const SEED: u64 = 0x5EED;

/// The trial of the kernel of a problem: all that is compiled in is the same.
fn trial(problem: &AppendProblem) -> AppendProblem {
    let wanted = AppendSpec::of(problem);
    let mut small = AppendProblem::new(37, 3, problem.head_dim, problem.dtype, 9, 5).with_value_dim(problem.value_dim);
    if wanted.query {
        small = small.with_query(6);
    }
    small.qk_norm = problem.qk_norm;
    small.cache_dtype = problem.cache_dtype;
    small = small.with_scales(problem.k_scale, problem.v_scale).with_compute_scales(problem.compute_scales);
    small.rotary = problem.rotary.map(|rotary| trial_rotary(rotary, problem, &wanted));
    let natural = AppendSpec::of(&small);
    if natural.key_vec != wanted.key_vec {
        small.strides.key.row = small.strides.key.row.next_multiple_of(16) + wanted.key_vec as usize;
    }
    if natural.value_vec != wanted.value_vec {
        small.strides.value.row = small.strides.value.row.next_multiple_of(16) + wanted.value_vec as usize;
    }
    small
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_problem::{DType, PositionType, RotaryStyle};

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it.
    #[test]
    fn the_trial_of_a_problem_has_its_kernel() {
        for dtype in [DType::F16, DType::Bf16, DType::F32] {
            for (head_dim, dim, padding) in [(128, 128, 0), (128, 64, 4), (80, 20, 2), (33, 32, 0), (64, 48, 1)] {
                for table_padding in [0, 1, 2, 4] {
                    let rotary = Rotary {
                        table_stride: dim / 2 + table_padding,
                        table_dtype: (padding == 4).then_some(DType::F32),
                        positions: PositionType::I32,
                        ..Rotary::new(RotaryStyle::GptJ, dim, 4096)
                    };
                    let mut problem = AppendProblem::new(1000, 8, head_dim, dtype, 50, 16).with_rotary(rotary);
                    problem.strides.key_cache.batch += 3 * padding;
                    problem.strides.value.row += padding;
                    let quantized = problem.with_cache_dtype(Some(DType::E4m3)).with_scales(true, padding == 2);
                    for problem in [
                        problem,
                        problem.with_query(32).with_qk_norm(1e-6),
                        quantized,
                        quantized.with_compute_scales(true),
                    ] {
                        let key = |problem| KernelPlan::new(problem, Arch::Sm90a).map(|plan| plan.key);
                        assert_eq!(key(&trial(&problem)), key(&problem), "{problem:?}");
                    }
                }
            }
        }
    }

    const GOOD: AppendTensors = AppendTensors::new(0x1000, 0x2000, 0x3000, 0x4000, 0x5000).with_query(0x6000, 0x6000);

    #[track_caller]
    fn check(change: impl FnOnce(&mut AppendProblem, &mut AppendTensors), expected: &Result<(), Error>) {
        let mut problem = AppendProblem::new(5, 2, 64, DType::F16, 3, 4).with_query(4);
        let mut tensors = GOOD;
        change(&mut problem, &mut tensors);
        let plan = KernelPlan::new(&problem, Arch::Sm80).unwrap();
        assert_eq!(&tensors.check(&problem, &plan), expected);
    }

    #[test]
    fn addresses_are_checked() {
        check(|_, _| {}, &Ok(()));
        check(|_, tensors| tensors.slot_mapping = 0, &Err(Error::Null { argument: "slot_mapping" }));
        check(
            |_, tensors| tensors.key_cache = 0x3008,
            &Err(Error::Misaligned { argument: "key_cache", address: 0x3008, multiple: 16 }),
        );
        check(|_, tensors| tensors.cos = 0x7000, &Err(Error::Unexpected { argument: "cos", address: 0x7000 }));
        check(
            |_, tensors| tensors.key_cache = tensors.key,
            &Err(Error::Aliased { written: "key_cache", other: "key", address: 0x1000 }),
        );
        check(
            |problem, _| problem.strides.query_output.row += 64,
            &Err(Error::Aliased { written: "query_output", other: "query", address: 0x6000 }),
        );
        // Interleaved caches begin apart.
        check(|_, tensors| tensors.value_cache = tensors.key_cache + 128, &Ok(()));
    }
}
