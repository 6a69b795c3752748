//! `--threads`: the number of CPU threads.

use clap::Args;

use crate::Failure;

/// The option of commands that compute on the CPU.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Threads {
    /// CPU threads to compute with [default: RAYON_NUM_THREADS, or all that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl Threads {
    /// Makes the pool of threads. To be called before anything is computed: there is one pool in a process.
    pub(crate) fn apply(self) -> Result<(), Failure> {
        let Some(threads) = self.threads else { return Ok(()) };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(usize::from(threads)).build_global();
        pool.map_err(|error| Failure::Environment(format!("--threads {threads}: {error}")))
    }

    /// Starts the threads that compute, unless `apply` has. Where the first use starts them, a system without threads to
    /// give is a panic.
    pub(crate) fn start(self) -> Result<(), Failure> {
        if self.threads.is_some() {
            return Ok(());
        }
        rayon::ThreadPoolBuilder::new().build_global().map_err(|error| {
            Failure::Environment(format!(
                "the threads that compute cannot be started: {error}; --threads 1 takes one, and `ulimit` shows limits"
            ))
        })
    }

    /// The number that was asked for.
    pub(crate) fn asked_for(self) -> Option<u16> {
        self.threads
    }
}
