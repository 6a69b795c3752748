//! `flashcore ptx`: the generated kernels as text.

use clap::Args;
use flashcore_ir::Arch;
use flashcore_kernels::{Buffers, Config, Plan};
use flashcore_problem::DType;
use flashcore_ptx::{PrintOptions, print_with};

use crate::output::Output;
use crate::{Ending, Failure};

/// Print the PTX of a problem's kernels
///
/// In the order in which they are launched: where a formula takes keys out, the kernel that finds its tiles comes first;
/// where CTAs take parts of the keys, the one that adds them up comes last.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore ptx --kernel ampere --source-lines\n  flashcore ptx --shape 2x16x8192x128+documents --mask causal --arch sm_90a"
)]
pub(crate) struct Ptx {
    /// The problem: batch x heads[/key heads] x queries[,keys] x dim[+formula]
    #[arg(long, default_value = "1x8x512x64")]
    shape: String,
    /// The element type
    #[arg(long, default_value_t = DType::F16)]
    dtype: DType,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// With the log-sum-exp as a second output
    #[arg(long)]
    lse: bool,
    /// The kernel, by family (scalar, steps, ampere, hopper) or by config; the default of the problem on a large GPU
    /// unless said
    #[arg(long)]
    kernel: Option<String>,
    /// The architecture: sm_80, sm_86, sm_89, sm_90, sm_90a or sm_120
    #[arg(long, default_value_t = Arch::Sm89)]
    arch: Arch,
    /// With the Rust source line of every instruction
    #[arg(long)]
    source_lines: bool,
}

/// What defaults are chosen for.
const MULTIPROCESSORS: u32 = 132;

impl Ptx {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let problem = super::problem(&self.shape, self.dtype, &self.mask)?.with_log_sum_exp(self.lse);
        let config = match &self.kernel {
            Some(name) => super::config(name)?,
            None => Config::tuned(&problem, self.arch, MULTIPROCESSORS),
        };
        let plan = Plan::new(&problem, config, self.arch).map_err(|reasons| {
            Failure::Usage(reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
        })?;
        for (kernel, _, _) in plan.launches(Buffers::new(0, 0, 0, 0)) {
            let text = print_with(kernel, PrintOptions { source_lines: self.source_lines });
            output.line(text.trim_end())?;
        }
        Ok(Ending::Well)
    }
}
