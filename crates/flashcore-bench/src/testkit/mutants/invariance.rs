//! Bugs of the order in which chunks are merged, and their trial: one sequence twice in a batch, which must give the same
//! bits twice (batch invariance).
//!
//! Another order changes rounding only, which no error bound finds. So the sums of the first two chunks are large and
//! cancel: merged one after the other they are exactly zero, and merged in another order they take bits from the rest.

use flashcore_ir::{Arch, Instruction, Kernel, Op, Operand, SpecialRegister, Type, VerifiedKernel};
use flashcore_kernels::{Config, KernelLaunch, LaunchPlan, Stage, Target};
use flashcore_problem::{DType, Inputs, Problem, Tensor};

use super::catalogue::{Mutation, mutations};
use super::edit::{Find, rewrite};
use super::{Group, Kill, Killer, MutantsError, OtherTrial};
use crate::testkit::shape_text;
use crate::testkit::simulate::simulate;
use crate::testkit::verify::SIMULATED_CTAS;

const ARCH: Arch = Arch::Sm80;
/// Keys of a chunk.
const CHUNK: usize = 64;
const CONFIG: &str = "ampere-32x32-2stage-swizzled-packgqa-3persistent-64chunk";

/// Orders of merging that depend on more than the row and its keys.
pub const INVARIANCE: &[Mutation] = mutations! { Group::Invariance;
    "combine": "chunk-order-by-batch", "sequences with odd numbers merge chunks in another order" =>
        |kernel| rewrite(kernel, Find::every(&["splits"], is_chunk_number), |kernel, instruction| {
            in_another_order(kernel, instruction, SpecialRegister::CtaZ)
        });
};

/// The number of a chunk: the first of those in flight and a constant.
fn is_chunk_number(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::U32, d, a: Operand::Register(a), b: Operand::Constant(_) } if a != d)
}

/// Exchanges chunks 0 and 1 of four with 2 and 3 where a special register is odd.
fn in_another_order(kernel: &mut Kernel, instruction: Instruction, register: SpecialRegister) -> Vec<Instruction> {
    let Op::Add { d, .. } = instruction.op else { return vec![instruction] };
    let [number, bit, distance] = [(); 3].map(|()| kernel.add_register(Type::U32, instruction.origin.section));
    let (ty, one) = (Type::U32, Operand::Constant(1));
    let ops = [
        Op::Special { register, d: number },
        Op::And { ty, d: bit, a: Operand::Register(number), b: one },
        Op::Shl { ty, d: distance, a: Operand::Register(bit), b: one },
        Op::Xor { ty, d, a: Operand::Register(d), b: Operand::Register(distance) },
    ];
    let more: Vec<_> = ops.into_iter().map(|op| Instruction { op, ..instruction.clone() }).collect();
    [vec![instruction], more].concat()
}

/// A batch of one sequence twice.
#[derive(Debug)]
pub(super) struct InvarianceTrial {
    problem: Problem,
    plan: LaunchPlan,
    inputs: Inputs,
}

impl InvarianceTrial {
    pub(super) fn new() -> Result<Self, MutantsError> {
        let mut problem = Problem::new(2, 4, 3, 32, DType::F16).with_lse(true);
        (problem.key_heads, problem.key_length) = (1, 4 * CHUNK + 44);
        let config: Config = CONFIG.parse().unwrap_or_else(|_| Config::ampere());
        let target = Target::new(ARCH, SIMULATED_CTAS);
        let plan = LaunchPlan::new(&problem, config, target).map_err(MutantsError::Refused)?;
        let mut inputs = Inputs::random(&problem, 0);
        // All keys have the same weight, and the values of the second chunk are those of the first with the other sign.
        inputs.query = Tensor::zeros(problem.dtype, inputs.query.len());
        let columns = problem.value_dim;
        for index in 0..CHUNK * columns {
            let value = 512.0 * inputs.value.get(index);
            inputs.value.set(index, value);
            inputs.value.set(CHUNK * columns + index, -value);
        }
        for tensor in [&mut inputs.query, &mut inputs.key, &mut inputs.value] {
            let half = tensor.data.len() / 2;
            let (first, second) = tensor.data.split_at_mut(half);
            second.copy_from_slice(first);
        }
        Ok(Self { problem, plan, inputs })
    }

    /// The check that a plan does not pass, and its complaint.
    fn killer(&self, plan: &LaunchPlan) -> Option<(Killer, String)> {
        let outputs = match simulate(plan, &self.problem, &self.inputs, 0) {
            Ok(simulation) => simulation.outputs,
            Err(error) => return Some((Killer::Fault, error.to_string())),
        };
        let values: Vec<f64> = (0..outputs.output.len()).map(|index| outputs.output.get(index)).collect();
        let (first, second) = values.split_at(values.len() / 2);
        let differ = first.iter().zip(second).filter(|(one, other)| one.to_bits() != other.to_bits()).count();
        (differ > 0).then(|| {
            let all = first.len();
            (Killer::Gate, format!("{differ} of {all} output elements differ between two copies of a sequence"))
        })
    }

    fn launch(&self) -> Option<&KernelLaunch> {
        self.plan.launch(Stage::Combine)
    }

    fn baseline(&self, complaint: String) -> MutantsError {
        MutantsError::Baseline { kernel: CONFIG.to_owned(), problem: self.name(), complaint }
    }
}

impl OtherTrial for InvarianceTrial {
    fn group(&self) -> Group {
        Group::Invariance
    }

    fn name(&self) -> String {
        format!("{} twice the same", shape_text(&self.problem))
    }

    fn kernel(&self) -> Result<VerifiedKernel, MutantsError> {
        let launch = self.launch().ok_or_else(|| self.baseline("it has no combine kernel".to_owned()))?;
        Ok(VerifiedKernel::clone(&launch.kernel()))
    }

    fn pass(&self) -> Result<(), MutantsError> {
        self.killer(&self.plan).map_or(Ok(()), |(_, complaint)| Err(self.baseline(complaint)))
    }

    fn try_to_kill(&self, kernel: Kernel) -> Option<Kill> {
        let (by, report) = match kernel.verify(ARCH) {
            Err(errors) => (Killer::Verifier, errors[0].to_string()),
            Ok(kernel) => self.killer(&self.plan.with_kernel(Stage::Combine, kernel))?,
        };
        Some(Kill { by, report: super::one_line(&report), problem: self.name() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels as they are give the same bits, and would not if they merged chunks in another order.
    #[test]
    fn the_order_of_chunks_shows_in_the_bits() {
        let trial = InvarianceTrial::new().expect("a trial");
        trial.pass().expect("the same bits");
        let mut kernel = trial.kernel().expect("a kernel").into_kernel();
        assert!((INVARIANCE[0].plant)(&mut kernel) > 0);
        let kill = trial.try_to_kill(kernel).expect("other bits");
        assert_eq!(kill.by, Killer::Gate, "{}", kill.report);
    }
}
