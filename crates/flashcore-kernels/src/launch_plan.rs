//! Launch plan: the kernels that compute a problem, in the order in which they are launched, with grids, arguments and
//! workspace.

use std::sync::Arc;

use flashcore_ir::{Argument, VerifiedKernel};
use flashcore_problem::{KvCacheProblem, Operand, Problem};

use crate::attention::block_mask::BlockMaskShape;
use crate::attention::scheduler::dynamic::COUNTER_BYTES;
use crate::attention::scheduler::lpt::LptOrder;
use crate::attention::sm90::tensor_maps::tensor_maps;
use crate::attention::split_kv::combine;
use crate::attention::split_kv::partial::workspace_bytes;
use crate::cache::{FUSED_WORDS, FusedAppend, fused};
use crate::config::{AmpereConfig, Config, HopperConfig, L2Window};
use crate::grid::GridShape;
use crate::parameters::{Extra, LAUNCH_BLOCKS, LaunchValues, SCALE_WORDS, arguments, expression_constants};
use crate::spec::{KernelSpec, Stage};
use crate::specialization::Specialization;
use crate::target::Target;
use crate::unsupported::{Reason, check_kernel, reasons};

/// The kernels that compute a problem, in order, and the memory that they share.
#[derive(Debug, Clone)]
pub struct LaunchPlan {
    /// The config of the attention kernel.
    pub config: Config,
    /// The launches, in order.
    pub launches: Vec<KernelLaunch>,
    /// Bytes of memory that the kernels use among themselves.
    pub workspace_bytes: u64,
    /// Offset of the block mask in that memory.
    block_mask_offset: u64,
    problem: Problem,
}

/// One kernel of a plan.
#[derive(Debug, Clone)]
pub struct KernelLaunch {
    /// The kernel.
    pub spec: KernelSpec,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// The arguments; those of [`LAUNCH_BLOCKS`] and the addresses in tensor maps are 0.
    arguments: Vec<Argument>,
    /// The operands whose tensor maps are among the arguments, with the index of each.
    tensor_maps: Vec<(usize, Operand)>,
    /// The scales whose words are among the arguments, with the index of the first word of each.
    scale_words: Vec<(usize, Operand)>,
    /// The first of the words of an append inside of the launch, where the kernel has those.
    append_words: Option<usize>,
    /// A kernel in the place of the generated one, which takes the same parameters.
    replaced: Option<Arc<VerifiedKernel>>,
}

impl KernelLaunch {
    /// The launch of a kernel with the arguments that it has besides those of scales, which follow.
    fn new(spec: KernelSpec, grid: [u32; 3], mut arguments: Vec<Argument>) -> Self {
        let mut scale_words = Vec::new();
        for scale in spec.specialization.scales() {
            scale_words.push((arguments.len(), scale));
            arguments.extend([Argument::U64(0); SCALE_WORDS]);
        }
        Self { spec, grid, arguments, tensor_maps: Vec::new(), scale_words, append_words: None, replaced: None }
    }

    /// Adds the arguments of an append inside of the launch, where there are any.
    fn extend_with_append(&mut self, arguments: &[Argument]) {
        self.append_words = (!arguments.is_empty()).then_some(self.arguments.len());
        self.arguments.extend_from_slice(arguments);
    }

    /// The kernel, generated now or a moment ago.
    ///
    /// # Panics
    ///
    /// Never for a launch of a plan: [`LaunchPlan::new`] refuses kernels that break a rule.
    pub fn kernel(&self) -> Arc<VerifiedKernel> {
        let generated = || self.spec.kernel().expect("the plan has checked the kernel");
        self.replaced.clone().unwrap_or_else(generated)
    }

    /// True if the launch may overlap with the one before it (PDL), which the generated kernel waits for. A kernel in its
    /// place is launched in the same way.
    ///
    /// # Panics
    ///
    /// Never for a launch of a plan, like [`kernel`](Self::kernel).
    pub fn overlaps_previous(&self) -> bool {
        self.spec.kernel().expect("the plan has checked the kernel").waits_for_previous()
    }

