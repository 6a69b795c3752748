//! Attention with a growing KV cache, by every backend: append and attention are judged each on its own.

use std::collections::HashSet;
use std::ops::Range;

use flashcore::{AppendPolicy, Plan, PlanOptions};
use flashcore_cpu::Level;
use flashcore_ir::VerifiedKernel;
use flashcore_kernels::{Between, Config, LaunchPlan, LaunchValues, Stage};
use flashcore_problem::{
    Evidence, Inputs, KvCacheData, KvCacheExpected, KvCacheOutputs, KvCacheProblem, Operand, Outputs, Scale,
    SequenceLengths, Tensor, TensorView, Verdict, kv_cache_oracle_with,
};
use flashcore_sim::GlobalMemory;

use crate::testkit::gpu::Gpu;
use crate::testkit::operations::{place, place_scales, read_scale, set_scales};
use crate::testkit::simulate::{copy_outputs, launch_all};
use crate::testkit::verify::{NoVerdict, SIMULATED, Yardstick, launch_plan};
use crate::testkit::wrong_arrays::{
    self, fates, is_race, refused, rows_between, take_outputs, take_rows, wrong_sequences,
};
use crate::testkit::{Arrays, Backend, Case};

/// The caches: two tensors, or one memory with values so many elements after keys.
#[derive(Debug, Clone, PartialEq)]
struct Caches {
    key: Tensor,
    value: Option<Tensor>,
    offset: usize,
    /// The scales of keys and of values that are computed.
    scales: [Option<Scale>; 2],
}

impl Caches {
    /// The caches before the append: K and V of a row side by side in one memory where the strides leave room.
    fn new(problem: &KvCacheProblem, data: &KvCacheData) -> Self {
        let (attention, strides) = (&problem.attention, problem.attention.strides());
        let row = attention.head_dim + attention.value_dim;
        let is_shared = strides.key == strides.value && strides.key.row.min(strides.key.head) >= row;
        let scales = [data.k_scale.clone(), data.v_scale.clone()];
        if !is_shared {
            return Self { key: data.key_cache.clone(), value: Some(data.value_cache.clone()), offset: 0, scales };
        }
        let (offset, dtype) = (attention.head_dim, attention.dtypes().key_value);
        let (elements, size) = (data.key_cache.len().max(data.value_cache.len() + offset), dtype.size_bytes());
        let mut memory = Tensor::poisoned(dtype, elements);
        let sources =
            [(&data.key_cache, attention.key_shape(), 0), (&data.value_cache, attention.value_shape(), offset)];
        for (source, shape, offset) in sources {
            for (batch, head, row) in shape.each_row() {
                let (start, bytes) = (strides.key.row_start(batch, head, row) * size, shape.columns * size);
                memory.data[start + offset * size..][..bytes].copy_from_slice(&source.data[start..][..bytes]);
            }
        }
        Self { key: memory, value: None, offset, scales }
    }

    /// The numbers of the scales of keys and of values; empty where none are computed.
    fn scale_numbers(&self) -> [&[f32]; 2] {
        [&self.scales[0], &self.scales[1]].map(|scale| scale.as_ref().map_or(&[][..], |scale| &scale.data))
    }

    /// True if all bits are the same.
    fn is_same(&self, other: &Self) -> bool {
        let bits = |caches: &Self| caches.scale_numbers().concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        self.key == other.key && self.value == other.value && bits(self) == bits(other)
    }

    /// The tensors of key and value.
    fn views(&self) -> (TensorView<'_>, TensorView<'_>) {
        let key = TensorView::from(&self.key);
        let start = self.offset * key.dtype.size_bytes();
        (key, self.value.as_ref().map_or(TensorView { data: &key.data[start..], ..key }, TensorView::from))
    }

