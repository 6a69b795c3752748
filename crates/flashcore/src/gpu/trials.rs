//! Self-checks: small operations on kernels that are new to a driver, judged by oracles.

mod small;

use std::sync::Arc;

use flashcore_cuda::{CudaError, DeviceBuffer, Kernel, Stream};
use flashcore_kernels::merge::UNWRITTEN;
use flashcore_kernels::{Between, Config, LaunchPlan, LaunchValues, Stage, Target};
use flashcore_problem::{
    AppendProblem, KvCacheData, KvCacheOutputs, KvCacheProblem, MergeProblem, Operand, Outputs, Problem, Scale,
    SequenceLengths, Tensor, append_oracle_with, kv_cache_oracle_with, merge_oracle,
};
use zerocopy::IntoBytes;

use super::self_check::{AttentionTrial, SEED};
use super::{Executor, Gpu};
use crate::{AppendPolicy, Error, Operation, PlanOptions, Reason, Unsupported};

/// Persistent CTAs of a trial: fewer than there are tiles.
const TRIAL_CTAS: u32 = 2;

/// The kernels of a plan that are tried together, by what they compute.
#[derive(Clone, Debug)]
pub(super) enum Trial {
    /// Attention of a config, with a kernel that combines chunks or without.
    Attention(Box<Problem>, Config, bool),
    /// Attention that appends.
    Fused(Box<KvCacheProblem>, Config),
    Append(AppendProblem),
    /// The append by sequence.
    Sequences(Box<KvCacheProblem>),
    Merge(MergeProblem),
    /// The merge into the first of two parts.
    InPlace(MergeProblem),
}

impl Trial {
    /// The trial of a plan of attention.
    pub(super) fn attention(problem: &Problem, plan: &LaunchPlan) -> Self {
        let is_combined = plan.launch(Stage::Combine).is_some();
        Self::Attention(Box::new(problem.clone()), plan.config.unwrap_or_else(Config::scalar), is_combined)
    }

    /// Runs the kernels on a small problem. Gives what is wrong with the result, if anything is.
    pub(super) fn complaint(&self, gpu: &Gpu, kernels: &[Arc<Kernel>]) -> Result<Option<String>, Vec<Reason>> {
        let run = Run { gpu, kernels };
        let found = match self {
            Self::Attention(problem, config, is_combined) => run.attention(problem, *config, *is_combined),
            Self::Fused(problem, config) => run.fused(problem, *config),
            Self::Append(problem) => run.append(problem),
            Self::Sequences(problem) => run.sequences(problem),
            Self::Merge(problem) => run.merge(problem),
            Self::InPlace(problem) => run.in_place(problem),
        };
        match found {
            Ok(()) => Ok(None),
            Err(Failed::Wrong(complaint)) => Ok(Some(complaint)),
            // The kernel did something that ends all work here. The next process shall not try again.
            Err(Failed::Error(Error::Cuda(CudaError::Call(failure)))) if failure.is_sticky() => {
                Ok(Some(failure.to_string()))
            }
            Err(Failed::Error(Error::Cuda(error))) => Err(vec![Reason::Cuda(error)]),
            Err(Failed::Error(Error::Unsupported(unsupported))) => Err(unsupported.to_vec()),
            Err(Failed::Error(error)) => Ok(Some(error.to_string())),
        }
    }
}

/// The end of a trial that does not pass.
enum Failed {
    /// The result is wrong.
    Wrong(String),
    /// There is no result.
    Error(Error),
}

impl<E: Into<Error>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

type Verdict = Result<(), Failed>;

fn judged(verdict: Result<(), String>) -> Verdict {
    verdict.map_err(Failed::Wrong)
}

/// The config of a trial: with several chunks of keys where a kernel combines those, else one.
fn trial_config(config: Config, is_combined: bool, trial: &Problem) -> Config {
    config.with_chunk_keys(if is_combined { 1 } else { trial.key_length as u32 })
}

/// Kernels on a GPU that are tried.
struct Run<'a> {
    gpu: &'a Gpu,
    kernels: &'a [Arc<Kernel>],
}

