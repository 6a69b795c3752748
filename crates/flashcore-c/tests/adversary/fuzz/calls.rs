//! Random calls of every operation, with arguments that are right, nearly right and absurd.
//!
//! Each call has a status and words that belong together, a refused one writes nothing, inputs lie in memory that cannot be
//! written and end at a page that cannot be touched. A run by addresses gives the bits of a run by bytes, and attention
//! that continues from nothing that of a plan.

use std::ffi::{CString, c_void};
use std::ptr;

use crate::abi::header::{Header, Struct};
use crate::abi::library::{Library, Plan};
use crate::abi::memory::{Pages, Side};
use crate::abi::random::{Random, normal_at};

/// Bytes of each piece of memory.
const MEMORY: usize = 1 << 16;
const POISON: u8 = 0x5A;

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

/// Content of inputs.
#[derive(Clone, Copy)]
enum Pattern {
    Floats,
    Zeros,
    Ones,
    Counted,
    Garbage,
    /// Other numbers than those of the query.
    Keys,
    Values,
}

/// Memory of calls: inputs that cannot be written, and outputs.
pub(crate) struct Memory {
    inputs: Vec<Pages>,
    outputs: Vec<Pages>,
    texts: Vec<CString>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        let floats = |seed: u64, index: u64| {
            let number = |place: u64| u64::from((normal_at(seed, place) as f32).to_bits());
            number(2 * index + 1) << 32 | number(2 * index)
        };
        let word = |pattern: usize, index: u64| match pattern {
            0 => floats(1, index),
            1 => 0,
            2 => 0x0000_0001_0000_0001,
            3 => (2 * index + 1) << 32 | (2 * index),
            4 => Random::new(index).next(),
            seed => floats(seed as u64, index),
        };
        let piece = |pattern: usize| {
            let mut pages = Pages::new(MEMORY, Side::Back);
            for (index, bytes) in pages.bytes_mut().chunks_exact_mut(8).enumerate() {
                bytes.copy_from_slice(&word(pattern, index as u64).to_ne_bytes());
            }
            pages.forbid_writing();
            pages
        };
        let outputs = (0..4).map(|_| {
            let mut pages = Pages::new(MEMORY, Side::Back);
            pages.bytes_mut().fill(POISON);
            pages
        });
        let texts: [&[u8]; 16] = [
            b"score",
            b"score + 0.1 * (q - k)",
            b"relative(2)",
            b"softcap(5)",
            b"q >= k ? score : score - aux_f32[k + h]",
            b"documents",
            b"causal && k != 3",
            b"window(2, 1) || b == 0",
            b"prefix(3)",
            b"d = q - k; d * d < aux_i32[h]",
            b"",
            b"score +",
            b"q / 2 < k",
            b"aux_f32[score]",
            b"score \xFF\xFE",
            b"((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((q",
        ];
        let texts = texts.iter().map(|text| CString::new(*text).unwrap()).collect();
        Self { inputs: (0..7).map(piece).collect(), outputs: outputs.collect(), texts }
    }

    /// The last bytes of a piece.
    fn input(&self, pattern: Pattern, bytes: usize) -> (*const u8, usize) {
        let pages = &self.inputs[pattern as usize];
        (pages.address().cast_const().wrapping_add(MEMORY - bytes.min(MEMORY)), bytes.min(MEMORY))
    }

    fn poison(&mut self) {
        self.outputs.iter_mut().for_each(|pages| pages.bytes_mut().fill(POISON));
    }

    fn is_poison(&self) -> bool {
        self.outputs.iter().all(|pages| pages.bytes().iter().all(|&byte| byte == POISON))
    }
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

    /// A problem with any operands.
    fn problem(&mut self) -> Struct {
        let mut problem = Struct::zeroed("flashcore_problem_t");
        let (batch, heads, length, dim) = (self.size(), self.size(), self.size(), self.size());
        let (bytes, dtype) = (problem.get("struct_size") as u64, self.dtype());
        // SAFETY: the struct has the size that the header says.
        let status = unsafe {
            (self.library.problem_init_sized)(
                problem.address_mut(),
                bytes,
                batch as u64,
                heads as u64,
                length as u64,
                dim as u64,
                dtype,
            )
        };
        self.answered(status, "flashcore_problem_init_sized");
        if self.random.once_in(2) {
            let keys = self.size();
            problem.set("key_length", keys);
        }
        if self.random.once_in(4) {
            problem.set("key_heads", 1);
        }
        let masks = ["MASK_NONE", "MASK_CAUSAL", "MASK_WINDOW"];
        problem.set("mask", constant(self.random.pick(&masks))).set("window_left", 1);
        problem.set("layout", constant(self.random.pick(&["LAYOUT_BHSD", "LAYOUT_BSHD"])));
        for switch in ["alibi", "sinks", "bias", "seqused_k", "lse", "seqused_q", "leftpad_k", "lse_base"] {
            problem.set(switch, self.random.once_in(4).into());
        }
        if self.random.once_in(4) {
            problem.set("cu_seqlens_q", 1).set("total_q", batch * length);
        }
        match self.random.below(6) {
            0 => {
                let rows = batch * problem.get("key_length");
                problem.set("cu_seqlens_k", 1).set("total_k", rows);
            }
            1 => {
                let page = self.random.pick(&[1, 2, 4]);
                problem.set("page_table", 1).set("page_size", page).set("num_pages", 32);
                problem.set("table_width", (problem.get("key_length") + page - 1) / page);
            }
            2 => {
                problem.set("kv_batch_idx", 1).set("kv_batch", batch);
            }
            _ => {}
        }
        problem
    }

    fn expressions(&mut self, problem: &mut Struct) {
        for field in ["score_mod", "mask_mod"] {
            if self.random.once_in(2) {
                // Texts for scores come first, then those for masks, then wrong ones.
                let first = if field == "score_mod" { 0 } else { 5 };
                let index = if self.random.once_in(8) {
                    self.random.below(self.memory.texts.len())
                } else {
                    first + self.random.below(5)
                };
                problem.set(field, self.memory.texts[index].as_ptr().addr() as i128);
            }
        }
        for table in ["aux_f32", "aux_i32"] {
            if !self.random.once_in(8) {
                problem.set(table, 64);
            }
        }
    }

    /// Every input of attention that the problem has.
    fn inputs(&mut self, problem: &Struct) -> Struct {
        let mut inputs = Struct::zeroed("flashcore_inputs_t");
        let count = |name: &str| usize::try_from(problem.get(name).clamp(0, 1 << 16)).unwrap();
        for (tensor, pattern) in [("query", Pattern::Floats), ("key", Pattern::Keys), ("value", Pattern::Values)] {
            self.read(&mut inputs, tensor, pattern, MEMORY);
        }
        let small = [Pattern::Zeros, Pattern::Zeros, Pattern::Zeros, Pattern::Ones, Pattern::Ones, Pattern::Garbage];
        let pages = [Pattern::Counted, Pattern::Counted, Pattern::Zeros, Pattern::Garbage];
        let offsets = [Pattern::Counted, Pattern::Counted, Pattern::Zeros, Pattern::Garbage];
        let batches = if problem.get("kv_batch_idx") == 1 { count("kv_batch") } else { count("batch") };
        let stride = count("table_stride").max(if problem.get("table_stride") == 0 { count("table_width") } else { 0 });
        let entries = batches.saturating_sub(1) * stride + count("table_width");
        let operands = [
            ("alibi", "alibi_slopes", Pattern::Floats, count("query_heads")),
            ("sinks", "sinks", Pattern::Floats, count("query_heads")),
            ("seqused_k", "seqused_k", self.random.pick(&small), count("batch")),
            ("seqused_q", "seqused_q", self.random.pick(&small), count("batch")),
            ("leftpad_k", "leftpad_k", self.random.pick(&small), count("batch")),
            ("kv_batch_idx", "kv_batch_idx", self.random.pick(&small), count("batch")),
            ("cu_seqlens_q", "cu_seqlens_q", self.random.pick(&offsets), count("batch") + 1),
            ("cu_seqlens_k", "cu_seqlens_k", self.random.pick(&offsets), count("batch") + 1),
            ("page_table", "page_table", self.random.pick(&pages), entries),
            ("aux_f32", "aux_f32", Pattern::Floats, count("aux_f32")),
            ("aux_i32", "aux_i32", Pattern::Garbage, count("aux_i32")),
            ("bias", "bias", Pattern::Floats, MEMORY / 4),
        ];
        for (switch, field, pattern, elements) in operands {
            if problem.get(switch) != 0 || self.random.once_in(100) {
                self.read(&mut inputs, field, pattern, 4 * elements);
            }
        }
        for (dimension, stride) in [("batch", 512), ("head", 64), ("row", 8), ("key", 1)] {
            inputs.set(&format!("bias_strides.{dimension}"), stride);
        }
        self.disturb(&mut inputs);
        inputs
    }

    fn outputs(&mut self, problem: &Struct) -> Struct {
        let mut outputs = Struct::zeroed("flashcore_outputs_t");
        self.written(&mut outputs, "output", 0, MEMORY);
        if problem.get("lse") == 1 {
            let rows = match problem.get("cu_seqlens_q") {
                1 => problem.get("total_q"),
                _ => problem.get("batch").saturating_mul(problem.get("query_length")),
            };
            let bytes = rows.saturating_mul(problem.get("query_heads")).saturating_mul(4).clamp(0, MEMORY as i128);
            self.written(&mut outputs, "lse", 1, bytes as usize);
        }
        self.disturb(&mut outputs);
        outputs
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

    /// The addresses of a run in one struct; `None` if a range is none that a run may have.
    fn tensors(inputs: &Struct, outputs: &Struct) -> Struct {
        let mut tensors = Struct::zeroed("flashcore_tensors_t");
        for name in ["query", "key", "value", "alibi_slopes", "sinks", "seqused_k", "aux_f32", "aux_i32", "bias"] {
            tensors.set(name, inputs.get(&format!("{name}.data")));
        }
        for name in ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "leftpad_k", "kv_batch_idx", "page_table"] {
            tensors.set(name, inputs.get(&format!("{name}.data")));
        }
        for dimension in ["batch", "head", "row", "key"] {
            let name = format!("bias_strides.{dimension}");
            tensors.set(&name, inputs.get(&name));
        }
        for name in ["output", "lse"] {
            tensors.set(name, outputs.get(&format!("{name}.data")));
        }
        tensors
    }

    fn results(&self) -> [Vec<u8>; 2] {
        [0, 1].map(|piece| self.memory.outputs[piece].bytes().to_vec())
    }

    fn attention(&mut self, has_expressions: bool) -> bool {
        let mut problem = self.problem();
        if has_expressions {
            self.expressions(&mut problem);
        }
        self.disturb(&mut problem);
        let library = self.library;
        // SAFETY: the struct is as large as it says, and its texts end.
        let made = self.create("flashcore_plan_create", |kind, plan| unsafe {
            (library.plan_create)(problem.address(), kind, 1, plan)
        });
        let Some(plan) = made else { return false };
        let (inputs, outputs) = (self.inputs(&problem), self.outputs(&problem));
        // SAFETY: the structs say what memory there is, or something that is refused.
        let status = unsafe { (library.plan_run_host)(plan, inputs.address(), outputs.address()) };
        let is_computed = self.answered(status, "flashcore_plan_run_host");
        if is_computed {
            let by_bytes = self.results();
            self.memory.poison();
            let mut tensors = Self::tensors(&inputs, &outputs);
            // SAFETY: the memory was long enough in the run before.
            let status = unsafe { (library.plan_run_tensors)(plan, tensors.address()) };
            if !self.answered(status, "flashcore_plan_run_tensors") || self.results() != by_bytes {
                let words = library.last_error();
                self.complain(format!("a run by addresses differs from one by bytes: {words}"));
            }
            // One address less, or one off: refused, or one that nobody needs.
            let name = self.random.pick(&["query", "key", "value", "output", "lse", "sinks", "page_table", "aux_f32"]);
            tensors.set(name, if self.random.once_in(2) || tensors.get(name) == 0 { 0 } else { tensors.get(name) + 1 });
            self.memory.poison();
            // SAFETY: as above; what is misaligned is refused.
            let status = unsafe { (library.plan_run_tensors)(plan, tensors.address()) };
            if !self.answered(status, "flashcore_plan_run_tensors") && !self.memory.is_poison() {
                self.complain(format!("{name} was refused, and something was written"));
            }
            // SAFETY: a plan on the CPU launches nothing.
            let status = unsafe { (library.plan_launch_tensors)(plan, ptr::null_mut(), tensors.address()) };
            if self.answered(status, "flashcore_plan_launch_tensors") {
                self.complain("a plan on the CPU was launched".to_owned());
            }
        }
        // SAFETY: a plan.
        let status = unsafe { (library.plan_destroy)(plan) };
        self.answered(status, "flashcore_plan_destroy");
        is_computed
    }

    /// Attention that continues from an output of 0 and an LSE of minus infinity is that of a plan.
    fn continuation(&mut self) -> bool {
        let mut problem = self.problem();
        problem.set("lse", i128::from(!self.random.once_in(20)));
        self.disturb(&mut problem);
        let library = self.library;
        // SAFETY: the struct is as large as it says.
        let made = self.create("flashcore_continue_create", |kind, plan| unsafe {
            (library.continue_create)(problem.address(), kind, 0, plan)
        });
        let Some(plan) = made else { return false };
        let (inputs, outputs) = (self.inputs(&problem), self.outputs(&problem));
        let start = |memory: &mut Memory| {
            memory.outputs[0].bytes_mut().fill(0);
            memory.outputs[1].bytes_mut().chunks_exact_mut(4).for_each(|lse| {
                lse.copy_from_slice(&f32::NEG_INFINITY.to_ne_bytes());
            });
        };
        start(self.memory);
        // SAFETY: the structs say what memory there is, or something that is refused.
        let status = unsafe { (library.continue_run_host)(plan, inputs.address(), outputs.address()) };
        let is_computed = self.answered(status, "flashcore_continue_run_host");
        let continued = self.results();
        if is_computed {
            start(self.memory);
            let tensors = Self::tensors(&inputs, &outputs);
            // SAFETY: the memory was long enough in the run before.
            let status = unsafe { (library.continue_run_tensors)(plan, tensors.address()) };
            if !self.answered(status, "flashcore_continue_run_tensors") || self.results() != continued {
                self.complain("a continuation by addresses differs from one by bytes".to_owned());
            }
            // SAFETY: a plan on the CPU launches nothing.
            let status = unsafe { (library.continue_launch)(plan, ptr::null_mut(), tensors.address()) };
            if self.answered(status, "flashcore_continue_launch") {
                self.complain("a plan on the CPU was launched".to_owned());
            }
            start(self.memory);
            self.compare_with_a_plan(&problem, &inputs, &outputs, &continued);
        }
        self.memory.poison();
        // SAFETY: a plan.
        let status = unsafe { (library.continue_destroy)(plan) };
        self.answered(status, "flashcore_continue_destroy");
        is_computed
    }

    fn compare_with_a_plan(&mut self, problem: &Struct, inputs: &Struct, outputs: &Struct, continued: &[Vec<u8>; 2]) {
        let library = self.library;
        let mut plan = ptr::null_mut();
        // SAFETY: the structs and the memory of the run before.
        let status = unsafe {
            (library.plan_create)(problem.address(), Header::get().constant("DEVICE_CPU"), 0, &raw mut plan);
            (library.plan_run_host)(plan, inputs.address(), outputs.address())
        };
        if !self.answered(status, "flashcore_plan_run_host") {
            self.complain("a plan refuses what a continuation takes".to_owned());
        }
        // SAFETY: a plan.
        unsafe { (library.plan_destroy)(plan) };
        let numbers = |bytes: &[u8]| -> Vec<f32> {
            bytes.chunks_exact(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect()
        };
        // The LSE is always of floats; the output where the problem is.
        let pieces: &[usize] = if problem.get("dtype") == constant("DTYPE_F32") { &[0, 1] } else { &[1] };
        let results = self.results();
        for &piece in pieces {
            let (found, expected) = (numbers(&continued[piece]), numbers(&results[piece]));
            let is_near = |(found, expected): (&f32, &f32)| {
                found == expected || (found - expected).abs() <= 1e-4 * (1.0 + expected.abs()) || !expected.is_finite()
            };
            if let Some(index) = found.iter().zip(&expected).position(|pair| !is_near(pair)) {
                let (found, expected) = (found[index], expected[index]);
                self.complain(format!("piece {piece} at {index}: continued {found}, planned {expected}"));
            }
        }
    }

    fn kv_cache(&mut self) -> bool {
        let library = self.library;
        let mut attention = self.problem();
        attention.set("seqused_k", i128::from(!self.random.once_in(20)));
        // Room for new keys, mostly, and keys that are not packed.
        if !self.random.once_in(20) {
            attention
                .set("cu_seqlens_k", 0)
                .set("total_k", 0)
                .set("leftpad_k", 0)
                .set("kv_batch_idx", 0)
                .set("kv_batch", 0);
            let (rows, page) = (8, attention.get("page_size"));
            attention.set("key_length", rows);
            if page != 0 {
                attention.set("table_width", (rows + page - 1) / page).set("num_pages", 64);
            }
        }
        if self.random.once_in(2) {
            attention.set("dtype", constant("DTYPE_F32"));
        }
        if self.random.once_in(10) {
            self.expressions(&mut attention);
        }
        let mut problem = Struct::zeroed("flashcore_kvcache_problem_t");
        let new_length = self.random.pick(&[1, 1, 1, 2]);
        // SAFETY: both structs are as large as they say.
        let status = unsafe { (library.kvcache_problem_init)(problem.address_mut(), attention.address(), new_length) };
        self.answered(status, "flashcore_kvcache_problem_init");
        self.rotary(&mut problem, attention.get("head_dim"));
        problem.set("rotary_seqlens", self.random.once_in(4).into());
        if self.random.once_in(5) {
            problem.set("total_new", attention.get("batch") * i128::from(new_length));
        }
        self.disturb(&mut attention);
        self.disturb(&mut problem);
        // SAFETY: the structs are as large as they say, and texts end.
        let made = self.create("flashcore_kvcache_create", |kind, plan| unsafe {
            (library.kvcache_create)(attention.address(), problem.address(), kind, 0, plan)
        });
        let Some(plan) = made else { return false };
        let (inputs, outputs) = (self.inputs(&attention), self.outputs(&attention));
        let mut tables = Struct::zeroed("flashcore_kvcache_inputs_t");
        let batch = attention.get("batch").clamp(0, 1 << 12) as usize;
        if problem.get("total_new") != 0 {
            let offsets = self.random.pick(&[Pattern::Counted, Pattern::Counted, Pattern::Zeros, Pattern::Garbage]);
            self.read(&mut tables, "cu_seqlens_k_new", offsets, 4 * (batch + 1));
        }
        if problem.get("rotary_seqlens") == 1 {
            self.read(&mut tables, "rotary_seqlens", Pattern::Counted, 4 * batch);
        }
        self.tables(&mut tables, &problem, &attention);
        let mut caches = Struct::zeroed("flashcore_kvcaches_t");
        self.written(&mut caches, "key_cache", 2, MEMORY);
        self.written(&mut caches, "value_cache", 3, MEMORY);
        self.disturb(&mut caches);
        let [inputs_at, tables_at, caches_at, outputs_at] = [&inputs, &tables, &caches, &outputs].map(Struct::address);
        // SAFETY: the structs say what memory there is, or something that is refused.
        let status = unsafe { (library.kvcache_run_host)(plan, inputs_at, tables_at, caches_at, outputs_at) };
        let is_computed = self.answered(status, "flashcore_kvcache_run_host");
        let (tensors, rest) = (Self::tensors(&inputs, &outputs), Struct::zeroed("flashcore_kvcache_tensors_t"));
        // SAFETY: a plan on the CPU launches nothing.
        let status = unsafe { (library.kvcache_launch)(plan, ptr::null_mut(), tensors.address(), rest.address()) };
        if self.answered(status, "flashcore_kvcache_launch") {
            self.complain("a plan on the CPU was launched".to_owned());
        }
        // SAFETY: a plan.
        let status = unsafe { (library.kvcache_destroy)(plan) };
        self.answered(status, "flashcore_kvcache_destroy");
        is_computed
    }

    fn rotary(&mut self, problem: &mut Struct, head_dim: i128) {
        if self.random.once_in(2) {
            problem.set("rotary", constant(self.random.pick(&["ROTARY_NEOX", "ROTARY_GPTJ"])));
            problem.set("rotary_dim", head_dim / 2 * 2).set("max_position", 9).set("table_stride", head_dim.max(1));
        }
        problem.set("qk_norm", self.random.once_in(4).into()).set_real("norm_eps", 1e-6);
    }

    /// Cosines, sines and weights of norms.
    fn tables(&mut self, target: &mut Struct, problem: &Struct, sized: &Struct) {
        let count = |value: i128| usize::try_from(value.clamp(0, 1 << 12)).unwrap();
        let bytes_of = |dtype: i128| [2, 2, 4, 8].get(count(dtype)).copied().unwrap_or(4);
        if problem.get("rotary") != 0 {
            let rows = count(problem.get("max_position")).saturating_sub(1) * count(problem.get("table_stride"));
            let entries = rows + count(problem.get("rotary_dim")) / 2;
            for table in ["cos", "sin"] {
                self.read(target, table, Pattern::Floats, entries * bytes_of(problem.get("table_dtype")));
            }
        }
        if problem.get("qk_norm") == 1 {
            for norm in ["query_norm", "key_norm"] {
                let bytes = count(sized.get("head_dim")) * bytes_of(sized.get("dtype"));
                self.read(target, norm, Pattern::Floats, bytes);
            }
        }
    }

    fn append(&mut self) -> bool {
        let library = self.library;
        let mut problem = Struct::zeroed("flashcore_append_problem_t");
        let [tokens, query_heads, key_heads, dim] = [(); 4].map(|()| self.size() as u64);
        let query_heads = if self.random.once_in(3) { 0 } else { query_heads };
        let dtype = self.dtype();
        // SAFETY: the struct has the size that the header says.
        let status = unsafe {
            (library.append_problem_init)(problem.address_mut(), tokens, query_heads, key_heads, dim, 4, 4, dtype)
        };
        self.answered(status, "flashcore_append_problem_init");
        self.rotary(&mut problem, dim.into());
        problem.set("position_bits", self.random.pick(&[32, 64]));
        self.disturb(&mut problem);
        // SAFETY: the struct is as large as it says.
        let made = self.create("flashcore_append_create", |kind, plan| unsafe {
            (library.append_create)(problem.address(), kind, 0, plan)
        });
        let Some(plan) = made else { return false };
        let count = |name: &str| problem.get(name).clamp(0, 1 << 12) as usize;
        let mut inputs = Struct::zeroed("flashcore_append_inputs_t");
        self.read(&mut inputs, "key", Pattern::Keys, MEMORY);
        self.read(&mut inputs, "value", Pattern::Values, MEMORY);
        // Slots of 64 bits: 0 is one for all tokens, which none or one may have; counted ones are beyond the cache.
        let slots = self.random.pick(&[Pattern::Counted, Pattern::Counted, Pattern::Zeros, Pattern::Garbage]);
        self.read(&mut inputs, "slot_mapping", slots, 8 * count("tokens"));
        if problem.get("rotary") != 0 {
            let bytes = count("position_bits") / 8 * count("tokens");
            self.read(&mut inputs, "positions", Pattern::Garbage, bytes);
        }
        self.tables(&mut inputs, &problem, &problem);
        self.disturb(&mut inputs);
        let mut outputs = Struct::zeroed("flashcore_append_outputs_t");
        self.written(&mut outputs, "key_cache", 2, MEMORY);
        self.written(&mut outputs, "value_cache", 3, MEMORY);
        if problem.get("query_heads") != 0 {
            self.read(&mut inputs, "query", Pattern::Floats, MEMORY);
            self.written(&mut outputs, "query", 0, MEMORY);
        }
        self.disturb(&mut outputs);
        // SAFETY: the structs say what memory there is, or something that is refused.
        let status = unsafe { (library.append_run_host)(plan, inputs.address(), outputs.address()) };
        let is_computed = self.answered(status, "flashcore_append_run_host");
        let tensors = Struct::zeroed("flashcore_append_tensors_t");
        // SAFETY: a plan on the CPU launches nothing.
        let status = unsafe { (library.append_launch)(plan, ptr::null_mut::<c_void>(), tensors.address()) };
        if self.answered(status, "flashcore_append_launch") {
            self.complain("a plan on the CPU was launched".to_owned());
        }
        // SAFETY: a plan.
        let status = unsafe { (library.append_destroy)(plan) };
        self.answered(status, "flashcore_append_destroy");
        is_computed
    }

    fn merge(&mut self) -> bool {
        let library = self.library;
        let mut problem = Struct::zeroed("flashcore_merge_problem_t");
        let [tokens, heads, columns] = [(); 3].map(|()| self.size() as u64);
        let parts = self.random.pick(&[2, 2, 3, 8, 16]);
        let dtype = self.dtype();
        // SAFETY: the struct has the size that the header says.
        let status =
            unsafe { (library.merge_problem_init)(problem.address_mut(), parts, tokens, heads, columns, dtype) };
        self.answered(status, "flashcore_merge_problem_init");
        problem.set("lse", self.random.once_in(2).into()).set("lse_base", self.random.once_in(2).into());
        self.disturb(&mut problem);
        // SAFETY: the struct is as large as it says.
        let made = self.create("flashcore_merge_create", |kind, plan| unsafe {
            (library.merge_create)(problem.address(), kind, 0, plan)
        });
        let Some(plan) = made else { return false };
        // As many entries as a problem may have parts.
        let entry = |caller: &mut Self| {
            let mut holder = Struct::zeroed("flashcore_outputs_t");
            caller.read(&mut holder, "output", Pattern::Floats, MEMORY);
            [holder.get("output.data") as u64, holder.get("output.bytes") as u64]
        };
        let entries: Vec<[u64; 2]> = (0..512).map(|index| if index < 16 { entry(self) } else { [0, 0] }).collect();
        let (part_outputs, part_lses) = entries.split_at(256);
        let mut inputs = Struct::zeroed("flashcore_merge_inputs_t");
        inputs.set("part_outputs", part_outputs.as_ptr().addr() as i128);
        // The same memory as floats.
        let lses: Vec<[u64; 2]> =
            (0..256).map(|index| if index < 16 { entry(self) } else { part_lses[index] }).collect();
        inputs.set("part_lses", if self.random.once_in(40) { 0 } else { lses.as_ptr().addr() as i128 });
        let mut outputs = Struct::zeroed("flashcore_merge_outputs_t");
        self.written(&mut outputs, "output", 0, MEMORY);
        if problem.get("lse") == 1 {
            self.written(&mut outputs, "lse", 1, MEMORY);
        }
        self.disturb(&mut outputs);
        // SAFETY: the structs say what memory there is, or something that is refused; there are as many entries as parts.
        let status = unsafe { (library.merge_run_host)(plan, inputs.address(), outputs.address()) };
        let is_computed = self.answered(status, "flashcore_merge_run_host");
        let tensors = Struct::zeroed("flashcore_merge_tensors_t");
        // SAFETY: a plan on the CPU launches nothing.
        let status = unsafe { (library.merge_launch)(plan, ptr::null_mut(), tensors.address()) };
        if self.answered(status, "flashcore_merge_launch") {
            self.complain("a plan on the CPU was launched".to_owned());
        }
        // SAFETY: a plan.
        let status = unsafe { (library.merge_destroy)(plan) };
        self.answered(status, "flashcore_merge_destroy");
        is_computed
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