    /// The bytes of a row of all heads, each with true if they lie in a tensor of values.
    fn row_bytes(&self, problem: &KvCacheProblem, (batch, row): (usize, usize)) -> Vec<(bool, Range<usize>)> {
        let (attention, offset, is_value) = (&problem.attention, self.offset, self.value.is_some());
        let (strides, size) = (attention.strides(), attention.dtypes().key_value.size_bytes());
        let bytes = |start: usize, columns: usize| start * size..(start + columns) * size;
        let of_head = |head| {
            let value = strides.value.row_start(batch, head, row) + offset;
            [
                (false, bytes(strides.key.row_start(batch, head, row), attention.head_dim)),
                (is_value, bytes(value, attention.value_dim)),
            ]
        };
        (0..attention.key_heads).flat_map(of_head).collect()
    }

    /// The bytes of the tensor of keys or of values.
    fn tensor(&self, is_value: bool) -> &Tensor {
        self.value.as_ref().filter(|_| is_value).unwrap_or(&self.key)
    }

    /// True if a row and its scales have the same bits.
    fn has_same_row(&self, problem: &KvCacheProblem, place: (usize, usize), other: &Self) -> bool {
        let mut taken = self.clone();
        taken.take_row(problem, place, other);
        taken.is_same(self)
    }

    /// Takes a row of all heads and its scales.
    fn take_row(&mut self, problem: &KvCacheProblem, place: (usize, usize), from: &Self) {
        for (is_value, bytes) in self.row_bytes(problem, place) {
            let source = &from.tensor(is_value).data[bytes.clone()];
            let tensor = self.value.as_mut().filter(|_| is_value).unwrap_or(&mut self.key);
            tensor.data[bytes].copy_from_slice(source);
        }
        for (scale, from) in self.scales.iter_mut().zip(&from.scales) {
            let (Some(scale), Some(from)) = (scale, from) else { continue };
            for head in 0..problem.attention.key_heads {
                let index = scale.strides.key_index(0, place, head);
                scale.data[index] = from.data[index];
            }
        }
    }

    fn outputs<'a>(&'a mut self, outputs: &'a mut Outputs) -> KvCacheOutputs<'a> {
        let mut outputs = match &mut self.value {
            Some(value) => KvCacheOutputs::new(&mut self.key, value, outputs.views_mut()),
            None => KvCacheOutputs::interleaved(&mut self.key, self.offset, outputs.views_mut()),
        };
        let [k_scale, v_scale] = &mut self.scales;
        (outputs.k_scale, outputs.v_scale) =
            (k_scale.as_mut().map(Scale::view_mut), v_scale.as_mut().map(Scale::view_mut));
        outputs
    }
}

/// Results of one run.
#[derive(Clone)]
struct Run {
    caches: Caches,
    outputs: Outputs,
    /// The query after norm and rotary embedding, and the lengths after the append, where they can be seen.
    between: Option<(Tensor, Vec<u32>)>,
}

/// A case of a growing cache: everything that a run is judged by.
#[derive(Debug, Clone)]
pub struct KvCacheTrial {
    problem: KvCacheProblem,
    data: KvCacheData,
    before: Caches,
    expected: KvCacheExpected,
}

impl KvCacheTrial {
    /// The trial of a case with a growing cache.
    pub fn new(case: &Case, problem: &KvCacheProblem) -> Result<Self, NoVerdict> {
        match case.arrays {
            Arrays::Crowded => Self::crowded(problem, case.lengths, case.seed),
            Arrays::Right | Arrays::Wrong(_) => Self::of(problem, case.lengths, case.seed),
        }
    }

    /// The trial of a problem on random inputs.
    pub fn of(problem: &KvCacheProblem, lengths: SequenceLengths, seed: u64) -> Result<Self, NoVerdict> {
        Self::with(problem, KvCacheData::random(problem, lengths, seed))
    }

    /// The trial of a problem on random inputs that only a device takes: without room for all new keys.
    pub fn crowded(problem: &KvCacheProblem, lengths: SequenceLengths, seed: u64) -> Result<Self, NoVerdict> {
        Self::with(problem, KvCacheData::crowded(problem, lengths, seed))
    }