impl Run<'_> {
    /// The kernels as those of the plan of a small problem.
    fn executor(&self, plan: Result<LaunchPlan, Vec<flashcore_kernels::Reason>>) -> Result<Executor, Failed> {
        let plan = plan.map_err(|reasons| Unsupported::new(reasons.into_iter().map(Reason::from).collect()))?;
        Ok(Executor::new(&plan, self.kernels.to_vec(), self.gpu)?)
    }

    fn attention(&self, problem: &Problem, config: Config, is_combined: bool) -> Verdict {
        let trial = AttentionTrial::new(problem, config)?;
        let target = Target { num_sms: TRIAL_CTAS, ..self.gpu.target };
        let config = trial_config(config, is_combined, &trial.problem);
        let executor = self.executor(LaunchPlan::new(&trial.problem, config, target))?;
        let mut outputs = Outputs::poisoned(&trial.problem);
        executor.run(&(&trial.problem).into(), &trial.inputs.views(), &mut outputs.views_mut())?;
        judged(trial.complaint(&outputs).map_or(Ok(()), Err))
    }

    /// One launch must give the bits of two, which are trusted after trials of their own.
    fn fused(&self, problem: &KvCacheProblem, config: Config) -> Verdict {
        let small = small::fused(problem);
        let target = Target { num_sms: TRIAL_CTAS, ..self.gpu.target };
        let config = trial_config(config, self.kernels.len() > 1, &small.attention);
        let fused = self.executor(LaunchPlan::with_append(&small, config, target))?;
        let operation = Operation::from(&small);
        let options = PlanOptions::default().with_config(config).with_append(AppendPolicy::Separate);
        let separate = self.gpu.prepare(&operation, options).map_err(Unsupported::new)?.executor;
        let data = KvCacheData::random(&small, SequenceLengths::Ragged, SEED);
        let run = |executor: &Executor| -> Result<[Vec<u8>; 4], Failed> {
            let (mut key, mut value) = (data.key_cache.clone(), data.value_cache.clone());
            let mut outputs = Outputs::poisoned(&small.attention);
            let views = KvCacheOutputs::new(&mut key, &mut value, outputs.views_mut());
            executor.run(&operation, &(&data.inputs()).into(), &mut views.into())?;
            let lse = outputs.lse.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
            Ok([key.data, value.data, outputs.output.data, lse])
        };
        let (expected, found) = (run(&separate)?, run(&fused)?);
        let names = ["key cache", "value cache", "output", "LSE"].into_iter().zip(expected.iter().zip(&found));
        let different: Vec<_> =
            names.filter(|(_, (expected, found))| expected != found).map(|(name, _)| name).collect();
        if different.is_empty() {
            return Ok(());
        }
        judged(Err(format!("{} of one launch and of two differ", different.join(", "))))
    }

    fn append(&self, problem: &AppendProblem) -> Verdict {
        let small = small::append(problem);
        let executor = self.executor(LaunchPlan::append(&small, self.gpu.target))?;
        let data = small.random_with_strays(SEED);
        let before = small.poisoned();
        let mut after = before.clone();
        executor.run(&(&small).into(), &data.views(), &mut after.views_mut())?;
        let expected = append_oracle_with(&small, &data.views(), before.scale_strides(small.key_cache_shape()))?;
        judged(expected.check(&before, &after))
    }

    /// The append alone, with what it hands to attention in a workspace that is read back.
    fn sequences(&self, problem: &KvCacheProblem) -> Verdict {
        let small = small::sequences(problem);
        let plan = LaunchPlan::kv_cache(&small, None, self.gpu.target);
        let bytes = plan.as_ref().map_or(0, |plan| plan.workspace_bytes as usize);
        let between = plan.as_ref().ok().and_then(|plan| plan.between);
        let (executor, stream) = (self.executor(plan)?, &self.gpu.stream);
        let Between { lengths: lengths_at, query: query_at } = between.unwrap_or_default();
        let data = KvCacheData::random(&small, SequenceLengths::Ragged, SEED);
        let inputs = data.inputs();
        let expected = kv_cache_oracle_with(&small, &inputs, data.scale_strides(&small))?;
        let mut lengths = vec![0_u32; small.attention.batch];
        let query = if small.transforms() { expected.query.len() } else { 0 };
        let mut query = Tensor::poisoned(small.attention.dtype, query);
        let mut memory = vec![0; bytes];
        memory[query_at as usize..][..query.data.len()].copy_from_slice(&query.data);
        let workspace = DeviceBuffer::from_host(stream, &memory)?;
        let (mut key_cache, mut value_cache) = (data.key_cache.clone(), data.value_cache.clone());
        let (mut k_scale, mut v_scale) = (data.k_scale.clone(), data.v_scale.clone());
        let mut outputs = Outputs::poisoned(&small.attention);
        let mut views = KvCacheOutputs::new(&mut key_cache, &mut value_cache, outputs.views_mut());
        views.k_scale = k_scale.as_mut().map(Scale::view_mut);
        views.v_scale = v_scale.as_mut().map(Scale::view_mut);
        executor.run_in(workspace.address(), &(&small).into(), &(&inputs).into(), &mut views.into())?;
        workspace.copy_to_host(stream, lengths_at as usize, lengths.as_mut_bytes())?;
        workspace.copy_to_host(stream, query_at as usize, &mut query.data)?;
        let after = [&k_scale, &v_scale].map(|scale| scale.as_ref().map_or(&[][..], |scale| &scale.data));
        let append = expected.append.with_computed_scales(data.scales(), after).map_err(Failed::Wrong)?;
        judged(append.check_key_cache(&data.key_cache.data, &key_cache.data))?;
        judged(append.check_value_cache(&data.value_cache.data, &value_cache.data))?;
        if small.transforms() {
            judged(append.check_query_rows(&query.data))?;
        }
        if lengths == expected.lengths {
            return Ok(());
        }
        judged(Err(format!("lengths after the append are {lengths:?}; they must be {:?}", expected.lengths)))
    }

    fn merge(&self, problem: &MergeProblem) -> Verdict {
        let small = small::merge(problem);
        let executor = self.executor(LaunchPlan::merge(&small, self.gpu.target))?;
        let (inputs, mut outputs) = (small.random(SEED), small.poisoned());
        executor.run(&(&small).into(), &inputs.views(), &mut outputs.views_mut())?;
        judged(merge_oracle(&small, &inputs.views())?.check(&small, &outputs))
    }

    fn in_place(&self, problem: &MergeProblem) -> Verdict {
        let mut small = small::merge(problem);
        (small.strides.output, small.strides.lse) = (small.strides.part, small.strides.part_lse);
        let plan = LaunchPlan::merge_in_place(&small, self.gpu.target);
        // The groups of a plan have one kernel.
        let executor = Run { kernels: &self.kernels[..1], ..*self }.executor(plan)?;
        let mut data = small.random(SEED);
        // A row that was not written counts as an empty one.
        data.part_lses[1].set(1, f64::NEG_INFINITY);
        let [mut output, part] = [data.part_outputs[0].clone(), data.part_outputs[1].clone()];
        let [mut lse, mut part_lse] = [0, 1].map(|part| data.part_lses[part].to_elements::<f32>());
        part_lse[1] = f32::from_bits(UNWRITTEN);
        let stream: &Stream = &self.gpu.stream;
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(stream, bytes);
        let [given, part] = [upload(&output.data)?, upload(&part.data)?];
        let [given_lse, part_lse] = [upload(lse.as_bytes())?, upload(part_lse.as_bytes())?];
        let mut values = LaunchValues::NONE;
        values.set(Operand::Output, given.address());
        values.set(Operand::Lse, given_lse.address());
        values.set(Operand::PartOutputs, part.address());
        values.set(Operand::PartLses, part_lse.address());
        // SAFETY: the buffers hold the whole tensors, and nothing else uses them; freeing them waits for the kernel. The
        // stream was made in the context of the kernel.
        unsafe { executor.launch(stream, values) }?;
        given.copy_to_host(stream, 0, &mut output.data)?;
        given_lse.copy_to_host(stream, 0, lse.as_mut_bytes())?;
        let outputs = Outputs { output, lse: Some(lse), ..Outputs::default() };
        judged(merge_oracle(&small, &data.views())?.check(&small, &outputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_kernels::Specialization;
    use flashcore_problem::{Alignment, Mask, MaskMod, ScoreMod};

    /// The kernels that are tried must be the kernels that are used, whatever is compiled into them.
    #[test]
    fn the_trial_of_a_problem_has_its_kernels() {
        let features: [fn(&mut Problem); 9] = [
            |_| {},
            |problem| (problem.mask, problem.lse) = (Mask::Causal(Alignment::TopLeft), true),
            |problem| problem.mask = Mask::Window { left: Some(7), right: None, alignment: Alignment::BottomRight },
            |problem| (problem.softcap, problem.alibi) = (Some(50.0), true),
            |problem| (problem.bias, problem.sinks) = (true, true),
            |problem| (problem.seqused_k, problem.value_dim) = (true, 72),
            |problem| problem.scale = -0.5,
            |problem| {
                let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key + 100));
                let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
                (problem.score_mod, problem.mask_mod) = (Some(relative), Some(documents));
                (problem.aux_f32, problem.aux_i32) = (201, 1000);
            },
            |problem| {
                let mut strides = problem.strides();
                strides.key.row += 2;
                problem.layout = flashcore_problem::Layout::Strided(strides);
            },
        ];
        let one_chunk = |config: &Config| config.chunk_keys().map(|_| config.with_chunk_keys(4096));
        let configs = Config::all();
        for config in configs.iter().copied().chain(configs.iter().filter_map(one_chunk)) {
            for (number, change) in features.into_iter().enumerate() {
                let dtype = Specialization::DTYPES[number % 2];
                let mut problem = Problem::new(3, 4, 1000, [24, 64, 128][number % 3], dtype);
                change(&mut problem);
                let trial = AttentionTrial::problem(&problem);
                let specs = |plan: LaunchPlan| plan.launches.iter().map(|launch| launch.key).collect::<Vec<_>>();
                let plan = LaunchPlan::new(&problem, config, Arch::Sm90a);
                let of_trial = plan.as_ref().map_or(config, |plan| {
                    trial_config(plan.config.unwrap(), plan.launch(Stage::Combine).is_some(), &trial)
                });
                let of_trial = LaunchPlan::new(&trial, of_trial, Arch::Sm90a);
                assert_eq!(plan.map(specs), of_trial.map(specs), "{config} {problem}");
            }
        }
    }
}
