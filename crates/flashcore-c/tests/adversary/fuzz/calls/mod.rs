//! Random calls of every operation, with arguments that are right, nearly right and absurd.
//!
//! Each call has a status and words that belong together, a refused one writes nothing, inputs lie in memory that cannot be
//! written and end at a page that cannot be touched. Attention that continues from nothing is that of a plan.

mod attention;
mod memory;
mod operations;

use std::ptr;

use crate::abi::header::{Header, Struct, Tensors};
use crate::abi::library::{Library, Plan};
use crate::abi::random::Random;
use memory::{MEMORY, Memory, Pattern};

/// An operation of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    Attention,
    Expressions,
    Continue,
    KvCache,
    Append,
    Merge,
}

impl Operation {
    pub(crate) const ALL: [Self; 6] =
        [Self::Attention, Self::Expressions, Self::Continue, Self::KvCache, Self::Append, Self::Merge];
}

/// Outcome of a call.
#[derive(Clone, Debug)]
pub(crate) struct Called {
    pub(crate) operation: Operation,
    pub(crate) is_computed: bool,
    pub(crate) complaint: Option<String>,
}

/// One call in the making.
struct Caller<'a> {
    library: &'a Library,
    random: Random,
    memory: &'a mut Memory,
    complaint: Option<String>,
}

/// Makes the call of a number.
pub(crate) fn call(library: &Library, memory: &mut Memory, seed: u64) -> Called {
    let mut random = Random::new(seed);
    let operation = random.pick(&Operation::ALL);
    let mut caller = Caller { library, random, memory, complaint: None };
    let is_computed = match operation {
        Operation::Attention => caller.attention(false),
        Operation::Expressions => caller.attention(true),
        Operation::Continue => caller.continuation(),
        Operation::KvCache => caller.kv_cache(),
        Operation::Append => caller.append(),
        Operation::Merge => caller.merge(),
    };
    if is_computed {
        caller.memory.poison();
    } else if !caller.memory.is_poison() {
        caller.complain("a call that was refused wrote something".to_owned());
        caller.memory.poison();
    }
    Called { operation, is_computed, complaint: caller.complaint }
}

fn constant(name: &str) -> i128 {
    Header::get().constant(name).into()
}

