//! Attention with a growing KV cache on a GPU: an append inside of the attention launch, or ahead of it on one stream.

use std::time::Instant;

use flashcore_cuda::{CudaError, Stream, Workspace};
use flashcore_kernels::cache::{AppendSpec, FusedValues, QUANTIZE_WORDS, SequencePlan, SequenceValues, quantize_words};
use flashcore_kernels::{LaunchPlan, LaunchValues, heuristics};
use flashcore_problem::{
    KvCacheInputs, KvCacheOutputs, KvCacheProblem, Operand, Rotary, ScaleView, TensorView, ValueCache,
};
use zerocopy::IntoBytes;

use super::device_tensors::{DeviceTensors, check_address};
use super::executor::{Executor, with_host_tensors};
use super::operation::{Operation, Uploads};
use super::{Gpu, Prepared, fused_trial, kv_cache_trial};
use crate::report::KernelReport;
use crate::{Error, PlanOptions, Reason};

/// Device addresses of the tensors of attention with a growing KV cache, each that of the first element; 0 for what the
/// problem does not have.
///
/// ```
/// # use flashcore::{DeviceTensors, KvCacheTensors};
/// # let [query, key_cache, value_cache, output, cache_seqlens, new_key, new_value, cos, sin] = [0x1000; 9];
/// let attention = DeviceTensors::new(query, key_cache, value_cache, output).with_seqused_k(cache_seqlens);
/// let tensors = KvCacheTensors::new(attention, new_key, new_value).with_rotary(cos, sin);
/// # assert_eq!(tensors.cos, cos);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvCacheTensors {
    /// The tensors of attention: key and value are the caches, `seqused_k` the rows that each sequence uses before the
    /// append (`cache_seqlens`). Its workspace is that of the whole launch.
    pub attention: DeviceTensors,
    /// New keys.
    pub new_key: u64,
    /// New values.
    pub new_value: u64,
    /// First new key of each sequence, 32 bits.
    pub cu_seqlens_k_new: u64,
    /// First position of each sequence, 32 bits.
    pub rotary_seqlens: u64,
    /// Cosines.
    pub cos: u64,
    /// Sines.
    pub sin: u64,
    /// Weights of the norm of the query.
    pub query_norm: u64,
    /// Weights of the norm of the key.
    pub key_norm: u64,
}

impl KvCacheTensors {
    /// The tensors of attention, new keys and values, and nothing else.
    pub const fn new(attention: DeviceTensors, new_key: u64, new_value: u64) -> Self {
        Self {
            attention,
            new_key,
            new_value,
            cu_seqlens_k_new: 0,
            rotary_seqlens: 0,
            cos: 0,
            sin: 0,
            query_norm: 0,
            key_norm: 0,
        }
    }

    /// Sets the offsets of packed new keys.
    #[must_use]
    pub const fn with_cu_seqlens_k_new(mut self, address: u64) -> Self {
        self.cu_seqlens_k_new = address;
        self
    }

    /// Sets cosines and sines.
    #[must_use]
    pub const fn with_rotary(mut self, cos: u64, sin: u64) -> Self {
        (self.cos, self.sin) = (cos, sin);
        self
    }

    /// Sets the positions at which sequences start.
    #[must_use]
    pub const fn with_rotary_seqlens(mut self, address: u64) -> Self {
        self.rotary_seqlens = address;
        self
    }

    /// Sets the weights of the norms.
    #[must_use]
    pub const fn with_qk_norm(mut self, query_norm: u64, key_norm: u64) -> Self {
        (self.query_norm, self.key_norm) = (query_norm, key_norm);
        self
    }

    /// The words of the scales of an FP8 cache, which are those of attention.
    pub(super) fn scale_words(&self, problem: &KvCacheProblem) -> Option<[u64; QUANTIZE_WORDS]> {
        let scales = [self.attention.k_scale, self.attention.v_scale];
        let is_quantized = problem.append(0).cache_dtype().is_float8();
        is_quantized.then(|| quantize_words(scales.map(|scale| (scale.address, scale.strides))))
    }

