//! Launch plan: the kernels that compute a problem, in the order in which they are launched, with grids, arguments and
//! workspace.

use std::sync::Arc;

use flashcore_ir::{Argument, VerifiedKernel};
use flashcore_problem::{KvCacheProblem, Operand, Problem};

use crate::attention::block_mask::BlockMaskShape;
use crate::attention::scheduler::dynamic::COUNTER_BYTES;
use crate::attention::split_kv::combine::{self, CombineSpec};
use crate::attention::split_kv::partial::workspace_bytes;
use crate::bindings::{LaunchValues, Place, Word};
use crate::cache::{FusedAppend, fused};
use crate::config::Config;
use crate::grid::GridShape;
use crate::parameters::{Extra, arguments, expression_constants, launch_words};
use crate::spec::{KernelKey, KernelSpec, Stage};
use crate::specialization::Specialization;
use crate::target::Target;
use crate::unsupported::{Reason, check_kernel, reasons};

/// The kernels that compute a problem, in order, and the memory that they share.
#[derive(Debug, Clone, Default)]
pub struct LaunchPlan {
    /// The config of the attention kernel; `None` without attention.
    pub config: Option<Config>,
    /// Memory that is filled before the launches.
    pub fill: Option<Fill>,
    /// The launches, in order.
    pub launches: Vec<KernelLaunch>,
    /// Bytes of memory that the kernels use among themselves.
    pub workspace_bytes: u64,
    /// Places in the workspace through which an append hands on to the attention after it.
    pub between: Option<Between>,
    /// Bytes of which the addresses of operands must be multiples, where that is more than their element.
    pub(crate) alignments: Vec<(Operand, u64)>,
}

/// Offsets in the workspace of the results of an append by sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Between {
    /// Rows that each sequence uses after the append, 32 bits each.
    pub lengths: u64,
    /// The query after norm and rotary embedding.
    pub query: u64,
}

/// Memory that is filled with one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// Its beginning.
    pub place: Place,
    /// Its length.
    pub bytes: u64,
    /// The byte.
    pub value: u8,
}

/// One kernel of a plan.
#[derive(Debug, Clone)]
pub struct KernelLaunch {
    /// The kernel.
    pub key: KernelKey,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Memory that L2 is asked to keep, and its bytes.
    pub kept_in_l2: Option<(Place, usize)>,
    /// Tokens of the plan, and the rows of each that CTAs have, where a launch may have fewer.
    tokens: (u32, Vec<TokenRows>),
    /// The arguments; those that a launch brings are 0.
    template: Vec<Argument>,
    /// The words that a launch brings, by the index of the argument.
    words: Vec<(usize, Word)>,
    /// The tensor maps whose addresses a launch brings, by the index of the argument.
    tensor_maps: Vec<(usize, Place)>,
    /// A kernel in the place of the generated one, which takes the same parameters.
    replaced: Option<Arc<VerifiedKernel>>,
}

/// Rows of a token that follow each other in the CTAs of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRows {
    pub(crate) per_token: u32,
    pub(crate) per_cta: u32,
}

impl KernelLaunch {
    /// The launch of a kernel without parameters.
    pub(crate) const fn new(key: KernelKey, grid: [u32; 3]) -> Self {
        Self {
            key,
            grid,
            kept_in_l2: None,
            tokens: (0, Vec::new()),
            template: Vec::new(),
            words: Vec::new(),
            tensor_maps: Vec::new(),
            replaced: None,
        }
    }

    /// The launch of a kernel without parameters whose grid follows from the number of tokens.
    pub(crate) fn of_tokens(key: KernelKey, tokens: u32, rows: Vec<TokenRows>) -> Self {
        let mut launch = Self { tokens: (tokens, rows), ..Self::new(key, [0; 3]) };
        launch.grid = launch.grid_of(&LaunchValues::NONE);
        launch
    }

    /// Adds arguments that the plan knows.
    pub(crate) fn extend(&mut self, arguments: impl IntoIterator<Item = Argument>) {
        self.template.extend(arguments);
    }

    /// Adds words that a launch brings.
    pub(crate) fn extend_with_words(&mut self, words: impl IntoIterator<Item = Word>) {
        for word in words {
            self.words.push((self.template.len(), word));
            self.template.push(Argument::U64(0));
        }
    }

    /// The kernel, generated on a miss of the cache.
    ///
    /// # Panics
    ///
    /// Never for a launch of a plan: [`LaunchPlan::new`] refuses kernels that break a rule.
    pub fn kernel(&self) -> Arc<VerifiedKernel> {
        let generated = || self.key.kernel().expect("the plan has checked the kernel");
        self.replaced.clone().unwrap_or_else(generated)
    }

    /// The step that the kernel takes.
    pub const fn stage(&self) -> Stage {
        self.key.spec.stage()
    }

