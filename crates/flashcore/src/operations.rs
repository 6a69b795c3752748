//! Plans of operations beside attention: append to a KV cache, merge of partial results.

use std::fmt;

use flashcore_problem::{AppendProblem, InputViews, MergeProblem, OutputViews};

use crate::device::{Device, Kind};
#[cfg(feature = "cuda")]
use crate::gpu::{GpuAppend, GpuMerge, check_lengths::check_slots};
#[cfg(feature = "cuda")]
use crate::process::CUDA;
#[cfg(feature = "cuda")]
use crate::{AppendTensors, MergeTensors, StreamRef};
use crate::{Error, Reason, Unsupported};

/// Declares the plan of an operation that is one kernel on a GPU.
macro_rules! operation_plan {
    (
        $(#[$doc:meta])* $Plan:ident: $Problem:ident, $Inputs:ident, $Outputs:ident,
        $cpu:ident, $Gpu:ident, $prepare:ident, $Tensors:ident,
        $(#[$run_doc:meta])* run, $(#[$launch_doc:meta])* launch
    ) => {
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $Plan {
            problem: $Problem,
            device: Device,
            #[cfg(feature = "cuda")]
            gpu: Option<$Gpu>,
        }

        impl $Plan {
            /// A plan for `problem` on `device`, or every reason against it. On a GPU this compiles the kernel, if neither
            /// this process nor the cache on disk has it.
            pub fn new(problem: &$Problem, device: &Device) -> Result<Self, Unsupported> {
                let errors: Vec<_> = problem.errors().into_iter().map(Reason::Problem).collect();
                if !errors.is_empty() {
                    return Err(Unsupported::new(errors));
                }
                match &device.0 {
                    #[cfg(feature = "cpu")]
                    Kind::Cpu => Ok(Self {
                        problem: *problem,
                        device: device.clone(),
                        #[cfg(feature = "cuda")]
                        gpu: None,
                    }),
                    #[cfg(not(feature = "cpu"))]
                    Kind::Cpu => Err(Unsupported::new(vec![Reason::NotBuilt { backend: "cpu" }])),
                    #[cfg(feature = "cuda")]
                    Kind::Cuda(gpu) => {
                        CUDA.check().map_err(|forked| Unsupported::new(vec![Reason::Forked(forked)]))?;
                        let prepared = gpu.$prepare(problem).map_err(Unsupported::new)?;
                        Ok(Self { problem: *problem, device: device.clone(), gpu: Some(prepared) })
                    }
                }
            }

            /// The problem.
            pub const fn problem(&self) -> &$Problem {
                &self.problem
            }

            /// The device.
            pub const fn device(&self) -> &Device {
                &self.device
            }

            $(#[$run_doc])*
            pub fn run(&self, inputs: &$Inputs<'_>, outputs: $Outputs<'_>) -> Result<(), Error> {
                self.problem.validate_views(inputs, &outputs)?;
                #[cfg(feature = "cuda")]
                if let Some(gpu) = &self.gpu {
                    CUDA.check()?;
                    return gpu.run(&self.problem, inputs, outputs);
                }
                #[cfg(feature = "cpu")]
                return Ok(flashcore_cpu::$cpu(&self.problem, inputs, outputs)?);
                #[cfg(not(feature = "cpu"))]
                Err(Error::NotBuilt { backend: "cpu" })
            }

            $(#[$launch_doc])*
            #[cfg(feature = "cuda")]
            pub unsafe fn launch<'a>(
                &self,
                stream: impl Into<StreamRef<'a>>,
                tensors: $Tensors,
            ) -> Result<(), Error> {
                let (Some(gpu), Kind::Cuda(device)) = (&self.gpu, &self.device.0) else {
                    return Err(Error::NotOnCuda { call: "launch", device: self.device.to_string() });
                };
                CUDA.check()?;
                // SAFETY: the caller promises what the kernel needs of addresses and stream.
                unsafe { stream.into().with(device.context(), |stream| gpu.launch(&self.problem, stream, &tensors)) }
            }
        }

        impl fmt::Debug for $Plan {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter
                    .debug_struct(stringify!($Plan))
                    .field("problem", &self.problem)
                    .field("device", &self.device)
                    .finish_non_exhaustive()
            }
        }
    };
}

operation_plan! {
    /// An append to a KV cache on a device, ready to be run any number of times, from any thread: new keys and values go
    /// to the slots of a paged cache, with optional QK-norm and rotary embedding of keys and query. See
    /// [`AppendProblem`].
    ///
    /// ```
    /// use flashcore::{AppendPlan, AppendProblem, DType, Device, InputViews, OutputViews};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Three tokens with one head of two columns, into two pages of two rows; the second is skipped.
    /// let plan = AppendPlan::new(&AppendProblem::new(3, 1, 2, DType::F32, 2, 2), &Device::cpu())?;
    /// let (key, value) = (vec![1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], vec![0.5_f32; 6]);
    /// let (mut keys, mut values) = (vec![0.0_f32; 8], vec![0.0_f32; 8]);
    /// let inputs = InputViews::default().with_new_key(&key).with_new_value(&value).with_slot_mapping(&[3, -1, 0]);
    /// plan.run(&inputs, OutputViews::default().with_key_cache(&mut keys).with_value_cache(&mut values))?;
    /// assert_eq!(keys, [5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    AppendPlan: AppendProblem, InputViews, OutputViews, append, GpuAppend, append, AppendTensors,
    /// Appends tensors in the host's memory, and returns when the caches are written. Everything is checked first; on such
    /// an error nothing is written. On a GPU this copies everything there and back: convenient, not fast.
    run,
    /// Puts the kernel on the caller's stream, on tensors that lie on the GPU, and returns before it has finished. Nothing
    /// is allocated and nothing is waited for; a launch can be captured into a CUDA graph. Slots and positions are read
    /// when the kernel runs: slots out of range are skipped, positions clamped into the table.
    ///
    /// # Safety
    ///
    /// From the launch until it has finished on the stream (and for a captured launch, whenever the graph is executed):
    ///
    /// * each address is that of device memory of this plan's device that holds the whole tensor, as far as the
    ///   problem's strides reach for the tokens of the launch;
    /// * nobody writes what is read, and nobody uses the query output or the rows of the caches that are written;
    /// * no element that is written lies where another tensor has one, but for a query output that is the query;
    /// * a raw stream is a stream of the primary context of this plan's device, or null for the default stream.
    launch
}

operation_plan! {
    /// A merge of partial results of attention on a device, ready to be run any number of times, from any thread. See
    /// [`MergeProblem`].
    ///
    /// ```
    /// use flashcore::{DType, Device, InputViews, MergePlan, MergeProblem, OutputViews};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // One token with one head of two columns; both parts have the same LSE.
    /// let plan = MergePlan::new(&MergeProblem::new(2, 1, 1, 2, DType::F32), &Device::cpu())?;
    /// let (first, second) = ([1.0_f32, 2.0], [3.0_f32, 6.0]);
    /// let (parts, lses) = ([(&first).into(), (&second).into()], [(&[0.0_f32]).into(); 2]);
    /// let inputs = InputViews::default().with_part_outputs(&parts).with_part_lses(&lses);
    /// let (mut output, mut lse) = ([0.0_f32; 2], [0.0_f32]);
    /// plan.run(&inputs, OutputViews::new(&mut output).with_lse(&mut lse))?;
    /// assert_eq!((output, lse), ([2.0, 4.0], [std::f32::consts::LN_2]));
    /// # Ok(())
    /// # }
    /// ```
    MergePlan: MergeProblem, InputViews, OutputViews, merge, GpuMerge, merge, MergeTensors,
    /// Merges tensors in the host's memory, and returns when the outputs are there. Everything is checked first; on such
    /// an error nothing is written. On a GPU this copies everything there and back: convenient, not fast.
    run,
    /// Puts the kernel on the caller's stream, on tensors that lie on the GPU, and returns before it has finished. Nothing
    /// is allocated and nothing is waited for; a launch can be captured into a CUDA graph.
    ///
    /// # Safety
    ///
    /// From the launch until it has finished on the stream (and for a captured launch, whenever the graph is executed):
    ///
    /// * each address is that of device memory of this plan's device that holds the whole tensor, as far as the
    ///   problem's strides reach for the tokens of the launch;
    /// * nobody writes the parts, and nobody uses output or log-sum-exp;
    /// * no element of output or log-sum-exp lies where another tensor has one;
    /// * a raw stream is a stream of the primary context of this plan's device, or null for the default stream.
    launch
}

#[cfg(feature = "cuda")]
impl AppendPlan {
    /// Reads slots and positions of a launch back from the GPU and checks them, to explain wrong results: a slot that the
    /// cache does not have, unless it is -1, a slot of two tokens, and a position that the rotary tables have no row for are
    /// errors. A launch skips the first and clamps the last.
    ///
    /// They are read in stream order, and this waits for them: a debug aid. It is refused while the stream captures a
    /// graph. With `FLASHCORE_CHECK_LENGTHS=1` in the environment every launch does it first.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch), of which nothing but slots and positions is read.
    pub unsafe fn check_slots<'a>(
        &self,
        stream: impl Into<StreamRef<'a>>,
        tensors: AppendTensors,
    ) -> Result<(), Error> {
        let (Some(_), Kind::Cuda(device)) = (&self.gpu, &self.device.0) else {
            return Err(Error::NotOnCuda { call: "check_slots", device: self.device.to_string() });
        };
        CUDA.check()?;
        // SAFETY: the caller promises what a launch needs of addresses and stream.
        unsafe { stream.into().with(device.context(), |stream| check_slots(&self.problem, stream, &tensors)) }
    }
}
