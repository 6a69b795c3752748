//! `flashcore ptx`: the generated kernels as text.

use clap::Args;
use flashcore_ir::Arch;
use flashcore_kernels::{Buffers, Config, Plan};
use flashcore_problem::DType;
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
    after_help = "Examples:\n  flashcore ptx --kernel ampere --source-lines\n  flashcore ptx --shape 2x16x8192x128+documents --mask causal --arch sm_90a"
)]
pub(crate) struct Ptx {
    /// The problem: batch x heads[/key heads] x queries[,keys] x dim[+expression]
    #[arg(long, default_value = "1x8x512x64")]
    shape: String,
    /// The element type
    #[arg(long, default_value_t = DType::F16)]
    dtype: DType,
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
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let problem = super::problem(&self.shape, self.dtype, &self.mask)?.with_lse(self.lse);
        let arch = self.arch.unwrap_or_else(reference_gpu::arch);
        let config = match &self.kernel {
            Some(name) => super::config(name)?,
            None => Config::tuned(&problem, arch, reference_gpu::NUM_SMS),
        };
        let plan = Plan::new(&problem, config, arch).map_err(|reasons| {
            Failure::Usage(reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
        })?;
        for (kernel, _, _) in plan.launches(Buffers::new(0, 0, 0, 0)) {
            let text = print_with(kernel, PrintOptions { source_lines: self.source_lines });
            output.line(text.trim_end())?;
        }
        Ok(Ending::Well)
    }
}
