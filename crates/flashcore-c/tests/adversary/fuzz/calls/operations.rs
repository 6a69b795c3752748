//! Calls of a growing KV cache, of appends and of merges.

use super::memory::{MEMORY, Pattern};
use super::{Caller, constant};
use crate::abi::header::{Struct, Tensors};

impl Caller<'_> {
    pub(super) fn kv_cache(&mut self) -> bool {
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
        let new_length = self.random.pick(&[1, 1, 1, 2]);
        // SAFETY: both structs are as large as the header says.
        let mut problem = library.filled("kvcache", |problem| unsafe {
            (library.kvcache_problem_init)(problem, attention.address(), new_length)
        });
        let has_scales = attention.get("k_scale") == 1 || attention.get("v_scale") == 1;
        problem.set("compute_scales", (has_scales && self.random.once_in(2)).into());
        self.rotary(&mut problem, attention.get("head_dim"));
        problem.set("rotary_seqlens", self.random.once_in(4).into());
        if self.random.once_in(5) {
            problem.set("total_new", attention.get("batch") * i128::from(new_length));
        }
        self.disturb(&mut problem);
        let Some(plan) = self.create(&problem) else { return false };
        let attention = problem.inner("attention", "flashcore_attention_problem_t");
        let computes_scales = problem.get("compute_scales") == 1;
        let mut tensors = self.tensors(&attention, true, computes_scales);
        let batch = attention.get("batch").clamp(0, 1 << 12) as usize;
        let integers = constant("DTYPE_I32");
        if problem.get("total_new") != 0 {
            let offsets = self.random.pick(&[Pattern::Counted, Pattern::Counted, Pattern::Zeros, Pattern::Garbage]);
            self.read(&mut tensors, "cu_seqlens_k_new", integers, offsets, 4 * (batch + 1));
        }
        if problem.get("rotary_seqlens") == 1 {
            self.read(&mut tensors, "rotary_seqlens", integers, Pattern::Counted, 4 * batch);
        }
        self.tables(&mut tensors, &problem, &attention);
        let dtype = attention.get("dtype");
        self.read(&mut tensors, "new_key", dtype, Pattern::Keys, MEMORY);
        self.read(&mut tensors, "new_value", dtype, Pattern::Values, MEMORY);
        let cache_dtype = if attention.get("kv_dtype") == 0 { dtype } else { attention.get("kv_dtype") };
        self.caches(&mut tensors, cache_dtype);
        self.computed_scales(&mut tensors, &attention, computes_scales);
        self.disturb_tensors(&mut tensors);
        let is_computed = self.run(plan, &tensors);
        self.end(plan, &tensors);
        is_computed
    }

    fn caches(&mut self, tensors: &mut Tensors, dtype: i128) {
        self.written(tensors, "key_cache", dtype, 2, MEMORY);
        self.written(tensors, "value_cache", dtype, 3, MEMORY);
    }

    fn computed_scales(&mut self, tensors: &mut Tensors, switches: &Struct, is_computed: bool) {
        for (piece, scale) in [(4, "k_scale"), (5, "v_scale")] {
            if is_computed && switches.get(scale) == 1 {
                self.written(tensors, scale, constant("DTYPE_F32"), piece, MEMORY);
                self.scale_strides(tensors, scale, true);
            }
        }
    }

    fn rotary(&mut self, problem: &mut Struct, head_dim: i128) {
        if self.random.once_in(2) {
            problem.set("rotary.style", constant(self.random.pick(&["ROTARY_NEOX", "ROTARY_GPTJ"])));
            let rows = self.random.pick(&[9, 20]);
            problem.set("rotary.dim", head_dim / 2 * 2).set("rotary.max_position", rows);
            problem.set("rotary.table_stride", head_dim.max(1));
        }
        problem.set("qk_norm", self.random.once_in(4).into()).set_real("norm_eps", 1e-6);
    }

    /// Cosines, sines and weights of norms.
    fn tables(&mut self, tensors: &mut Tensors, problem: &Struct, sized: &Struct) {
        let count = |value: i128| usize::try_from(value.clamp(0, 1 << 12)).unwrap();
        let bytes_of = |dtype: i128| [4, 2, 2, 4, 8].get(count(dtype)).copied().unwrap_or(4);
        if problem.get("rotary.style") != 0 {
            let [rows, stride] = ["rotary.max_position", "rotary.table_stride"].map(|name| count(problem.get(name)));
            let entries = rows.saturating_sub(1) * stride + count(problem.get("rotary.dim")) / 2;
            let dtype = problem.get("rotary.table_dtype");
            for table in ["cos", "sin"] {
                self.read(tensors, table, dtype, Pattern::Floats, entries * bytes_of(dtype));
            }
        }
        if problem.get("qk_norm") == 1 {
            for norm in ["query_norm", "key_norm"] {
                let bytes = count(sized.get("head_dim")) * bytes_of(sized.get("dtype"));
                self.read(tensors, norm, sized.get("dtype"), Pattern::Floats, bytes);
            }
        }
    }

    pub(super) fn append(&mut self) -> bool {
        let library = self.library;
        let [tokens, query_heads, key_heads, dim] = [(); 4].map(|()| self.size() as u64);
        let query_heads = if self.random.once_in(3) { 0 } else { query_heads };
        let dtype = self.dtype();
        // SAFETY: the struct has the size that the header says.
        let mut problem = library.filled("append", |problem| unsafe {
            (library.append_problem_init)(problem, tokens, query_heads, key_heads, dim, 4, 4, dtype)
        });
        if self.random.once_in(3) {
            problem.set("cache_dtype", constant(self.random.pick(&["DTYPE_E4M3", "DTYPE_E5M2"])));
            let switches = [self.random.once_in(2), self.random.once_in(2)];
            problem.set("k_scale", switches[0].into()).set("v_scale", switches[1].into());
            problem.set("compute_scales", (switches != [false; 2] && self.random.once_in(2)).into());
        }
        self.rotary(&mut problem, dim.into());
        problem.set("position_dtype", constant(self.random.pick(&["DTYPE_I32", "DTYPE_I64"])));
        self.disturb(&mut problem);
        let Some(plan) = self.create(&problem) else { return false };
        let count = |name: &str| problem.get(name).clamp(0, 1 << 12) as usize;
        let dtype = problem.get("dtype");
        let mut tensors = Tensors::default();
        self.read(&mut tensors, "new_key", dtype, Pattern::Keys, MEMORY);
        self.read(&mut tensors, "new_value", dtype, Pattern::Values, MEMORY);
        // Slots of 64 bits: 0 is one for all tokens, which none or one may have; counted ones are beyond the cache, an error.
        let slots = self.random.pick(&[Pattern::Zeros, Pattern::Zeros, Pattern::Counted, Pattern::Garbage]);
        self.read(&mut tensors, "slot_mapping", constant("DTYPE_I64"), slots, 8 * count("tokens"));
        if problem.get("rotary.style") != 0 {
            let positions = problem.get("position_dtype");
            let bytes = if positions == constant("DTYPE_I32") { 4 } else { 8 } * count("tokens");
            let pattern = self.random.pick(&[Pattern::Zeros, Pattern::Zeros, Pattern::Garbage]);
            self.read(&mut tensors, "positions", positions, pattern, bytes);
        }
        self.tables(&mut tensors, &problem, &problem);
        let cache_dtype = if problem.get("cache_dtype") == 0 { dtype } else { problem.get("cache_dtype") };
        self.caches(&mut tensors, cache_dtype);
        if problem.get("query_heads") != 0 {
            self.read(&mut tensors, "query", dtype, Pattern::Floats, MEMORY);
            self.written(&mut tensors, "query_output", dtype, 0, MEMORY);
        }
        let computes_scales = problem.get("compute_scales") == 1;
        self.computed_scales(&mut tensors, &problem, computes_scales);
        for scale in ["k_scale", "v_scale"] {
            if problem.get(scale) == 1 && !computes_scales {
                self.read(&mut tensors, scale, constant("DTYPE_F32"), Pattern::Scales, MEMORY);
                self.scale_strides(&mut tensors, scale, false);
            }
        }
        self.disturb_tensors(&mut tensors);
        let is_computed = self.run(plan, &tensors);
        self.end(plan, &tensors);
        is_computed
    }

    pub(super) fn merge(&mut self) -> bool {
        let library = self.library;
        let [tokens, heads, columns] = [(); 3].map(|()| self.size() as u64);
        let parts = self.random.pick(&[2, 2, 3, 8, 16]);
        let dtype = self.dtype();
        // SAFETY: the struct has the size that the header says.
        let mut problem = library.filled("merge", |problem| unsafe {
            (library.merge_problem_init)(problem, parts, tokens, heads, columns, dtype)
        });
        problem.set("lse", self.random.once_in(2).into()).set("lse_base", self.random.once_in(2).into());
        self.disturb(&mut problem);
        let Some(plan) = self.create(&problem) else { return false };
        let mut tensors = Tensors::default();
        let (dtype, floats) = (problem.get("part_dtype"), constant("DTYPE_F32"));
        // One memory for all parts, or the same memory for each.
        let entries = if self.random.once_in(2) { 1 } else { parts };
        for _ in 0..entries {
            self.read(&mut tensors, "part_outputs", dtype, Pattern::Floats, MEMORY);
            self.read(&mut tensors, "part_lses", floats, Pattern::Floats, MEMORY);
        }
        if entries == 1 {
            for operand in ["part_outputs", "part_lses"] {
                let stride = self.random.pick(&[0, 8, 64, 512]);
                if let Some(part) = tensors.get(operand) {
                    part.set("strides.0", stride);
                }
            }
        }
        self.written(&mut tensors, "output", problem.get("dtype"), 0, MEMORY);
        if problem.get("lse") == 1 {
            self.written(&mut tensors, "lse", floats, 1, MEMORY);
        }
        self.disturb_tensors(&mut tensors);
        let is_computed = self.run(plan, &tensors);
        self.end(plan, &tensors);
        is_computed
    }
}