    /// The arguments with nothing of a launch in them: those of [`LAUNCH_BLOCKS`] and the addresses in tensor maps are 0.
    pub fn template(&self) -> &[Argument] {
        &self.arguments
    }

    /// The operands whose tensor maps are among the arguments, with the index of each.
    pub fn tensor_maps(&self) -> &[(usize, Operand)] {
        &self.tensor_maps
    }

    /// The scales whose words are among the arguments ([`LaunchValues::scale_words`]), with the index of the first word of
    /// each.
    pub fn scale_words(&self) -> &[(usize, Operand)] {
        &self.scale_words
    }

    /// The first of the words of an append inside of the launch, where the kernel has those
    /// ([`FusedValues::words`](crate::cache::FusedValues::words)).
    pub const fn append_words(&self) -> Option<usize> {
        self.append_words
    }

    /// All arguments of one launch.
    fn arguments(&self, values: &LaunchValues, block_mask_offset: u64) -> Vec<Argument> {
        let mut arguments = self.arguments.clone();
        let words = values.words(block_mask_offset).map(Argument::U64);
        for (first, block) in LAUNCH_BLOCKS {
            arguments[first..][..block.len()].copy_from_slice(&words[block]);
        }
        for &(first, scale) in &self.scale_words {
            arguments[first..][..SCALE_WORDS].copy_from_slice(&values.scale_words(scale).map(Argument::U64));
        }
        if let Some(first) = self.append_words {
            arguments[first..][..FUSED_WORDS].copy_from_slice(&values.append.words().map(Argument::U64));
        }
        for &(index, operand) in &self.tensor_maps {
            if let Argument::TensorMap(map) = &mut arguments[index] {
                map.base = values.address(operand);
            }
        }
        arguments
    }
}

impl LaunchPlan {
    /// The kernels of `config` for `problem` on a GPU, or all reasons against it. Nothing is generated for a kernel that
    /// was checked before in this process.
    pub fn new(problem: &Problem, config: Config, target: impl Into<Target>) -> Result<Self, Vec<Reason>> {
        Self::build(problem, config, target.into(), None)
    }

