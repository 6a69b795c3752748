//! Calls of attention and of attention that continues.

use std::ptr;

use super::memory::{MEMORY, Memory, Pattern};
use super::{Caller, constant};
use crate::abi::header::{Header, Struct};

impl Caller<'_> {
    /// A problem with any operands.
    pub(super) fn problem(&mut self) -> Struct {
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
        if self.random.once_in(6) {
            problem.set("kv_dtype", constant(self.random.pick(&["DTYPE_E4M3", "DTYPE_E5M2"])));
            problem.set("k_scale", self.random.once_in(2).into()).set("v_scale", self.random.once_in(2).into());
        }
        problem
    }

    /// Strides of a scale: of the tensor, by head, by sequence and head, by row and head.
    pub(super) fn scale_strides(&mut self, target: &mut Struct, scale: &str, is_per_token: bool) {
        let forms = [[0, 0, 0, 0], [0, 0, 0, 1], [8, 0, 0, 1], [0, 512, 8, 1]];
        let form = if is_per_token { forms[3] } else { self.random.pick(&forms) };
        for (dimension, stride) in ["sequence", "batch", "row", "key_head"].into_iter().zip(form) {
            target.set(&format!("{scale}.strides.{dimension}"), stride);
        }
    }

    pub(super) fn expressions(&mut self, problem: &mut Struct) {
        for field in ["score_mod", "mask_mod"] {
            if self.random.once_in(2) {
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
    pub(super) fn inputs(&mut self, problem: &Struct) -> Struct {
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
        for scale in ["k_scale", "v_scale"] {
            if problem.get(scale) != 0 || self.random.once_in(100) {
                self.read(&mut inputs, &format!("{scale}.data"), Pattern::Scales, MEMORY);
                self.scale_strides(&mut inputs, scale, false);
            }
        }
        self.disturb(&mut inputs);
        inputs
    }

    pub(super) fn outputs(&mut self, problem: &Struct) -> Struct {
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

    /// Addresses and strides of scales in a struct with bytes.
    pub(super) fn copy_scales(tensors: &mut Struct, from: &Struct, scales: &[&str]) {
        for scale in scales {
            tensors.set(&format!("{scale}.data"), from.get(&format!("{scale}.data.data")));
            for dimension in ["sequence", "batch", "row", "key_head", "query_head"] {
                let name = format!("{scale}.strides.{dimension}");
                tensors.set(&name, from.get(&name));
            }
        }
    }

    /// The addresses of a run in one struct; `None` if a range is none that a run may have.
    pub(super) fn tensors(inputs: &Struct, outputs: &Struct) -> Struct {
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
        Self::copy_scales(&mut tensors, inputs, &["q_scale", "k_scale", "v_scale"]);
        for name in ["output", "lse"] {
            tensors.set(name, outputs.get(&format!("{name}.data")));
        }
        tensors
    }

    pub(super) fn results(&self) -> [Vec<u8>; 2] {
        [0, 1].map(|piece| self.memory.outputs[piece].bytes().to_vec())
    }

    pub(super) fn attention(&mut self, has_expressions: bool) -> bool {
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
    pub(super) fn continuation(&mut self) -> bool {
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

    pub(super) fn compare_with_a_plan(
        &mut self,
        problem: &Struct,
        inputs: &Struct,
        outputs: &Struct,
        continued: &[Vec<u8>; 2],
    ) {
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
}