    /// The words of the append; query output and lengths lie in a workspace.
    const fn values(&self, transforms: bool, query_output: u64, lengths: u64) -> SequenceValues {
        let DeviceTensors { query, key, value, seqused_k, kv_batch_idx, page_table, cu_seqlens_q, .. } = self.attention;
        SequenceValues {
            new_key: self.new_key,
            new_value: self.new_value,
            key_cache: key,
            value_cache: value,
            query: if transforms { query } else { 0 },
            query_output: if transforms { query_output } else { 0 },
            cos: self.cos,
            sin: self.sin,
            query_norm: self.query_norm,
            key_norm: self.key_norm,
            cache_seqlens: seqused_k,
            cu_seqlens_q,
            cu_seqlens_k_new: self.cu_seqlens_k_new,
            rotary_seqlens: self.rotary_seqlens,
            kv_batch_idx,
            page_table,
            lengths,
        }
    }

    /// The values of attention that appends itself.
    const fn fused_values(&self) -> LaunchValues {
        let mut values = self.attention.values();
        values.append = FusedValues {
            new_key: self.new_key,
            new_value: self.new_value,
            cu_seqlens_k_new: self.cu_seqlens_k_new,
            rotary_seqlens: self.rotary_seqlens,
            cos: self.cos,
            sin: self.sin,
        };
        values
    }

    /// Checks what can be known without the GPU, for a valid problem and the alignments that its kernels need.
    /// Allocates nothing.
    fn check(&self, problem: &KvCacheProblem, alignments: [u64; 3]) -> Result<(), Error> {
        self.attention.check(&problem.attention)?;
        if problem.compute_scales {
            let (append, scales) = (problem.append(0), [self.attention.k_scale, self.attention.v_scale]);
            for (operand, scale) in [Operand::KScale, Operand::VScale].into_iter().zip(scales) {
                if let Some(error) = append.scale_stride_error(operand, scale.strides) {
                    return Err(Error::Invalid(vec![error].into()));
                }
            }
        }
        let element = problem.attention.dtype.size_bytes() as u64;
        let batch = problem.attention.batch as u64;
        let bytes = |extent: Option<usize>| extent.unwrap_or(0) as u64 * element;
        let [key_multiple, value_multiple, table_multiple] = alignments;
        let table = problem.rotary.and_then(Rotary::table_extent).unwrap_or(0) as u64;
        let table = table * problem.append(0).table_dtype().size_bytes() as u64;
        let norm = if problem.qk_norm.is_some() { problem.attention.head_dim as u64 * element } else { 0 };
        let (new_key, new_value) = (
            bytes(problem.new_key.extent(problem.new_key_shape())),
            bytes(problem.new_value.extent(problem.new_value_shape())),
        );
        let (rotary, is_normed) = (problem.rotary.is_some(), problem.qk_norm.is_some());
        let tensors = [
            ("new_key", self.new_key, new_key, key_multiple, true),
            ("new_value", self.new_value, new_value, value_multiple, true),
            ("cu_seqlens_k_new", self.cu_seqlens_k_new, (batch + 1) * 4, 4, problem.total_new.is_some()),
            ("rotary_seqlens", self.rotary_seqlens, batch * 4, 4, problem.rotary_seqlens),
            ("cos", self.cos, table, table_multiple, rotary),
            ("sin", self.sin, table, table_multiple, rotary),
            ("query_norm", self.query_norm, norm, key_multiple, is_normed),
            ("key_norm", self.key_norm, norm, key_multiple, is_normed),
        ];
        for (argument, address, bytes, multiple, is_present) in tensors {
            if is_present {
                check_address(argument, address, bytes, multiple)?;
            } else if address != 0 {
                return Err(Error::Unexpected { argument, address });
            }
        }
        // The caches are written, which attention alone does not do.
        let strides = problem.attention.strides();
        let shapes = [
            (Operand::Key, strides.key.extent(problem.attention.key_shape())),
            (Operand::Value, strides.value.extent(problem.attention.value_shape())),
            (Operand::KScale, Some(usize::from(problem.compute_scales && problem.attention.k_scale))),
            (Operand::VScale, Some(usize::from(problem.compute_scales && problem.attention.v_scale))),
        ];
        for (cache, extent) in shapes {
            let (written, address) = (cache.name(), self.attention.address(cache));
            if extent == Some(0) {
                continue;
            }
            let others = Operand::ALL
                .iter()
                .filter(|&&other| other != cache && other.is_present(&problem.attention))
                .map(|&other| (other.name(), self.attention.address(other)))
                .chain(tensors.iter().map(|&(name, address, ..)| (name, address)));
            for (other, begin) in others {
                if begin == address && begin != 0 {
                    return Err(Error::Aliased { written, other, address });
                }
            }
        }
        Ok(())
    }
}