    fn with(problem: &KvCacheProblem, data: KvCacheData) -> Result<Self, NoVerdict> {
        let expected = kv_cache_oracle_with(problem, &data.inputs(), data.scale_strides(problem))?;
        Ok(Self { before: Caches::new(problem, &data), problem: problem.clone(), data, expected })
    }

    /// Values of new rows that an FP8 cache saturates.
    pub fn saturated(&self) -> usize {
        self.expected.append.saturated()
    }

    /// Runs and judges it.
    pub fn verify(&self, case: &Case, gpu: Option<&Gpu>) -> Result<Verdict, NoVerdict> {
        match (case.backend, case.arrays) {
            (_, Arrays::Right) | (Backend::Sim(_), Arrays::Crowded) | (Backend::Cuda(_), _) => {}
            (Backend::Cpu(level), Arrays::Crowded) => return self.refused_by_cpu(level),
            (Backend::Cpu(level), Arrays::Wrong(number)) => {
                return self.with_wrong_arrays(number).refused_by_cpu(level);
            }
            (Backend::Sim(config), Arrays::Wrong(number)) => {
                return WrongAppend::new(self, number).verify(config, Kernels::default(), case.seed);
            }
        }
        let mut runs = Vec::new();
        for repeat in 0..=case.repeats {
            runs.push(match case.backend {
                Backend::Cpu(level) => self.on_host(|data, outputs| {
                    flashcore_cpu::kv_cache_and_query(level, &self.problem, &data.inputs(), outputs)
                        .map_err(NoVerdict::Cpu)
                })?,
                Backend::Sim(config) => {
                    let seed = case.seed + repeat as u64;
                    // Runs alternate between two launches and one, and are held to the same bits.
                    let fused = if repeat % 2 == 1 { self.simulate_fused(config, seed)? } else { None };
                    match fused {
                        Some(run) => run,
                        None => self.simulate(config, None, seed)?,
                    }
                }
                Backend::Cuda(config) => {
                    // Runs alternate between two launches and one, where there is a kernel for that.
                    let append = if repeat % 2 == 1 { AppendPolicy::Environment } else { AppendPolicy::Separate };
                    let options = PlanOptions::default().with_config(config).with_append(append);
                    let plan = match gpu {
                        Some(gpu) => Plan::with_options(&self.problem, gpu.device(), options),
                        None => Plan::with_options(&self.problem, Gpu::open(0)?.device(), options),
                    };
                    let plan = plan.map_err(NoVerdict::RefusedByGpu)?;
                    // The query between the kernels is not seen on the host: it is that of the same kernel in the simulator.
                    let (query, _) = self.simulate_append(None, case.seed)?.between.unwrap_or_else(|| self.nothing());
                    let query = if self.problem.transforms() { query.data } else { Vec::new() };
                    self.on_host(|data, outputs| {
                        plan.run(&data.inputs(), outputs).map_err(NoVerdict::Gpu)?;
                        Ok(query)
                    })?
                }
            });
        }
        self.judge(case.backend.config(), &runs)
    }

    /// Runs it in the simulator with another kernel for the append, and judges it.
    pub fn verify_kernel(&self, config: Config, append: &VerifiedKernel, seed: u64) -> Result<Verdict, NoVerdict> {
        self.judge(Some(config), &[self.simulate(config, Some(append), seed)?])
    }

    /// Runs it in the simulator in two launches and in one, with another kernel for that one, and judges both.
    pub fn verify_fused_kernel(
        &self,
        config: Config,
        kernel: &VerifiedKernel,
        seed: u64,
    ) -> Result<Verdict, NoVerdict> {
        let plan = LaunchPlan::with_append(&self.problem, config, SIMULATED).map_err(NoVerdict::Refused)?;
        let fused = self.simulate_plan(&plan.with_kernel(Stage::Attention, kernel.clone()), seed)?;
        self.judge(Some(config), &[self.simulate(config, None, seed)?, fused])
    }

    /// Runs the append alone in the simulator, with another kernel where one is given, and judges it.
    pub fn verify_append(&self, append: Option<&VerifiedKernel>, seed: u64) -> Result<(), NoVerdict> {
        self.check_append(&self.simulate_append(append, seed)?).map_err(NoVerdict::Append)
    }

