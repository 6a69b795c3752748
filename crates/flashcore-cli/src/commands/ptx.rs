//! `flashcore ptx`: the generated kernels as text.

use clap::Args;
use flashcore_ir::Arch;
use flashcore_kernels::{LaunchPlan, Target, heuristics};
use flashcore_problem::{DType, DTypes};
use flashcore_ptx::{PrintOptions, print_with};

use super::reference_gpu;
use crate::output::Output;
use crate::{Ending, Failure};

/// Print the PTX of a problem's kernels
///
/// In launch order: if a mask_mod expression excludes keys, the kernel that finds its tiles comes first; if the keys are split
/// among CTAs (split-KV), the kernel that reduces the splits comes last.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore ptx --kernel ampere --source-lines\n  flashcore ptx --shape 2x16x8192x128+documents --mask causal --arch sm_90a\n  flashcore ptx --shape 8x32/8x1,8192x128+scales --dtype 'bf16 kv e4m3' --arch sm_89"
)]
pub(crate) struct Ptx {
    /// The problem: batch x heads[/key heads] x queries[,keys] x dim[+feature], where a feature is an expression, or scales of FP8
    #[arg(long, default_value = "1x8x512x64")]
    shape: String,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    #[arg(long, default_value_t = super::one_type(DType::F16))]
    dtype: DTypes,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// Compute the log-sum-exp as well
    #[arg(long)]
    lse: bool,
    /// The kernel, by family (scalar, steps, ampere, hopper) or by config [default: chosen for the architecture and the
    /// problem]
    #[arg(long)]
    kernel: Option<String>,
    /// The architecture: sm_80, sm_86, sm_89, sm_90, sm_90a or sm_120 [default: that of the first GPU, or sm_90a (H200)]
    #[arg(long)]
    arch: Option<Arch>,
    /// Show the Rust source line of every instruction
    #[arg(long)]
    source_lines: bool,
}

impl Ptx {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let problem = super::problem(&self.shape, self.dtype, &self.mask)?.problem.with_lse(self.lse);
        let arch = self.arch.unwrap_or_else(reference_gpu::arch);
        let config = match &self.kernel {
            Some(name) => super::config(name)?,
            None => heuristics::select(&problem, Target { arch, ..reference_gpu::TARGET }),
        };
        let plan = LaunchPlan::new(&problem, config, arch).map_err(|reasons| {
            Failure::Usage(reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
        })?;
        for launch in &plan.launches {
            let kernel = &launch.kernel();
            let text = print_with(kernel, PrintOptions { source_lines: self.source_lines });
            output.line(text.trim_end())?;
        }
        Ok(Ending::Well)
    }
}