/// Attention with a growing KV cache on a GPU, ready to be launched.
#[derive(Clone)]
pub(crate) struct GpuKvCache {
    /// Bytes of which addresses must be multiples, see [`AppendSpec::alignments`].
    alignments: [u64; 3],
    stream: Stream,
    launches: Launches,
}

/// Kernels of a growing cache.
#[derive(Clone)]
enum Launches {
    /// Attention that appends.
    Fused(Executor),
    /// An append, then attention.
    Separate(Box<Separate>),
}

/// An append by sequence, and the attention after it.
#[derive(Clone)]
struct Separate {
    append: Operation,
    plan: SequencePlan,
    /// The attention; `None` if there is nothing to attend.
    attention: Option<Executor>,
    workspace: Workspace,
    /// Offsets of lengths and rotated query in the workspace, after that of attention.
    lengths: u64,
    query: u64,
}

impl GpuKvCache {
    pub(crate) fn workspace_bytes(&self) -> usize {
        match &self.launches {
            Launches::Fused(attention) => attention.workspace_bytes(),
            Launches::Separate(launches) => launches.workspace.bytes(),
        }
    }

    /// True if the append is inside of the attention launch.
    pub(crate) const fn is_fused(&self) -> bool {
        matches!(self.launches, Launches::Fused(_))
    }

    /// Puts the kernels on a stream. Allocates nothing but a workspace where the stream has none as large.
    ///
    /// # Safety
    ///
    /// See [`KvCachePlan::launch`](crate::KvCachePlan::launch).
    pub(crate) unsafe fn launch(
        &self,
        problem: &KvCacheProblem,
        stream: &Stream,
        tensors: &KvCacheTensors,
    ) -> Result<(), Error> {
        tensors.check(problem, self.alignments)?;
        if super::check_lengths::is_on() {
            // SAFETY: the contract of this function.
            unsafe { super::check_lengths::check_kv_cache(problem, stream, tensors) }?;
        }
        // SAFETY: the contract of this function.
        Ok(unsafe { self.launch_checked(problem, stream, tensors) }?)
    }

    /// # Safety
    ///
    /// As for [`launch`](Self::launch).
    unsafe fn launch_checked(
        &self,
        problem: &KvCacheProblem,
        stream: &Stream,
        tensors: &KvCacheTensors,
    ) -> Result<(), CudaError> {
        match &self.launches {
            // SAFETY: the contract of this function.
            Launches::Fused(attention) => unsafe { attention.launch_values(stream, tensors.fused_values()) },
            // SAFETY: the contract of this function.
            Launches::Separate(launches) => unsafe { launches.launch(problem, stream, tensors) },
        }
    }

    /// Appends and attends tensors of the host, which validated.
    pub(crate) fn run(
        &self,
        problem: &KvCacheProblem,
        inputs: &KvCacheInputs<'_>,
        outputs: KvCacheOutputs<'_>,
    ) -> Result<(), Error> {
        if let ValueCache::InKeyCache { offset } = outputs.value_cache {
            let multiple = super::TENSOR_ALIGNMENT;
            let address = (offset * problem.attention.dtypes().key_value.size_bytes()) as u64;
            if !address.is_multiple_of(multiple) {
                return Err(Error::Misaligned { argument: "the offset in bytes of value_cache", address, multiple });
            }
        }
        let KvCacheOutputs { key_cache, value_cache, attention, k_scale, v_scale, .. } = outputs;
        let stream = &self.stream;
        let mut uploads = Uploads::new(stream);
        let key_address = uploads.add(key_cache.as_view().data)?;
        let value_address = match &value_cache {
            ValueCache::Separate(cache) => uploads.add(cache.as_view().data)?,
            ValueCache::InKeyCache { offset } => {
                key_address + (offset * problem.attention.dtypes().key_value.size_bytes()) as u64
            }
        };
        let mut tensors = upload(&mut uploads, inputs)?;
        let mut in_caches = vec![(Operand::Key, key_address), (Operand::Value, value_address)];
        let mut given = inputs.attention;
        // Scales that are written lie on the GPU like the caches; attention has their strides.
        if let Some(scale) = &k_scale {
            in_caches.push((Operand::KScale, uploads.add(scale.data.as_bytes())?));
            given.k_scale = Some(ScaleView { data: &[], strides: scale.strides });
        }
        if let Some(scale) = &v_scale {
            in_caches.push((Operand::VScale, uploads.add(scale.data.as_bytes())?));
            given.v_scale = Some(ScaleView { data: &[], strides: scale.strides });
        }
        with_host_tensors(stream, &problem.attention, &given, attention, &in_caches, |attention| {
            tensors.attention = attention;
            // SAFETY: the buffers hold the whole tensors, which validated, and are used by nobody else; freeing them waits
            // for the kernels. The stream was made in the context of the kernels.
            unsafe { self.launch_checked(problem, stream, &tensors) }
        })?;
        uploads.read(key_address, key_cache.data)?;
        if let ValueCache::Separate(cache) = value_cache {
            uploads.read(value_address, cache.data)?;
        }
        for (operand, scale) in [(Operand::KScale, k_scale), (Operand::VScale, v_scale)] {
            let address = in_caches.iter().find(|(known, _)| *known == operand).map(|(_, address)| *address);
            if let (Some(address), Some(scale)) = (address, scale) {
                uploads.read(address, scale.data.as_mut_bytes())?;
            }
        }
        Ok(())
    }
}