    /// No query that is rotated, and no lengths.
    fn nothing(&self) -> (Tensor, Vec<u32>) {
        (Tensor::zeros(self.problem.attention.dtype, 0), Vec::new())
    }

    /// The query after norm and rotary embedding, poison where nothing was written, and the lengths after the append, in
    /// the memory of the simulator. An error if anything was written between them.
    fn read_between(
        &self,
        memory: &GlobalMemory,
        workspace: u64,
        at: Between,
    ) -> Result<(Tensor, Vec<u32>), NoVerdict> {
        let (lengths_end, dtype) = (at.lengths + 4 * self.problem.attention.batch as u64, self.problem.attention.dtype);
        let unwritten = memory.unwritten(workspace);
        let is_untouched = |byte: u64| unwritten.iter().any(|range| range.contains(&byte));
        if let Some(byte) = (lengths_end..at.query).find(|&byte| !is_untouched(byte)) {
            return Err(NoVerdict::Written(format!("byte {byte} of the workspace, of no tensor")));
        }
        let words = memory.read_at(workspace, at.lengths, 4 * self.problem.attention.batch);
        let lengths = words.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        if !self.problem.transforms() {
            return Ok((self.expected.query.clone(), lengths.collect()));
        }
        let mut query = Tensor::poisoned(dtype, self.expected.query.len());
        let written = memory.read_at(workspace, at.query, query.data.len());
        for (index, byte) in
            written.into_iter().enumerate().filter(|(index, _)| !is_untouched(at.query + *index as u64))
        {
            query.data[index] = byte;
        }
        Ok((query, lengths.collect()))
    }

    /// Runs it in the simulator in two launches and in one, and judges both.
    pub fn verify_fused(&self, config: Config, seed: u64) -> Result<Verdict, NoVerdict> {
        let plan = LaunchPlan::with_append(&self.problem, config, SIMULATED).map_err(NoVerdict::Refused)?;
        self.judge(Some(config), &[self.simulate(config, None, seed)?, self.simulate_plan(&plan, seed + 1)?])
    }

