//! Reports of plans: the kernel, where it came from and how long it took.

use std::fmt;
#[cfg(feature = "cuda")]
use std::time::Duration;

#[cfg(feature = "cuda")]
use flashcore_cuda::cache::Source;
#[cfg(feature = "cuda")]
use flashcore_cuda::{Kernel, Timings, Usage};
#[cfg(feature = "cuda")]
use flashcore_kernels::{Accuracy, Config, KernelLaunch, LaunchPlan};

#[cfg(feature = "cuda")]
use crate::Reason;
use crate::{Device, Operation};

/// Report of a plan. `Display` writes it for people.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The operation.
    pub operation: String,
    /// The device.
    pub device: String,
    /// The GPU kernel: that of attention where the operation has attention. `None` on the CPU, and for a problem without
    /// a single output row.
    #[cfg(feature = "cuda")]
    pub kernel: Option<KernelReport>,
    /// True if an append is inside of the attention launch.
    #[cfg(feature = "cuda")]
    pub is_fused: bool,
    /// Every reason why an append is not inside of the attention launch; empty where it is, where that was not wanted, and
    /// on the CPU.
    #[cfg(feature = "cuda")]
    pub not_fused: Vec<Reason>,
}

impl Report {
    /// The report of a plan without a kernel.
    pub(crate) fn new(operation: &Operation, device: &Device) -> Self {
        Self {
            operation: operation.to_string(),
            device: device.to_string(),
            #[cfg(feature = "cuda")]
            kernel: None,
            #[cfg(feature = "cuda")]
            is_fused: false,
            #[cfg(feature = "cuda")]
            not_fused: Vec::new(),
        }
    }
}

/// A compiled kernel, and how the plan got it.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KernelReport {
    /// The name of the entry point.
    pub name: String,
    /// The config it was generated from, of a kernel of attention.
    pub config: Option<Config>,
    /// The architecture it was generated for.
    pub arch: String,
    /// CTAs by query tile, query head and batch.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of shared memory of a CTA.
    pub shared_bytes: u32,
    /// Bytes of workspace that the kernels of a launch hand to each other, for split-KV partial results and block
    /// masks; 0 for a kernel that needs none. A stream has one for all plans, and a captured launch brings its own.
    pub workspace_bytes: u64,
    /// Registers and memory it uses, in the driver's own account.
    pub usage: Usage,
    /// Origin of the compiled kernel.
    pub source: Source,
    /// Times when this process first had it: printing, cache or compiler, loading.
    pub timings: Timings,
    /// Time that it took now, from the problem to a kernel that can be launched, the self-check included.
    pub plan_time: Duration,
    /// Reason to trust it on this driver.
    pub self_check: SelfCheckReport,
    /// Log of the driver's compiler, registers and spills included.
    pub log: String,
}

#[cfg(feature = "cuda")]
impl KernelReport {
    pub(crate) fn new(
        kernel: &Kernel,
        plan: &LaunchPlan,
        launch: &KernelLaunch,
        source: Source,
        self_check: SelfCheckReport,
        plan_time: Duration,
    ) -> Self {
        Self {
            name: kernel.name().to_owned(),
            config: plan.config,
            arch: kernel.arch().to_string(),
            grid: launch.grid,
            threads: kernel.threads(),
            shared_bytes: kernel.shared_bytes(),
            workspace_bytes: plan.workspace_bytes,
            usage: kernel.usage(),
            source,
            timings: kernel.timings(),
            plan_time,
            self_check,
            log: kernel.log().to_owned(),
        }
    }
}

/// The reason to trust a kernel.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelfCheckReport {
    /// It was run now, for the first time on this driver, and was right.
    PassedNow,
    /// It was run before on this driver and was right; the verdict was in the cache.
    PassedBefore,
    /// Nothing: the self-check is turned off.
    Off,
}

#[cfg(feature = "cuda")]
impl fmt::Display for SelfCheckReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::PassedNow => "passed now",
            Self::PassedBefore => "passed before",
            Self::Off => "turned off",
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} on {}", self.operation, self.device)?;
        #[cfg(feature = "cuda")]
        self.kernel.as_ref().map_or(Ok(()), |kernel| write!(formatter, "\n{kernel}"))?;
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl fmt::Display for KernelReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, arch, grid: [x, y, z], threads, shared_bytes, usage, .. } = self;
        let Usage { registers, local_bytes, .. } = usage;
        write!(
            formatter,
            "kernel {name} for {arch}, grid {x}x{y}x{z}, {threads} threads, {shared_bytes} bytes shared, \
             {registers} registers, {local_bytes} bytes local"
        )?;
        match self.workspace_bytes {
            0 => {}
            bytes => write!(formatter, "\nworkspace of {bytes} bytes for each stream, shared with other plans")?,
        }
        match self.config.map(Config::accuracy) {
            None | Some(Accuracy::Exact) => {}
            Some(accuracy @ (Accuracy::NearF32 | Accuracy::Tf32)) => write!(formatter, "\n{accuracy}")?,
        }
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let compile = milliseconds(self.timings.compile);
        match self.source {
            Source::Compiled => write!(formatter, "\ncompiled by the driver in {compile:.1} ms")?,
            Source::Disk => write!(formatter, "\nfrom the cache on disk in {compile:.1} ms")?,
            Source::Memory => write!(formatter, "\nalready loaded")?,
        }
        let (plan, check) = (milliseconds(self.plan_time), self.self_check);
        write!(formatter, ", planned in {plan:.1} ms, self-check {check}")
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_well() {
        let mut report = Report {
            operation: "a problem".to_owned(),
            device: "a GPU".to_owned(),
            kernel: None,
            is_fused: false,
            not_fused: Vec::new(),
        };
        assert_eq!(report.to_string(), "a problem on a GPU");
        report.kernel = Some(KernelReport {
            name: "flashcore_scalar".to_owned(),
            config: Some(Config::scalar()),
            arch: "sm_90".to_owned(),
            grid: [8, 4, 1],
            threads: 64,
            shared_bytes: 1024,
            workspace_bytes: 273_000_000,
            usage: Usage {
                registers: 168,
                local_bytes: 0,
                static_shared_bytes: 0,
                most_threads: 384,
                binary_version: 90,
            },
            source: Source::Disk,
            timings: Timings { compile: Duration::from_micros(3_140), ..Timings::default() },
            plan_time: Duration::from_micros(8_400),
            self_check: SelfCheckReport::PassedBefore,
            log: String::new(),
        });
        let expected = "a problem on a GPU\n\
                        kernel flashcore_scalar for sm_90, grid 8x4x1, 64 threads, 1024 bytes shared, 168 registers, \
                        0 bytes local\n\
                        workspace of 273000000 bytes for each stream, shared with other plans\n\
                        from the cache on disk in 3.1 ms, planned in 8.4 ms, self-check passed before";
        assert_eq!(report.to_string(), expected);
    }
}