impl Caller<'_> {
    fn complain(&mut self, words: String) {
        self.complaint.get_or_insert(words);
    }

    /// Checks that status and words belong together; true if it went well.
    fn answered(&mut self, status: i32, call: &str) -> bool {
        let words = self.library.last_error();
        let internal = Header::get().constant("INTERNAL");
        if !(0..internal).contains(&status) || (status == 0) != words.is_empty() {
            self.complain(format!("{call} returned {status}: {words}"));
        }
        status == 0
    }

    fn size(&mut self) -> i128 {
        self.random.pick(&[1, 1, 2, 2, 3, 4, 8])
    }

    fn dtype(&mut self) -> i32 {
        let names = ["DTYPE_F16", "DTYPE_BF16", "DTYPE_F32", "DTYPE_F32", "DTYPE_F64"];
        Header::get().constant(self.random.pick(&names))
    }

    /// Sometimes changes a field of a problem, to something that may be wrong.
    fn disturb(&mut self, target: &mut Struct) {
        if !self.random.once_in(10) {
            return;
        }
        for _ in 0..self.random.within(1, 2) {
            let field = self.random.pick(&target.sizes());
            let value = self.absurd(target.get(field));
            target.set(field, value);
        }
    }

    /// Sometimes changes a tensor, to something that may be wrong. What is read never becomes what is written.
    fn disturb_tensors(&mut self, tensors: &mut Tensors) {
        if tensors.entries.is_empty() || !self.random.once_in(6) {
            return;
        }
        let index = self.random.below(tensors.entries.len());
        match self.random.below(6) {
            0 => {
                tensors.entries.remove(index);
            }
            1 => tensors.entries.push(tensors.entries[index].clone()),
            2 => {
                let number = self.random.pick(&[0, -1, -2, -3, 1000, i128::from(i32::MIN), i128::from(i32::MAX)]);
                tensors.entries[index].set("operand", number);
            }
            _ => {
                let field =
                    self.random.pick(&["dtype", "strides.0", "strides.1", "strides.2", "strides.3", "strides.4"]);
                let value = self.absurd(tensors.entries[index].get(field));
                tensors.entries[index].set(field, value);
            }
        }
    }

    fn absurd(&mut self, before: i128) -> i128 {
        let absurd = [
            0,
            1,
            2,
            3,
            5,
            7,
            -1,
            -2,
            before + 1,
            before - 1,
            before * 2,
            1 << 20,
            1 << 31,
            1 << 32,
            1 << 48,
            i128::from(i32::MAX),
            i128::from(i64::MAX),
            i128::from(u64::MAX),
        ];
        self.random.pick(&absurd)
    }

    /// Adds a tensor that is read: of so many bytes, and sometimes of other memory.
    fn read(&mut self, tensors: &mut Tensors, operand: &str, dtype: i128, pattern: Pattern, bytes: usize) {
        let (data, whole) = self.memory.input(pattern, bytes);
        let range = match self.random.below(200) {
            0 => (ptr::null(), 0),
            1 => (ptr::null(), whole),
            2 => (data.wrapping_add(1), whole.saturating_sub(8)),
            3 => (data, whole.saturating_sub(4)),
            4 => (data, usize::MAX - 7),
            5 => (data, 0),
            6 => self.memory.outputs[0].range(), // overlaps the output
            _ => (data, whole),
        };
        tensors.push(operand, dtype as i32, range);
    }

    fn written(&mut self, tensors: &mut Tensors, operand: &str, dtype: i128, piece: usize, bytes: usize) {
        let bytes = bytes.min(MEMORY);
        let data = self.memory.outputs[piece].address().cast_const().wrapping_add(MEMORY - bytes);
        let range = match self.random.below(150) {
            0 => (ptr::null(), 0),
            1 => (data.wrapping_add(1), bytes.saturating_sub(8)),
            2 => (data, bytes.saturating_sub(4)),
            3 => (data, usize::MAX - 7),
            _ => (data, bytes),
        };
        tensors.push(operand, dtype as i32, range);
    }

    /// Makes a plan of a problem, mostly on the CPU.
    fn create(&mut self, problem: &Struct) -> Option<Plan> {
        let kind = if self.random.once_in(60) {
            self.random.below(5) as i32 - 1
        } else {
            Header::get().constant("DEVICE_CPU")
        };
        let mut plan: Plan = ptr::dangling_mut();
        // SAFETY: the struct is as large as the header says, and its texts end.
        let status = unsafe { (self.library.plan_create)(problem.address(), kind, 1, ptr::null(), &raw mut plan) };
        let is_made = self.answered(status, "flashcore_plan_create");
        if is_made == plan.is_null() {
            self.complain(format!("flashcore_plan_create returned {status}, and the plan is {plan:p}"));
        }
        is_made.then_some(plan)
    }

    /// Runs a plan; true if it computed.
    fn run(&mut self, plan: Plan, tensors: &Tensors) -> bool {
        let words = tensors.words();
        // SAFETY: the tensors say what memory there is, or something that is refused.
        let status = unsafe { (self.library.run)(plan, words.as_ptr(), tensors.entries.len() as u64) };
        self.answered(status, "flashcore_run")
    }

    /// Launches a plan on the CPU, which is refused, and destroys it.
    fn end(&mut self, plan: Plan, tensors: &Tensors) {
        let (words, count) = (tensors.words(), tensors.entries.len() as u64);
        // SAFETY: a plan on the CPU launches nothing.
        let status = unsafe { (self.library.launch)(plan, ptr::null_mut(), words.as_ptr(), count) };
        if self.answered(status, "flashcore_launch") {
            self.complain("a plan on the CPU was launched".to_owned());
        }
        // SAFETY: a plan.
        let status = unsafe { (self.library.plan_destroy)(plan) };
        self.answered(status, "flashcore_plan_destroy");
    }
}

/// Calls by operation: computed and refused.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    counts: std::collections::BTreeMap<Operation, [usize; 2]>,
    pub(crate) complaints: Vec<String>,
}

impl Tally {
    /// Makes the calls of these numbers.
    pub(crate) fn of(library: &Library, seeds: impl Iterator<Item = u64>) -> Self {
        let (mut tally, mut memory) = (Self::default(), Memory::new());
        for seed in seeds {
            let Called { operation, is_computed, complaint } = call(library, &mut memory, seed);
            tally.counts.entry(operation).or_default()[usize::from(!is_computed)] += 1;
            tally.complaints.extend(complaint.map(|words| format!("call {seed}, {operation:?}: {words}")));
        }
        tally
    }

    pub(crate) fn computed(&self, operation: Operation) -> usize {
        self.counts.get(&operation).map_or(0, |counts| counts[0])
    }

    pub(crate) fn text(&self) -> String {
        let part = |(operation, [computed, refused]): (&Operation, &[usize; 2])| {
            format!("{operation:?} {computed} computed, {refused} refused")
        };
        self.counts.iter().map(part).collect::<Vec<_>>().join("; ")
    }
}