    /// Runs it in the simulator in two launches and in one, on arrays of the device that the host would refuse, and gives
    /// the names of results whose bits differ. `change` changes `cache_seqlens` and the page table.
    pub fn differences(
        &self,
        config: Config,
        change: impl FnOnce(&mut [u32], &mut [i32]),
    ) -> Result<Vec<&'static str>, NoVerdict> {
        let plan = LaunchPlan::with_append(&self.problem, config, SIMULATED).map_err(NoVerdict::Refused)?;
        let mut trial = self.clone();
        let arrays = &mut trial.data.attention;
        change(
            arrays.seqused_k.as_deref_mut().unwrap_or_default(),
            arrays.page_table.as_deref_mut().unwrap_or_default(),
        );
        let (two, one) = (trial.simulate(config, None, 0)?, trial.simulate_plan(&plan, 0)?);
        let bits = |rows: &Option<Vec<f32>>| rows.iter().flatten().map(|row| row.to_bits()).collect::<Vec<_>>();
        let results = [
            ("key cache", two.caches.key == one.caches.key),
            ("value cache", two.caches.value == one.caches.value),
            ("output", two.outputs.output == one.outputs.output),
            ("lse", bits(&two.outputs.lse) == bits(&one.outputs.lse)),
        ];
        Ok(results.into_iter().filter(|(_, is_same)| !is_same).map(|(name, _)| name).collect())
    }

    /// The same on arrays by number that the host refuses.
    fn with_wrong_arrays(&self, number: u64) -> Self {
        let problem = &self.problem;
        let parts: fn(&mut KvCacheData) -> (&mut Inputs, Option<&mut Vec<u32>>) =
            |data| (&mut data.attention, data.cu_seqlens_k_new.as_mut());
        let is_refused = |data: &KvCacheData| {
            let (mut caches, mut outputs) = (self.before.clone(), Outputs::poisoned(&problem.attention));
            problem.validate_views(&data.inputs(), &caches.outputs(&mut outputs)).is_err()
        };
        let place = (&problem.attention, problem.total_new);
        let mut data = wrong_arrays::spoil(place, (&self.data, number), parts, is_refused);
        // Positions past the tables are read at their last row.
        if let Some(starts) = data.rotary_seqlens.as_mut().filter(|_| number.is_multiple_of(2)) {
            let wrong = [u32::MAX, i32::MAX as u32, i32::MIN as u32, starts[0] + 10_000];
            starts.iter_mut().zip(wrong).for_each(|(start, wrong)| *start = wrong);
        }
        Self { data, ..self.clone() }
    }

    /// Holds the CPU to refuse the inputs with nothing written.
    fn refused_by_cpu(&self, level: Level) -> Result<Verdict, NoVerdict> {
        let (mut caches, mut outputs) = (self.before.clone(), Outputs::poisoned(&self.problem.attention));
        let poisoned = outputs.clone();
        let (inputs, written) = (self.data.inputs(), caches.outputs(&mut outputs));
        if flashcore_cpu::kv_cache_and_query(level, &self.problem, &inputs, written).is_ok() {
            return Err(NoVerdict::Taken);
        }
        let bits = |sums: &Option<Vec<f32>>| sums.iter().flatten().map(|sum| sum.to_bits()).collect::<Vec<_>>();
        if !caches.is_same(&self.before)
            || outputs.output != poisoned.output
            || bits(&outputs.lse) != bits(&poisoned.lse)
        {
            return Err(NoVerdict::Written("something of a call that was refused".to_owned()));
        }
        Ok(refused())
    }

    fn on_host(
        &self,
        run: impl FnOnce(&KvCacheData, KvCacheOutputs<'_>) -> Result<Vec<u8>, NoVerdict>,
    ) -> Result<Run, NoVerdict> {
        let (mut caches, mut outputs) = (self.before.clone(), Outputs::poisoned(&self.problem.attention));
        let data = run(&self.data, caches.outputs(&mut outputs))?;
        let query = Tensor { dtype: self.problem.attention.dtype, data };
        let between = self.problem.transforms().then(|| (query, self.expected.lengths.clone()));
        Ok(Run { caches, outputs, between })
    }

    /// Runs the append alone in the simulator, with another kernel where one is given.
    fn simulate_append(&self, append: Option<&VerifiedKernel>, seed: u64) -> Result<Run, NoVerdict> {
        self.simulate_separate(None, append, seed)
    }

    fn simulate(&self, config: Config, append: Option<&VerifiedKernel>, seed: u64) -> Result<Run, NoVerdict> {
        let attention = launch_plan(&self.problem.attended(), config, SIMULATED).map_err(NoVerdict::Refused)?;
        self.simulate_separate(attention, append, seed)
    }

    /// Runs the append in a launch of its own, and the attention after it.
    fn simulate_separate(
        &self,
        attention: Option<LaunchPlan>,
        append: Option<&VerifiedKernel>,
        seed: u64,
    ) -> Result<Run, NoVerdict> {
        let plan = LaunchPlan::kv_cache(&self.problem, attention, SIMULATED).map_err(NoVerdict::Refused)?;
        let plan = append.map_or(plan.clone(), |kernel| plan.with_kernel(Stage::Append, kernel.clone()));
        self.simulate_plan(&plan, seed)
    }

    /// Runs it in the simulator with the append inside of the attention launch; nothing where the config has no kernel for
    /// that.
    fn simulate_fused(&self, config: Config, seed: u64) -> Result<Option<Run>, NoVerdict> {
        let plan = LaunchPlan::with_append(&self.problem, config, SIMULATED);
        plan.ok().map(|plan| self.simulate_plan(&plan, seed)).transpose()
    }

    /// Runs a plan of the append, and of the attention if it has that.
    fn simulate_plan(&self, plan: &LaunchPlan, seed: u64) -> Result<Run, NoVerdict> {
        let mut memory = GlobalMemory::new();
        let mut values = self.allocate(&mut memory);
        values.workspace = memory.allocate_uninitialised("workspace", plan.workspace_bytes as usize);
        launch_all(plan, &values, &memory, seed)?;
        let mut outputs = Outputs::poisoned(&self.problem.attention);
        copy_outputs(&memory, &values, &mut outputs);
        let between = plan.between.map(|at| self.read_between(&memory, values.workspace, at)).transpose()?;
        Ok(Run { caches: self.read_caches(&memory, &values), outputs, between })
    }

    /// The caches after the append.
    fn read_caches(&self, memory: &GlobalMemory, values: &LaunchValues) -> Caches {
        let mut caches = self.before.clone();
        caches.key.data = memory.read(values.address(Operand::KeyCache));
        if let Some(value) = &mut caches.value {
            value.data = memory.read(values.address(Operand::ValueCache));
        }
        for (scale, operand) in caches.scales.iter_mut().zip([Operand::KScale, Operand::VScale]) {
            if let Some(scale) = scale {
                read_scale(memory, values.address(operand), scale);
            }
        }
        caches
    }

    /// A buffer for each operand.
    fn allocate(&self, memory: &mut GlobalMemory) -> LaunchValues {
        let (data, views) = (&self.data, self.data.attention.views());
        let words = |values: Option<&[u32]>| -> Vec<u8> {
            values.into_iter().flatten().flat_map(|value| value.to_le_bytes()).collect()
        };
        let mut values = LaunchValues::NONE;
        for operand in Operand::inputs() {
            if let Some(bytes) = views.bytes(operand)
                && !matches!(operand, Operand::Key | Operand::Value)
            {
                values.set(operand, memory.allocate(operand.name(), bytes));
            }
        }
        values.strides = views.call_strides();
        let written = [self.before.scales[0].as_ref(), self.before.scales[1].as_ref()];
        set_scales(&mut values, place_scales(memory, [None, None], written));
        for (operand, bytes) in [
            (Operand::NewKey, views.key.data),
            (Operand::NewValue, views.value.data),
            (Operand::Cos, &data.cos.data),
            (Operand::Sin, &data.sin.data),
            (Operand::QueryNorm, &data.query_norm.data),
            (Operand::KeyNorm, &data.key_norm.data),
            (Operand::CuSeqlensKNew, &words(data.cu_seqlens_k_new.as_deref())),
            (Operand::RotarySeqlens, &words(data.rotary_seqlens.as_deref())),
        ] {
            values.set(operand, place(memory, operand.name(), bytes));
        }
        let key_cache = memory.allocate("key_cache", &self.before.key.data);
        let value_cache = match &self.before.value {
            Some(cache) => memory.allocate("value_cache", &cache.data),
            None => key_cache + (self.before.offset * self.before.key.dtype.size_bytes()) as u64,
        };
        values.set(Operand::KeyCache, key_cache);
        values.set(Operand::ValueCache, value_cache);
        let outputs = Outputs::poisoned(&self.problem.attention);
        values.set(Operand::Output, memory.allocate_uninitialised("output", outputs.output.data.len()));
        let rows = outputs.lse.as_ref().map_or(0, Vec::len);
        values.set(Operand::Lse, memory.allocate_uninitialised("lse", rows * 4));
        values
    }

    /// Judges runs on the same inputs: caches, query and lengths after the append, then attention on them, by the accuracy of
    /// the config of a GPU kernel.
    fn judge(&self, config: Option<Config>, runs: &[Run]) -> Result<Verdict, NoVerdict> {
        let Some((first, repeats)) = runs.split_first() else { return Err(NoVerdict::Append("no run".to_owned())) };
        for run in runs {
            self.check_append(run).map_err(NoVerdict::Append)?;
            if !run.caches.is_same(&first.caches) {
                return Err(NoVerdict::Append("the bits of the caches differ from run to run".to_owned()));
            }
        }
        let inputs = self.data.inputs();
        let (key, value) = first.caches.views();
        let attended = self.problem.attended();
        let mut after = self.expected.attention_inputs(&self.problem, &inputs, key, value);
        let [k_scale, v_scale] = first.caches.scales.clone();
        (after.k_scale, after.v_scale) = (k_scale.or(after.k_scale), v_scale.or(after.v_scale));
        if let Some((query, _)) = &first.between {
            after.query = query.clone();
        }
        let yardstick = Yardstick::new(&attended, after)?;
        let repeats: Vec<_> = repeats.iter().map(|run| run.outputs.clone()).collect();
        let evidence = Evidence { repeats: &repeats, ..Evidence::new(yardstick.inputs(), &first.outputs) };
        Ok(yardstick.judge_kernel(&attended, config, &evidence)?)
    }

    fn check_append(&self, run: &Run) -> Result<(), String> {
        let before = &self.before;
        let append = &self.expected.append.with_computed_scales(before.scale_numbers(), run.caches.scale_numbers())?;
        match (&before.value, &run.caches.value) {
            (Some(value), Some(after)) => {
                append.check_key_cache(&before.key.data, &run.caches.key.data)?;
                append.check_value_cache(&value.data, &after.data)?;
            }
            _ => append.check_interleaved(before.offset, &before.key.data, &run.caches.key.data)?,
        }
        let Some((query, lengths)) = &run.between else { return Ok(()) };
        if lengths != &self.expected.lengths {
            return Err(format!(
                "the lengths after the append are {lengths:?}; they must be {:?}",
                self.expected.lengths
            ));
        }
        append.check_query_rows(&query.data)
    }
}

