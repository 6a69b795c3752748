//! Calls of attention and of attention that continues.

use super::memory::{MEMORY, Memory, Pattern};
use super::{Caller, constant};
use crate::abi::header::{Struct, Tensors};

impl Caller<'_> {
    /// A problem with any operands.
    pub(super) fn problem(&mut self) -> Struct {
        let (batch, heads, length, dim) = (self.size(), self.size(), self.size(), self.size());
        let dtype = self.dtype();
        let mut problem = self.library.problem(batch as u64, heads as u64, length as u64, dim as u64, dtype);
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
    pub(super) fn scale_strides(&mut self, tensors: &mut Tensors, scale: &str, is_per_token: bool) {
        let forms = [[0, 0, 0, 0], [0, 0, 0, 1], [8, 0, 0, 1], [0, 512, 8, 1]];
        let form = if is_per_token { forms[3] } else { self.random.pick(&forms) };
        let tensor = tensors.get(scale).expect("it was added");
        for (index, stride) in form.into_iter().enumerate() {
            tensor.set(&format!("strides.{index}"), stride);
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

    /// The tensors of attention that the problem has; of a growing cache without keys and values, and without scales where
    /// they are computed.
    pub(super) fn tensors(&mut self, problem: &Struct, is_cache: bool, computes_scales: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let count = |name: &str| usize::try_from(problem.get(name).clamp(0, 1 << 16)).unwrap();
        let dtype = problem.get("dtype");
        self.read(&mut tensors, "query", dtype, Pattern::Floats, MEMORY);
        if !is_cache {
            let dtype = if problem.get("kv_dtype") == 0 { dtype } else { problem.get("kv_dtype") };
            self.read(&mut tensors, "key", dtype, Pattern::Keys, MEMORY);
            self.read(&mut tensors, "value", dtype, Pattern::Values, MEMORY);
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
        for (switch, operand, pattern, elements) in operands {
            if problem.get(switch) != 0 || self.random.once_in(100) {
                let is_float = ["alibi_slopes", "sinks", "aux_f32", "bias"].contains(&operand);
                let dtype = constant(if is_float { "DTYPE_F32" } else { "DTYPE_I32" });
                self.read(&mut tensors, operand, dtype, pattern, 4 * elements);
            }
        }
        if let Some(bias) = tensors.get("bias") {
            for (index, stride) in [512, 64, 8, 1].into_iter().enumerate() {
                bias.set(&format!("strides.{index}"), stride);
            }
        }
        for scale in ["k_scale", "v_scale"] {
            if !computes_scales && (problem.get(scale) != 0 || self.random.once_in(100)) {
                self.read(&mut tensors, scale, constant("DTYPE_F32"), Pattern::Scales, MEMORY);
                self.scale_strides(&mut tensors, scale, false);
            }
        }
        self.written(&mut tensors, "output", dtype, 0, MEMORY);
        if problem.get("lse") == 1 {
            let rows = match problem.get("cu_seqlens_q") {
                1 => problem.get("total_q"),
                _ => problem.get("batch").saturating_mul(problem.get("query_length")),
            };
            let bytes = rows.saturating_mul(problem.get("query_heads")).saturating_mul(4).clamp(0, MEMORY as i128);
            self.written(&mut tensors, "lse", constant("DTYPE_F32"), 1, bytes as usize);
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
        let Some(plan) = self.create(&problem) else { return false };
        let mut tensors = self.tensors(&problem, false, false);
        self.disturb_tensors(&mut tensors);
        let is_computed = self.run(plan, &tensors);
        if is_computed {
            // One address less, or one off: refused, or one that nobody needs.
            let index = self.random.below(tensors.entries.len());
            let tensor = &mut tensors.entries[index];
            let data = if self.random.once_in(2) { 0 } else { tensor.get("data") + 1 };
            tensor.set("data", data);
            self.memory.poison();
            if !self.run(plan, &tensors) && !self.memory.is_poison() {
                self.complain(format!("tensor {index} was refused, and something was written"));
            }
        }
        self.end(plan, &tensors);
        is_computed
    }

    /// Attention that continues from an output of 0 and an LSE of minus infinity is that of a plan.
    pub(super) fn continuation(&mut self) -> bool {
        let mut problem = self.problem();
        problem.set("lse", i128::from(!self.random.once_in(20)));
        problem.set("base.operation", constant("OPERATION_CONTINUE"));
        self.disturb(&mut problem);
        let Some(plan) = self.create(&problem) else { return false };
        let mut tensors = self.tensors(&problem, false, false);
        self.disturb_tensors(&mut tensors);
        let start = |memory: &mut Memory| {
            memory.outputs[0].bytes_mut().fill(0);
            memory.outputs[1].bytes_mut().chunks_exact_mut(4).for_each(|lse| {
                lse.copy_from_slice(&f32::NEG_INFINITY.to_ne_bytes());
            });
        };
        start(self.memory);
        let is_computed = self.run(plan, &tensors);
        let continued = self.results();
        if is_computed {
            start(self.memory);
            self.compare_with_a_plan(&mut problem, &tensors, &continued);
        }
        self.memory.poison();
        self.end(plan, &tensors);
        is_computed
    }

    fn compare_with_a_plan(&mut self, problem: &mut Struct, tensors: &Tensors, continued: &[Vec<u8>; 2]) {
        problem.set("base.operation", constant("OPERATION_ATTENTION"));
        match self.library.create(problem) {
            Ok(plan) => {
                if !self.run(plan, tensors) {
                    self.complain("a plan refuses what a continuation takes".to_owned());
                }
                self.library.destroy(plan);
            }
            Err((_, words)) => self.complain(format!("there is a continuation, and no plan: {words}")),
        }
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
