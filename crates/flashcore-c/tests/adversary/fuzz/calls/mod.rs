//! Random calls of every operation, with arguments that are right, nearly right and absurd.
//!
//! Each call has a status and words that belong together, a refused one writes nothing, inputs lie in memory that cannot be
//! written and end at a page that cannot be touched. A run by addresses gives the bits of a run by bytes, and attention
//! that continues from nothing that of a plan.

mod attention;
mod memory;
mod operations;

use std::ptr;

use crate::abi::header::{Header, Struct};
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

    /// All memory that a call may write.
    fn everything(&self) -> Vec<Vec<u8>> {
        self.memory.outputs.iter().map(|pages| pages.bytes().to_vec()).collect()
    }

    fn size(&mut self) -> i128 {
        self.random.pick(&[1, 1, 2, 2, 3, 4, 8])
    }

    fn dtype(&mut self) -> i32 {
        let names = ["DTYPE_F16", "DTYPE_BF16", "DTYPE_F32", "DTYPE_F32", "DTYPE_F64"];
        Header::get().constant(self.random.pick(&names))
    }

    /// Sometimes changes a field, to something that may be wrong.
    fn disturb(&mut self, target: &mut Struct) {
        if !self.random.once_in(10) {
            return;
        }
        for _ in 0..self.random.within(1, 2) {
            let field = self.random.pick(&target.sizes());
            let before = target.get(field);
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
            let value = self.random.pick(&absurd);
            // A size of a struct beyond what it has would be a lie about memory, unless it is refused unseen.
            let is_lie = field == "struct_size" && value > before && value <= 4096;
            if !is_lie {
                target.set(field, value);
            }
        }
    }

    /// Sets a tensor that is read: of so many bytes, and sometimes of other memory.
    fn read(&mut self, target: &mut Struct, field: &str, pattern: Pattern, bytes: usize) {
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
        target.set_bytes(field, range);
    }

    fn written(&mut self, target: &mut Struct, field: &str, piece: usize, bytes: usize) {
        let bytes = bytes.min(MEMORY);
        let data = self.memory.outputs[piece].address().cast_const().wrapping_add(MEMORY - bytes);
        let range = match self.random.below(150) {
            0 => (ptr::null(), 0),
            1 => (data.wrapping_add(1), bytes.saturating_sub(8)),
            2 => (data, bytes.saturating_sub(4)),
            3 => (data, usize::MAX - 7),
            _ => (data, bytes),
        };
        target.set_bytes(field, range);
    }

    fn create(&mut self, call: &str, create: impl FnOnce(i32, *mut Plan) -> i32) -> Option<Plan> {
        let kind = if self.random.once_in(60) {
            self.random.below(5) as i32 - 1
        } else {
            Header::get().constant("DEVICE_CPU")
        };
        let mut plan: Plan = ptr::dangling_mut();
        let status = create(kind, &raw mut plan);
        let is_made = self.answered(status, call);
        if is_made == plan.is_null() {
            self.complain(format!("{call} returned {status}, and the plan is {plan:p}"));
        }
        is_made.then_some(plan)
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
