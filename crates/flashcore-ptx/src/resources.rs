//! Resource usage of a compiled kernel as ptxas reports it: registers, spills, shared memory, barriers.
//!
//! [`assemble`] compiles a module without a GPU. The driver of a GPU contains the same compiler, possibly of another
//! version, so the figures here are close to what will run there, not equal to it.

use serde::Serialize;

use flashcore_ir::Arch;

use crate::log::figure;
use crate::ptxas::{self, PtxasError};

/// Resource usage of a module's entry point, per thread unless a field says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Resources {
    /// The architecture it was compiled for, as compilers spell it.
    pub arch: String,
    /// Registers.
    pub registers: u32,
    /// Bytes of static shared memory of a CTA; dynamic shared memory of a launch is not in it.
    pub static_shared_bytes: u32,
    /// Bytes of local memory: spilled registers and arrays.
    pub stack_frame_bytes: u32,
    /// Bytes written to local memory by spills.
    pub spill_store_bytes: u32,
    /// Bytes read from local memory by spills.
    pub spill_load_bytes: u32,
    /// Named barriers of a CTA.
    pub barriers: u32,
    /// Milliseconds the compilation took.
    pub compile_milliseconds: f64,
    /// Other output: warnings, lost performance.
    pub remarks: Vec<String>,
}

/// Compiles a module with one entry point for an architecture with the ptxas of [`ptxas::find`].
pub fn assemble(ptx: &str, arch: Arch) -> Result<Resources, PtxasError> {
    let report = ptxas::run(&ptxas::find()?, ptx, arch)?;
    parse(&report, arch).ok_or(PtxasError::Unreadable { report })
}

/// Parses the report of `ptxas -v`.
fn parse(report: &str, arch: Arch) -> Option<Resources> {
    Some(Resources {
        arch: arch.name().to_owned(),
        registers: figure(report, "registers")?,
        // Left out of the report when there are none.
        static_shared_bytes: figure(report, "bytes smem").unwrap_or(0),
        stack_frame_bytes: figure(report, "bytes stack frame")?,
        spill_store_bytes: figure(report, "bytes spill stores")?,
        spill_load_bytes: figure(report, "bytes spill loads")?,
        barriers: figure(report, "barriers").unwrap_or(0),
        compile_milliseconds: report
            .lines()
            .find_map(|line| line.split_once("Compile time = ")?.1.trim().strip_suffix("ms")?.trim().parse().ok())?,
        remarks: report.lines().filter(|line| is_remark(line)).map(|line| line.trim().to_owned()).collect(),
    })
}

fn is_remark(line: &str) -> bool {
    const FIGURES: [&str; 6] = [
        "bytes gmem",
        "Compiling entry function",
        "Function properties for",
        "bytes stack frame",
        "registers, used",
        "Compile time",
    ];
    !line.trim().is_empty() && !FIGURES.iter().any(|words| line.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(report: &str, expected: Option<&Resources>) {
        assert_eq!(parse(report, Arch::Sm80).as_ref(), expected);
    }

    fn nothing() -> Resources {
        Resources {
            arch: "sm_80".to_owned(),
            registers: 0,
            static_shared_bytes: 0,
            stack_frame_bytes: 0,
            spill_store_bytes: 0,
            spill_load_bytes: 0,
            barriers: 0,
            compile_milliseconds: 0.0,
            remarks: Vec::new(),
        }
    }

    #[test]
    fn plain_kernel() {
        check(
            "ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
             ptxas info    : Function properties for k\n    \
             0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used 8 registers, used 0 barriers, 364 bytes cmem[0]\n\
             ptxas info    : Compile time = 10.437 ms\n",
            Some(&Resources { registers: 8, compile_milliseconds: 10.437, ..nothing() }),
        );
    }

    #[test]
    fn spilling_kernel() {
        check(
            "ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'spilling' for 'sm_80'\n\
             ptxas info    : Function properties for spilling\n    \
             512 bytes stack frame, 536 bytes spill stores, 688 bytes spill loads\n\
             ptxas info    : Used 32 registers, used 0 barriers, 512 bytes cumulative stack size, 360 bytes cmem[0]\n\
             ptxas info    : Compile time = 12.725 ms\n",
            Some(&Resources {
                registers: 32,
                stack_frame_bytes: 512,
                spill_store_bytes: 536,
                spill_load_bytes: 688,
                compile_milliseconds: 12.725,
                ..nothing()
            }),
        );
    }

    #[test]
    fn kernel_with_shared_memory_barriers_and_a_warning() {
        let warning = "ptxas warning : For entry k adjusting per thread register count of 8 to lower bound of 24";
        check(
            &format!(
                "{warning}\n\
                 ptxas info    : 0 bytes gmem\n\
                 ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
                 ptxas info    : Function properties for k\n    \
                 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                 ptxas info    : Used 8 registers, used 4 barriers, 1024 bytes smem, 360 bytes cmem[0]\n\
                 ptxas info    : Compile time = 4.637 ms\n"
            ),
            Some(&Resources {
                registers: 8,
                barriers: 4,
                static_shared_bytes: 1024,
                compile_milliseconds: 4.637,
                remarks: vec![warning.to_owned()],
                ..nothing()
            }),
        );
    }

    #[test]
    fn report_of_something_else() {
        check("ptxas info    : 0 bytes gmem\n", None);
    }
}