/// Kernels that replace the kernels of a trial.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Kernels<'a> {
    /// The append in a launch of its own.
    pub(super) append: Option<&'a VerifiedKernel>,
    /// The append inside of the attention launch.
    pub(super) fused: Option<&'a VerifiedKernel>,
}

/// A growing cache on arrays that the host refuses, with all that its results are judged by.
#[derive(Debug)]
pub(super) struct WrongAppend<'a> {
    right: &'a KvCacheTrial,
    wrong: KvCacheTrial,
}

impl<'a> WrongAppend<'a> {
    /// The arrays of a number in place of those of a trial.
    pub(super) fn new(right: &'a KvCacheTrial, number: u64) -> Self {
        Self { right, wrong: right.with_wrong_arrays(number) }
    }

    /// Runs it in two launches, and in one where the config has a kernel for that, and judges both.
    pub(super) fn verify(&self, config: Config, kernels: Kernels<'_>, seed: u64) -> Result<Verdict, NoVerdict> {
        let right = self.right.simulate(config, None, seed)?;
        let two = self.wrong.simulate(config, kernels.append, seed);
        let mut runs = vec![self.take(two, &right, self.searches_wrong_offsets())?];
        if let Ok(plan) = LaunchPlan::with_append(&self.right.problem, config, SIMULATED) {
            let plan = kernels.fused.map_or(plan.clone(), |kernel| plan.with_kernel(Stage::Attention, kernel.clone()));
            runs.push(self.take(self.wrong.simulate_plan(&plan, seed), &right, false)?);
        }
        self.right.judge(Some(config), &runs)
    }

