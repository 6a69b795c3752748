//! `flashcore ptx`: the generated kernel as text.

use clap::Args;
use flashcore_ir::Arch;
use flashcore_kernels::Specialisation;
use flashcore_problem::DType;
use flashcore_ptx::{PrintOptions, print_with};

use crate::output::Output;
use crate::{Ending, Failure};

/// Print the PTX of a kernel
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  flashcore ptx --kernel ampere --head-dim 64 --arch sm_89 --source-lines")]
pub(crate) struct Ptx {
    /// The kernel, by family (scalar, ampere) or by config
    #[arg(long, default_value = "ampere")]
    kernel: String,
    /// The element type: f16 or bf16
    #[arg(long, default_value_t = DType::F16)]
    dtype: DType,
    /// Columns of query, key and value: 32, 64, 96, 128, 192 or 256
    #[arg(long, default_value_t = 64)]
    head_dim: u32,
    /// With a causal mask
    #[arg(long)]
    causal: bool,
    /// With the log-sum-exp as a second output
    #[arg(long)]
    lse: bool,
    /// The architecture: sm_80, sm_86, sm_89, sm_90, sm_90a or sm_120
    #[arg(long, default_value_t = Arch::Sm89)]
    arch: Arch,
    /// With the Rust source line of every instruction
    #[arg(long)]
    source_lines: bool,
}

impl Ptx {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let config = super::config(&self.kernel)?;
        let (dtype, head_dim) = (self.dtype, self.head_dim);
        if !Specialisation::DTYPES.contains(&dtype) {
            return Err(Failure::Usage(format!("kernels have no {dtype}; they have f16 and bf16")));
        }
        if !Specialisation::HEAD_DIMS.contains(&head_dim) {
            return Err(Failure::Usage(format!(
                "kernels have no head dim {head_dim}; they have 32, 64, 96, 128, 192 and 256"
            )));
        }
        let specialisation =
            Specialisation { right: self.causal, log_sum_exp: self.lse, ..Specialisation::new(dtype, head_dim) };
        let kernel = config
            .generate(specialisation)
            .verify(self.arch)
            .map_err(|errors| Failure::Usage(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
        let text = print_with(&kernel, PrintOptions { source_lines: self.source_lines });
        output.line(text.trim_end())?;
        Ok(Ending::Well)
    }
}