    /// True if the launch may overlap with the one before it (PDL), which the generated kernel waits for. A kernel in its
    /// place is launched in the same way.
    ///
    /// # Panics
    ///
    /// Never for a launch of a plan, like [`kernel`](Self::kernel).
    pub fn overlaps_previous(&self) -> bool {
        self.key.kernel().expect("the plan has checked the kernel").waits_for_previous()
    }

    /// The arguments of no launch: [`words`](Self::words) and addresses of [`tensor_maps`](Self::tensor_maps) are 0.
    pub fn template(&self) -> &[Argument] {
        &self.template
    }

    /// The words of a launch, by the index of the argument.
    pub fn words(&self, values: &LaunchValues) -> impl Iterator<Item = (usize, u64)> {
        self.words.iter().map(|&(index, word)| (index, values.word(word, self.tokens.0)))
    }

    /// The addresses in tensor maps of a launch, by the index of the argument.
    pub fn tensor_maps(&self, values: &LaunchValues) -> impl Iterator<Item = (usize, u64)> {
        self.tensor_maps.iter().map(|&(index, place)| (index, values.place(place)))
    }

    /// CTAs of a launch in x, y and z.
    pub fn grid_of(&self, values: &LaunchValues) -> [u32; 3] {
        let (all, rows) = &self.tokens;
        if rows.is_empty() {
            return self.grid;
        }
        let tokens = values.tokens.unwrap_or(*all);
        [rows.iter().map(|rows| (tokens * rows.per_token).div_ceil(rows.per_cta)).sum(), 1, 1]
    }

    /// All arguments of one launch.
    pub fn arguments(&self, values: &LaunchValues) -> Vec<Argument> {
        let mut arguments = self.template.clone();
        for (index, word) in self.words(values) {
            arguments[index] = Argument::U64(word);
        }
        for (index, address) in self.tensor_maps(values) {
            if let Argument::TensorMap(map) = &mut arguments[index] {
                map.base = address;
            }
        }
        arguments
    }
}

impl LaunchPlan {
    /// The kernels of `config` for `problem` on a GPU, or all reasons against it. Nothing is generated for a kernel that
    /// was checked before in this process.
    pub fn new(problem: &Problem, config: Config, target: impl Into<Target>) -> Result<Self, Vec<Reason>> {
        Self::of_attention(problem, config, target.into(), None)
    }

    /// The kernels of attention, with an append inside of the launch where that is given.
    pub(crate) fn of_attention(
        problem: &Problem,
        config: Config,
        target: Target,
        append: Option<&KvCacheProblem>,
    ) -> Result<Self, Vec<Reason>> {
        let Target { arch, num_sms, .. } = target;
        let reasons = reasons(problem, config, target);
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let specialization = Specialization { append: append.map(FusedAppend::of), ..config.specialization(problem) };
        let family = config.as_family();
        let GridShape { grid, extra } = family.grid(problem);
        let block_mask = BlockMaskShape::of(problem, config);
        let (partials, rows) = match extra {
            Extra::Splits { num_splits, rows } => (num_splits, rows),
            Extra::Chunks { max_chunks, rows, .. } if max_chunks > 1 => (max_chunks, rows),
            Extra::Chunks { .. } | Extra::Nothing | Extra::Tiles { .. } => (0, 0),
        };
        let block_mask_offset = workspace_bytes(partials.into(), rows, problem.value_dim as u64).next_multiple_of(16);
        let plain = arguments(problem, block_mask);
        // The arguments of every kernel of attention, with the constants of its expressions and its scales.
        let launch = |spec: KernelSpec, grid: [u32; 3]| {
            let mut launch = KernelLaunch::new(KernelKey { spec, arch }, grid);
            launch.extend(plain.iter().copied());
            launch.words.extend(launch_words(block_mask_offset));
            if let KernelSpec::Attention(_, specialization) | KernelSpec::BlockMask(_, specialization) = spec {
                launch.extend(expression_constants(problem));
                launch.extend_with_words(specialization.scales().flat_map(Word::scale));
            }
            launch
        };
        let extend_with_append = |launch: &mut KernelLaunch| {
            if let Some(problem) = append {
                fused::extend(launch, problem);
            }
        };
        let mut launches = Vec::new();
        if let (Some(shape), Some(tiles)) = (block_mask, config.block_mask_tiles(specialization)) {
            launches.push(launch(KernelSpec::BlockMask(tiles, specialization), shape.grid()));
        }
        if let Some(pdl) = family.traits().resets_counter {
            launches.push(launch(KernelSpec::ResetCounter { pdl }, [1, 1, 1]));
        }
        let mut attention = launch(KernelSpec::Attention(config.compiled(), specialization), grid);
        extend_with_append(&mut attention);
        attention.extend(extra.arguments());
        if family.traits().keeps_key_in_l2 {
            let extent = problem.strides().key.extent(problem.key_shape()).unwrap_or(0);
            let bytes = extent.saturating_mul(Operand::Key.element_bytes(problem));
            attention.kept_in_l2 = Some((Operand::Key.into(), bytes));
        }
        for (operand, map) in family.tensor_maps(problem) {
            attention.tensor_maps.push((attention.template.len(), operand.into()));
            attention.extend([Argument::TensorMap(map)]);
        }
        if let Some((order, ctas)) = family.order(problem, specialization, num_sms) {
            attention.grid = ctas.map_or(grid, |ctas| [ctas, 1, 1]);
            attention.extend(order.arguments());
        }
        launches.push(attention);
        if partials > 0 {
            let tiles = problem.query_length.div_ceil(combine::ROWS as usize) as u32;
            let grid = [tiles, problem.query_heads as u32, problem.batch as u32];
            let spec = CombineSpec::of(config, specialization);
            let mut combine = launch(KernelSpec::Combine(spec), grid);
            if spec.specialization.append.is_some() {
                extend_with_append(&mut combine);
            }
            combine.extend(extra.arguments());
            launches.push(combine);
        }
        // Sequences have neither splits nor a block mask beside the counter.
        let counter = family.traits().resets_counter.map_or(0, |_| COUNTER_BYTES);
        let workspace_bytes = (block_mask_offset + block_mask.map_or(0, BlockMaskShape::bytes)).max(counter);
        // TMA and the widest accesses take 16 bytes at a time.
        let alignments = [Operand::Query, Operand::Key, Operand::Value, Operand::Output].map(|operand| (operand, 16));
        let plan = Self::of_operation(launches, alignments.into(), target)?;
        Ok(Self { config: Some(config), workspace_bytes, ..plan })
    }

