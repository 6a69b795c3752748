//! The resource usage that the log of the driver's compiler gives.

use flashcore_ptx::log::figure;

/// Resource usage of a kernel as the compiler reports it. The driver's own account, [`Usage`](crate::Usage), has the
/// registers too; spills are reported here alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JitReport {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of the stack of a thread.
    pub stack_bytes: u32,
    /// Bytes written to local memory by spills, where the compiler reports them.
    pub spill_store_bytes: Option<u32>,
    /// Bytes read from local memory by spills, where the compiler reports them.
    pub spill_load_bytes: Option<u32>,
    /// Bytes of static shared memory of a CTA.
    pub static_shared_bytes: u32,
}

impl JitReport {
    /// Reads a verbose log; `None` if it does not name the registers.
    ///
    /// The log has a part by the compiler (`ptxas info : Used 28 registers, …`) and one by the linker
    /// (`info : used 28 registers, 0 stack, …`). Which of them a driver writes has changed over the years, so either
    /// is enough.
    pub fn parse(log: &str) -> Option<Self> {
        Some(Self {
            registers: figure(log, "registers")?,
            stack_bytes: figure(log, "bytes stack frame").or_else(|| figure(log, "stack")).unwrap_or(0),
            spill_store_bytes: figure(log, "bytes spill stores"),
            spill_load_bytes: figure(log, "bytes spill loads"),
            static_shared_bytes: figure(log, "bytes smem").unwrap_or(0),
        })
    }

    /// True if registers were spilled to memory, as far as the compiler reports it.
    pub fn spills(&self) -> bool {
        self.spill_store_bytes.unwrap_or(0) > 0 || self.spill_load_bytes.unwrap_or(0) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: JitReport = JitReport {
        registers: 0,
        stack_bytes: 0,
        spill_store_bytes: None,
        spill_load_bytes: None,
        static_shared_bytes: 0,
    };

    fn check(log: &str, expected: Option<JitReport>) {
        assert_eq!(JitReport::parse(log), expected, "{log}");
    }

    #[test]
    fn a_log_of_compiler_and_linker() {
        // In the form in which a driver answered on a Titan V.
        check(
            "ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'insert' for 'sm_70'\n\
             ptxas info    : Function properties for insert\n\
             ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used 28 registers, 412 bytes cmem[0]\n\
             info    : 0 bytes gmem\n\
             info    : Function properties for 'insert':\n\
             info    : used 28 registers, 0 stack, 0 bytes smem, 412 bytes cmem[0], 0 bytes lmem\n",
            Some(JitReport { registers: 28, spill_store_bytes: Some(0), spill_load_bytes: Some(0), ..NOTHING }),
        );
    }

    #[test]
    fn a_log_of_the_linker_alone() {
        check(
            "info    : 0 bytes gmem\n\
             info    : Function properties for 'k':\n\
             info    : used 19 registers, 8 stack, 512 bytes smem, 336 bytes cmem[0], 0 bytes lmem",
            Some(JitReport { registers: 19, stack_bytes: 8, static_shared_bytes: 512, ..NOTHING }),
        );
    }

    #[test]
    fn a_kernel_that_spills() {
        let log = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n    \
                   512 bytes stack frame, 536 bytes spill stores, 688 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 512 bytes cumulative stack size, 1024 bytes smem\n";
        check(
            log,
            Some(JitReport {
                registers: 32,
                stack_bytes: 512,
                spill_store_bytes: Some(536),
                spill_load_bytes: Some(688),
                static_shared_bytes: 1024,
            }),
        );
        assert!(JitReport::parse(log).unwrap().spills());
    }

    #[test]
    fn logs_without_figures() {
        check("", None);
        check("info    : 0 bytes gmem\n", None);
    }
}
