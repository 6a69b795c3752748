//! A case: a problem, a seed for its inputs, and the backend that computes it.

use core::fmt;

use flashcore_cpu::Level;
use flashcore_kernels::Config;
use flashcore_problem::{
    DType, Inputs, KvCacheProblem, Layout, LseBase, LseForm, Mask, Operand, Problem, SequenceLengths, Stress,
};

use crate::testkit::scale_form::ScaleForm;
use crate::testkit::shape::text;
use crate::testkit::wrong_arrays::Arrays;
use crate::testkit::{BiasForm, Numbers};

/// Backend that computes attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The native CPU kernels, at a level.
    Cpu(Level),
    /// A GPU kernel in the simulator.
    Sim(Config),
    /// A GPU kernel on the first GPU.
    Cuda(Config),
}

impl Backend {
    /// The config of a GPU kernel.
    pub const fn config(self) -> Option<Config> {
        match self {
            Self::Cpu(_) => None,
            Self::Sim(config) | Self::Cuda(config) => Some(config),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(level) => write!(formatter, "cpu {level}"),
            Self::Sim(config) => write!(formatter, "sim {config}"),
            Self::Cuda(config) => write!(formatter, "cuda {config}"),
        }
    }
}

/// One thing to verify.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The problem.
    pub problem: Problem,
    /// The seed of the inputs, and of the order in which the simulator runs warps.
    pub seed: u64,
    /// Contents of the inputs.
    pub numbers: Numbers,
    /// Memory layout of the bias, where there is one.
    pub bias: BiasForm,
    /// Lengths of the sequences, of normal numbers.
    pub lengths: SequenceLengths,
    /// Form of the scales of 8-bit tensors; without it, the seed draws one.
    pub scales: Option<ScaleForm>,
    /// What the arrays hold that lie on a device.
    pub arrays: Arrays,
    /// The append before attention, where the KV cache grows; its attention is the problem.
    pub kv_cache: Option<Box<KvCacheProblem>>,
    /// The backend.
    pub backend: Backend,
    /// Runs after the first, which must give the same bits; in the simulator under other orders of warps.
    pub repeats: usize,
    /// The command that repeats it, where shape, type, mask and seed do not say everything.
    pub command: Option<String>,
}

impl Case {
    /// Independent normal inputs.
    pub const fn new(problem: Problem, seed: u64, backend: Backend) -> Self {
        let (numbers, bias, lengths) = (Numbers::Normal, BiasForm::PerHead, SequenceLengths::Ragged);
        let (scales, arrays) = (None, Arrays::Right);
        Self {
            problem,
            seed,
            numbers,
            bias,
            lengths,
            scales,
            arrays,
            kv_cache: None,
            backend,
            repeats: 1,
            command: None,
        }
    }

    /// Attention after an append to the cache of each sequence.
    pub fn with_kv_cache(problem: KvCacheProblem, seed: u64, backend: Backend) -> Self {
        let attention = problem.attention.clone();
        Self { kv_cache: Some(Box::new(problem)), ..Self::new(attention, seed, backend) }
    }

    /// Inputs of the case.
    pub fn inputs(&self) -> Inputs {
        let mut inputs = self.numbers.inputs_of_lengths(&self.problem, self.seed, self.bias, self.lengths);
        if let Some(form) = self.scales {
            form.draw(&self.problem, &mut inputs, self.seed);
        }
        inputs
    }

    /// The shape, as `--shape` takes it.
    fn shape(&self) -> String {
        text(&self.problem, self.scales)
    }