    /// True if the append finds the sequence of a packed row by a search in offsets that are wrong: then rows of any
    /// sequence may be taken for those of another, or left out.
    fn searches_wrong_offsets(&self) -> bool {
        let (right, wrong) = (&self.right.data, &self.wrong.data);
        let queries = self.right.problem.transforms() && right.attention.cu_seqlens_q != wrong.attention.cu_seqlens_q;
        queries || right.cu_seqlens_k_new != wrong.cu_seqlens_k_new
    }

    fn wrong_sequences(&self, all: bool) -> Vec<bool> {
        let (problem, right, wrong) = (&self.right.problem.attention, &self.right.data, &self.wrong.data);
        let mut is_wrong = wrong_sequences(problem, &right.attention, &wrong.attention);
        for (sequence, is_wrong) in is_wrong.iter_mut().enumerate() {
            let offsets = |data: &KvCacheData| {
                data.cu_seqlens_k_new.as_ref().map(|offsets| offsets[sequence..sequence + 2].to_vec())
            };
            let start = |data: &KvCacheData| data.rotary_seqlens.as_ref().map(|starts| starts[sequence]);
            *is_wrong |= all || offsets(right) != offsets(wrong) || start(right) != start(wrong);
        }
        is_wrong
    }

    /// Rows of the caches that sequences with wrong entries may write.
    fn rows_of(&self, is_wrong: &[bool]) -> HashSet<(usize, usize)> {
        let (problem, data) = (&self.right.problem, &self.wrong.data);
        let (attention, arrays) = (&problem.attention, &data.attention);
        let mut rows = HashSet::new();
        for sequence in (0..attention.batch).filter(|&sequence| is_wrong[sequence]) {
            let new = match (&data.cu_seqlens_k_new, problem.total_new) {
                (Some(offsets), Some(total)) => rows_between(offsets, sequence, total).len().min(problem.new_length),
                _ => problem.new_length,
            };
            let used = arrays.seqused_k.as_ref().map_or(0, |used| used[sequence] as usize).min(attention.key_length);
            let batch = arrays.kv_batch_idx.as_ref().map_or(sequence, |batches| batches[sequence] as usize);
            for row in (used..attention.key_length).take(new).filter(|_| batch < attention.cache_batches()) {
                let place = match (attention.paged, &arrays.page_table) {
                    (Some(paged), Some(table)) => {
                        let page = table[batch * paged.table_stride + row / paged.page_size];
                        let page = usize::try_from(page).ok().filter(|&page| page < paged.num_pages);
                        page.map(|page| (page, row % paged.page_size))
                    }
                    _ => Some((batch, row)),
                };
                rows.extend(place);
            }
        }
        rows
    }