impl Separate {
    /// Puts both kernels on a stream.
    ///
    /// # Safety
    ///
    /// See [`KvCachePlan::launch`](crate::KvCachePlan::launch).
    unsafe fn launch(
        &self,
        problem: &KvCacheProblem,
        stream: &Stream,
        tensors: &KvCacheTensors,
    ) -> Result<(), CudaError> {
        if self.plan.grid[0] == 0 {
            return Ok(());
        }
        let launch = |workspace: u64| {
            let (query, lengths) = (workspace + self.query, workspace + self.lengths);
            let words = tensors.values(problem.transforms(), query, lengths).words();
            // SAFETY: the contract of this function; nobody else uses the workspace meanwhile.
            unsafe { self.append.launch_quantized(stream, self.plan.grid, tensors.scale_words(problem), &words) }?;
            let Some(attention) = &self.attention else { return Ok(()) };
            let mut after = tensors.attention;
            (after.seqused_k, after.workspace) = (lengths, workspace);
            if problem.transforms() {
                after.query = query;
            }
            // SAFETY: as above; the stream keeps the order of the kernels.
            unsafe { attention.launch(stream, &after) }
        };
        match tensors.attention.workspace {
            0 => self.workspace.with(stream, launch),
            workspace => launch(workspace),
        }
    }
}

/// Copies everything that attention alone does not have to the GPU.
pub(super) fn upload(uploads: &mut Uploads<'_>, inputs: &KvCacheInputs<'_>) -> Result<KvCacheTensors, CudaError> {
    let mut add = |view: Option<TensorView<'_>>| view.map_or(Ok(0), |view| uploads.add(view.data));
    let mut tensors = KvCacheTensors::new(DeviceTensors::new(0, 0, 0, 0), 0, 0);
    tensors.new_key = add(Some(inputs.attention.key))?;
    tensors.new_value = add(Some(inputs.attention.value))?;
    (tensors.cos, tensors.sin) = (add(inputs.cos)?, add(inputs.sin)?);
    (tensors.query_norm, tensors.key_norm) = (add(inputs.query_norm)?, add(inputs.key_norm)?);
    let mut words = |values: Option<&[u32]>| values.map_or(Ok(0), |values| uploads.add(values.as_bytes()));
    tensors.cu_seqlens_k_new = words(inputs.cu_seqlens_k_new)?;
    tensors.rotary_seqlens = words(inputs.rotary_seqlens)?;
    Ok(tensors)
}

/// Alignment of the parts of a workspace.
const PART_ALIGNMENT: usize = 256;