    /// A plan of kernels that share no memory, or the rules that they break.
    pub(crate) fn of_operation(
        launches: Vec<KernelLaunch>,
        alignments: Vec<(Operand, u64)>,
        target: Target,
    ) -> Result<Self, Vec<Reason>> {
        for launch in &launches {
            check_kernel(launch.key, target)?;
        }
        Ok(Self { launches, alignments, ..Self::default() })
    }

    /// The plan with an operand in another place.
    #[must_use]
    pub(crate) fn moved(mut self, operand: Operand, to: impl Into<Place>) -> Self {
        let to = to.into();
        let change = |place: Place| if place.operand == Some(operand) { to.plus(place.offset) } else { place };
        for launch in &mut self.launches {
            launch.words.iter_mut().for_each(|(_, word)| *word = word.map(change));
            launch.tensor_maps.iter_mut().for_each(|(_, place)| *place = change(*place));
            launch.kept_in_l2 = launch.kept_in_l2.map(|(place, bytes)| (change(place), bytes));
        }
        self.alignments = self
            .alignments
            .into_iter()
            .filter_map(|(known, bytes)| {
                if known == operand { to.operand.map(|operand| (operand, bytes)) } else { Some((known, bytes)) }
            })
            .collect();
        self
    }

    /// Bytes of which the address of an operand must be a multiple, where that is more than its element.
    pub fn alignment(&self, operand: Operand) -> u64 {
        let alignments = self.alignments.iter().filter(|(known, _)| *known == operand);
        alignments.map(|&(_, bytes)| bytes).max().unwrap_or(1)
    }

    /// The launch of the attention kernel itself.
    ///
    /// # Panics
    ///
    /// Never: every plan has one.
    pub fn attention(&self) -> &KernelLaunch {
        self.launch(Stage::Attention).expect("every plan has an attention kernel")
    }

    /// The launch of a stage, where the plan has one.
    pub fn launch(&self, stage: Stage) -> Option<&KernelLaunch> {
        self.launches.iter().find(|launch| launch.stage() == stage)
    }

    /// The plan with another kernel for a stage, which takes the same parameters. For tools that transform kernels.
    #[must_use]
    pub fn with_kernel(&self, stage: Stage, kernel: VerifiedKernel) -> Self {
        let kernel = Arc::new(kernel);
        let mut plan = self.clone();
        for launch in plan.launches.iter_mut().filter(|launch| launch.stage() == stage) {
            launch.replaced = Some(kernel.clone());
        }
        plan
    }

    /// The plan with CTAs for some of the rows only: the grids of another plan for the same stages. For tools that look
    /// at those.
    #[must_use]
    pub fn with_grids_of(mut self, other: &Self) -> Self {
        for launch in &mut self.launches {
            launch.grid = other.launch(launch.stage()).map_or(launch.grid, |other| other.grid);
        }
        self
    }
}