    /// Takes what may hold anything, and what nothing wrote, from a run on right arrays. An error if anything was written
    /// that no sequence has.
    fn take(&self, run: Result<Run, NoVerdict>, right: &Run, all: bool) -> Result<Run, NoVerdict> {
        let (problem, is_wrong) = (&self.right.problem, self.wrong_sequences(all));
        let (fates, mut is_contested) = fates(&problem.attention, &self.wrong.data.attention, &is_wrong);
        // In one launch, a sequence with a batch or page of another may read rows that the other appends.
        let [right_arrays, wrong_arrays] = [self.right, &self.wrong].map(|trial| &trial.data.attention);
        is_contested |= right_arrays.kv_batch_idx != wrong_arrays.kv_batch_idx
            || right_arrays.page_table != wrong_arrays.page_table;
        let mut run = match run {
            Err(error) if is_contested && is_race(&error) => return Ok(right.clone()),
            run => run?,
        };
        run.outputs = take_outputs(&problem.attention, &fates, [&run.outputs, &right.outputs])?;
        if let (Some((query, lengths)), Some((right_query, right_lengths))) = (&mut run.between, &right.between) {
            let attended = problem.attended();
            if problem.transforms() && !query.is_empty() {
                // A tensor of the append's own, which may hold anything in rows of no sequence.
                let place = (attended.query_shape(), attended.strides().query);
                *query = take_rows(&fates, place, [query, right_query, query])?;
            }
            for (sequence, length) in lengths.iter_mut().enumerate().filter(|&(sequence, _)| is_wrong[sequence]) {
                *length = right_lengths[sequence];
            }
        }
        let anything = self.rows_of(&is_wrong);
        for moved in problem.key_moves(&self.right.data.inputs()).iter().filter(|moved| is_wrong[moved.sequence]) {
            if !anything.contains(&moved.to) && !run.caches.has_same_row(problem, moved.to, &self.right.before) {
                return Err(NoVerdict::Written(format!("row {:?} of the caches, of no sequence", moved.to)));
            }
            run.caches.take_row(problem, moved.to, &right.caches);
        }
        for place in anything {
            run.caches.take_row(problem, place, &right.caches);
        }
        Ok(run)
    }
}