    /// The command that repeats it alone.
    pub fn command(&self) -> String {
        let level = match self.backend {
            Backend::Cpu(level) => format!(" --cpu-level {level}"),
            Backend::Sim(_) | Backend::Cuda(_) => String::new(),
        };
        if let Some(command) = &self.command {
            return format!("{command}{level}");
        }
        let Self { problem, seed, .. } = self;
        let backend = match self.backend {
            Backend::Cpu(_) => format!("cpu{level}"),
            Backend::Sim(config) => format!("sim --kernel {config}"),
            Backend::Cuda(config) => format!("cuda --kernel {config}"),
        };
        let (shape, dtype, mask) = (self.shape(), dtype_options(problem), mask_text(problem.mask));
        let lse = match (problem.lse, problem.lse_form.base) {
            (false, _) => "",
            (true, LseBase::Natural) => " --lse",
            (true, LseBase::Two) => " --lse --lse-base2",
        };
        let stress = match self.numbers {
            Numbers::Stress(stress) => format!(" --stress {}", stress_name(stress)),
            Numbers::Normal | Numbers::Planted(_) => String::new(),
        };
        let layout = match problem.layout {
            Layout::Bhsd => "",
            Layout::Bshd => " --layout bshd",
            Layout::PackedQkv => " --layout packed-qkv",
            Layout::Strided(_) => " --layout strided",
        };
        format!(
            "flashcore verify --backend {backend} --shape {shape} {dtype} --mask {mask} --seed {seed}{lse}{layout}{stress}"
        )
    }
}

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { problem, seed, backend, .. } = self;
        let mask = mask_text(problem.mask);
        write!(formatter, "{backend} {} {} {mask} seed {seed}", self.shape(), problem.dtypes())?;
        match self.numbers {
            Numbers::Normal => {}
            Numbers::Stress(stress) => write!(formatter, " {}", stress_name(stress))?,
            Numbers::Planted(planted) => write!(formatter, " {}", planted.name())?,
        }
        if let Some(softcap) = problem.softcap {
            write!(formatter, " softcap {softcap}")?;
        }
        let usual = Problem::new(1, 1, 1, problem.head_dim, problem.dtype).scale;
        if problem.scale != usual {
            write!(formatter, " scale {}", problem.scale)?;
        }
        let optional = [
            (problem.alibi, "alibi"),
            (problem.sinks, "sinks"),
            (problem.bias, self.bias.name()),
            (matches!(problem.layout, Layout::Strided(_)), "strided"),
        ];
        let optional = optional.into_iter().filter(|(present, _)| *present).map(|(_, name)| name);
        let others = other_operands().filter(|operand| operand.is_present(problem)).map(Operand::feature);
        optional.chain(others).try_for_each(|name| write!(formatter, " {name}"))?;
        LseForm::of(problem).features().try_for_each(|name| write!(formatter, " {name}"))?;
        if problem.is_ragged() && problem.layout == Layout::Bshd {
            formatter.write_str(" bshd")?;
        }
        if let Some(kv_cache) = &self.kv_cache {
            write!(formatter, " {}", kv_cache.append_text())?;
        }
        match self.lengths {
            SequenceLengths::Ragged => {}
            lengths => write!(formatter, " {}", lengths.name())?,
        }
        match self.arrays {
            Arrays::Right => Ok(()),
            Arrays::Crowded => formatter.write_str(" crowded"),
            Arrays::Wrong(number) => write!(formatter, " wrong arrays {number}"),
        }
    }
}

/// The optional operands that suites have no special numbers for: all that are not listed. Those of packed and paged
/// sequences are in the suite `serving`.
pub(crate) fn other_operands() -> impl Iterator<Item = Operand> {
    use Operand::{
        AlibiSlopes, AuxF32, AuxI32, Bias, CuSeqlensK, CuSeqlensQ, KvBatchIdx, LeftpadK, Lse, PageTable, SequsedK,
        SequsedQ, Sinks,
    };
    let has_numbers =
        |operand: &Operand| matches!(operand, Lse | SequsedK | AlibiSlopes | Sinks | AuxF32 | AuxI32 | Bias);
    let is_of_sequences =
        |operand: &Operand| matches!(operand, CuSeqlensQ | CuSeqlensK | SequsedQ | LeftpadK | KvBatchIdx | PageTable);
    // Scales belong to types of 8 bits, which have features of their own.
    let is_other = move |operand: &Operand| !has_numbers(operand) && !is_of_sequences(operand) && !operand.is_scale();
    Operand::optional().filter(is_other)
}

/// The options that give a problem its element types.
fn dtype_options(problem: &Problem) -> String {
    let option =
        |name: &str, dtype: Option<DType>| dtype.map_or_else(String::new, |dtype| format!(" --{name} {dtype}"));
    let (kv_dtype, out_dtype) = (option("kv-dtype", problem.kv_dtype), option("out-dtype", problem.out_dtype));
    format!("--dtype {}{kv_dtype}{out_dtype}", problem.dtype)
}

/// The name of a kind of inputs on the command line.
pub const fn stress_name(stress: Stress) -> &'static str {
    match stress {
        Stress::LargeScores => "large-scores",
        Stress::OneHot => "one-hot",
        Stress::Constant => "constant",
        Stress::SmallIntegers => "small-integers",
    }
}

/// A mask as the command line spells it.
pub fn mask_text(mask: Mask) -> String {
    use flashcore_problem::Alignment::{BottomRight, TopLeft};
    match mask {
        Mask::None => "full".to_owned(),
        Mask::Causal(TopLeft) => "causal-top-left".to_owned(),
        Mask::Causal(BottomRight) => "causal".to_owned(),
        Mask::Window { left, right, alignment } => {
            let side = |limit: Option<usize>| limit.map_or_else(|| "all".to_owned(), |limit| limit.to_string());
            let corner = match alignment {
                TopLeft => "-top-left",
                BottomRight => "",
            };
            format!("window{corner}:{},{}", side(left), side(right))
        }
    }
}