impl Gpu {
    /// A growing cache with the append inside of the attention launch, or every reason against it.
    pub(crate) fn fused_kv_cache(
        &self,
        problem: &KvCacheProblem,
        options: PlanOptions,
    ) -> Result<(GpuKvCache, KernelReport), Vec<Reason>> {
        let start = Instant::now();
        let config = self.config(&problem.attended(), options);
        let config = config.unwrap_or_else(|| heuristics::select(&problem.attention, self.target));
        let plan = LaunchPlan::with_append(problem, config, self.target)
            .map_err(|reasons| reasons.into_iter().map(Reason::from).collect::<Vec<_>>())?;
        let Prepared { executor, kernel } =
            self.prepare_plan(&plan, options, start, |kernels| fused_trial::complaint(self, problem, config, kernels))?;
        Ok((self.with_fused(problem, executor), kernel))
    }

    /// A growing cache with the kernels of attention that appends.
    pub(super) fn with_fused(&self, problem: &KvCacheProblem, attention: Executor) -> GpuKvCache {
        let alignments = AppendSpec::of_sequences(problem).alignments();
        GpuKvCache { alignments, stream: self.stream.clone(), launches: Launches::Fused(attention) }
    }

    /// A growing cache with an append ahead of attention, or every reason against it.
    pub(crate) fn separate_kv_cache(
        &self,
        problem: &KvCacheProblem,
        attention: Option<Executor>,
    ) -> Result<GpuKvCache, Vec<Reason>> {
        let reasons =
            |reasons: Vec<flashcore_kernels::Reason>| reasons.into_iter().map(Reason::from).collect::<Vec<_>>();
        let plan = SequencePlan::new(problem, self.target).map_err(reasons)?;
        let append = self.operation(plan.key, &plan.template, || kv_cache_trial::complaint(self, problem))?;
        let lengths = attention.as_ref().map_or(0, Executor::workspace_bytes).next_multiple_of(PART_ALIGNMENT);
        let query = (lengths + problem.attention.batch * size_of::<u32>()).next_multiple_of(PART_ALIGNMENT);
        let attended = problem.attended();
        let elements = attended.strides().query.extent(attended.query_shape()).unwrap_or(0);
        let query_bytes = if problem.transforms() { elements * attended.dtype.size_bytes() } else { 0 };
        let workspace = self.workspaces.of_plan(query + query_bytes);
        let (lengths, query) = (lengths as u64, query as u64);
        let launches = Launches::Separate(Box::new(Separate { append, plan, attention, workspace, lengths, query }));
        let alignments = AppendSpec::of_sequences(problem).alignments();
        Ok(GpuKvCache { alignments, stream: self.stream.clone(), launches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{DType, Problem, RotaryStyle};

    const GOOD: KvCacheTensors = KvCacheTensors {
        attention: DeviceTensors { seqused_k: 0x5000, ..DeviceTensors::new(0x1000, 0x2000, 0x3000, 0x4000) },
        ..KvCacheTensors::new(DeviceTensors::new(0, 0, 0, 0), 0x6000, 0x7000)
    };

    #[track_caller]
    fn check(change: impl FnOnce(&mut KvCacheProblem, &mut KvCacheTensors), expected: &Result<(), Error>) {
        let mut problem = KvCacheProblem::new(Problem::new(2, 4, 1, 64, DType::F16).with_key_length(40), 1);
        let mut tensors = GOOD;
        change(&mut problem, &mut tensors);
        assert_eq!(&tensors.check(&problem, AppendSpec::of_sequences(&problem).alignments()), expected);
    }

    #[test]
    fn addresses_are_checked() {
        check(|_, _| {}, &Ok(()));
        check(|_, tensors| tensors.new_key = 0, &Err(Error::Null { argument: "new_key" }));
        check(|_, tensors| tensors.attention.seqused_k = 0, &Err(Error::Null { argument: "seqused_k" }));
        check(
            |_, tensors| tensors.new_value = 0x7004,
            &Err(Error::Misaligned { argument: "new_value", address: 0x7004, multiple: 16 }),
        );
        check(|_, tensors| tensors.cos = 0x8000, &Err(Error::Unexpected { argument: "cos", address: 0x8000 }));
        check(
            |problem, _| problem.rotary = Some(Rotary::new(RotaryStyle::Neox, 64, 40)),
            &Err(Error::Null { argument: "cos" }),
        );
        check(
            |_, tensors| tensors.new_key = tensors.attention.key,
            &Err(Error::Aliased { written: "key", other: "new_key", address: 0x2000 }),
        );
        check(
            |_, tensors| tensors.attention.value = tensors.attention.key,
            &Err(Error::Aliased { written: "key", other: "value", address: 0x2000 }),
        );
    }
}