    /// The kernels of `config` for attention that appends the new keys itself, or all reasons against it.
    pub fn with_append(
        problem: &KvCacheProblem,
        config: Config,
        target: impl Into<Target>,
    ) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let reasons = fused::reasons(problem, config);
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let append = (FusedAppend::of(problem), fused::arguments(problem));
        Self::build(&problem.attention, config, target.into(), Some(append))
    }

    fn build(
        problem: &Problem,
        config: Config,
        target: Target,
        append: Option<(FusedAppend, Vec<Argument>)>,
    ) -> Result<Self, Vec<Reason>> {
        let Target { arch, num_sms, .. } = target;
        let reasons = reasons(problem, config, target);
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let (append, append_arguments) = append.unzip();
        let append_arguments = append_arguments.unwrap_or_default();
        let specialization = Specialization { append, ..config.specialization(problem) };
        let GridShape { grid, extra } = GridShape::new(problem, config);
        let block_mask = BlockMaskShape::of(problem, config);
        let block_mask_offset = match extra {
            Extra::Splits { num_splits, rows } | Extra::Chunks { max_chunks: num_splits, rows, .. } => {
                workspace_bytes(num_splits.into(), rows, problem.value_dim as u64).next_multiple_of(16)
            }
            Extra::Nothing | Extra::Tiles { .. } => 0,
        };
        let block_mask_offset =
            if matches!(extra, Extra::Chunks { max_chunks: 1, .. }) { 0 } else { block_mask_offset };
        let plain = arguments(problem, block_mask);
        let common: Vec<_> = plain.iter().copied().chain(expression_constants(problem)).collect();
        let spec = |stage| KernelSpec::new(stage, config, specialization, arch);
        let mut launches = Vec::new();
        if let Some(shape) = block_mask.filter(|_| config.precomputes_block_mask(specialization)) {
            launches.push(KernelLaunch::new(spec(Stage::BlockMask), shape.grid(), common.clone()));
        }
        let dynamic = matches!(config, Config::Hopper(HopperConfig { dynamic: true, .. }));
        if dynamic {
            launches.push(KernelLaunch::new(spec(Stage::ResetCounter), [1, 1, 1], plain.clone()));
        }
        let mut attention = KernelLaunch::new(spec(Stage::Attention), grid, common);
        attention.extend_with_append(&append_arguments);
        attention.arguments.extend(extra.arguments());
        if let Config::Hopper(hopper) = config {
            for (operand, map) in tensor_maps(problem, hopper) {
                attention.tensor_maps.push((attention.arguments.len(), operand));
                attention.arguments.push(Argument::TensorMap(map));
            }
            let mut order = LptOrder::of(problem, hopper);
            if hopper.persistent {
                let mut ctas = grid[0].min(num_sms.max(1));
                let heads = problem.query_heads as u32;
                if specialization.has_query_lengths() && specialization.right && heads <= ctas && !dynamic {
                    // Sequences of equal length: long and short tiles alternate for each CTA.
                    ctas -= ctas % heads;
                }
                order = order.for_ctas(problem, hopper, ctas);
                attention.grid = [ctas, 1, 1];
            }
            attention.arguments.extend(order.arguments());
        }
        let has_partials = match extra {
            Extra::Splits { .. } => true,
            Extra::Chunks { max_chunks, .. } => max_chunks > 1,
            Extra::Nothing | Extra::Tiles { .. } => false,
        };
        let combine = has_partials.then(|| {
            let tiles = problem.query_length.div_ceil(combine::ROWS as usize) as u32;
            let grid = [tiles, problem.query_heads as u32, problem.batch as u32];
            let mut combine = KernelLaunch::new(spec(Stage::Combine), grid, plain);
            if combine.spec.specialization.append.is_some() {
                combine.extend_with_append(&append_arguments);
            }
            combine.arguments.extend(extra.arguments());
            combine
        });
        launches.push(attention);
        launches.extend(combine);
        for launch in &launches {
            check_kernel(launch.spec, target)?;
        }
        // Sequences have neither splits nor a block mask beside the counter.
        let counter = if dynamic { COUNTER_BYTES } else { 0 };
        let workspace_bytes = (block_mask_offset + block_mask.map_or(0, BlockMaskShape::bytes)).max(counter);
        Ok(Self { config, launches, workspace_bytes, block_mask_offset, problem: problem.clone() })
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
        self.launches.iter().find(|launch| launch.spec.stage == stage)
    }

    /// Offset of the block mask in the workspace.
    pub const fn block_mask_offset(&self) -> u64 {
        self.block_mask_offset
    }

    /// All arguments of a launch of this plan.
    pub fn arguments(&self, launch: &KernelLaunch, values: &LaunchValues) -> Vec<Argument> {
        launch.arguments(values, self.block_mask_offset)
    }

    /// Bytes that the key reaches over, if L2 is to keep it.
    pub fn l2_key_bytes(&self) -> Option<usize> {
        if !matches!(self.config, Config::Ampere(AmpereConfig { l2: L2Window::Key, .. })) {
            return None;
        }
        let extent = self.problem.strides().key.extent(self.problem.key_shape());
        Some(extent.unwrap_or(0).saturating_mul(Operand::Key.element_bytes(&self.problem)))
    }

    /// The plan with another kernel for a stage, which takes the same parameters. For tools that transform kernels.
    #[must_use]
    pub fn with_kernel(&self, stage: Stage, kernel: VerifiedKernel) -> Self {
        let kernel = Arc::new(kernel);
        let mut plan = self.clone();
        for launch in plan.launches.iter_mut().filter(|launch| launch.spec.stage == stage) {
            launch.replaced = Some(kernel.clone());
        }
        plan
    }

    /// The plan with CTAs for some of the rows only: the grids of another plan for the same stages. For tools that look
    /// at those.
    #[must_use]
    pub fn with_grids_of(mut self, other: &Self) -> Self {
        for launch in &mut self.launches {
            launch.grid = other.launch(launch.spec.stage).map_or(launch.grid, |other| other.grid);
        }
        self
    }
}
