//! Calls of the operations beside attention: a growing KV cache, append, merge.

use std::ptr;

use super::memory::{MEMORY, Pattern};
use super::{Caller, constant};
use crate::abi::header::{Header, Struct};

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
        let mut problem = Struct::zeroed("flashcore_kvcache_problem_t");
        let new_length = self.random.pick(&[1, 1, 1, 2]);
        // SAFETY: both structs are as large as they say.
        let status = unsafe { (library.kvcache_problem_init)(problem.address_mut(), attention.address(), new_length) };
        self.answered(status, "flashcore_kvcache_problem_init");
        // The function writes the fields of the first header; the rest is zeros.
        problem.set("struct_size", Header::get().layout("flashcore_kvcache_problem_t").size as i128);
        let has_scales = attention.get("k_scale") == 1 || attention.get("v_scale") == 1;
        problem.set("compute_scales", (has_scales && self.random.once_in(2)).into());
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
        let (mut inputs, outputs) = (self.inputs(&attention), self.outputs(&attention));
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
        if problem.get("compute_scales") == 1 {
            for (piece, scale) in [(4, "k_scale"), (5, "v_scale")] {
                inputs.set_bytes(&format!("{scale}.data"), (ptr::null(), 0));
                if attention.get(scale) == 1 {
                    self.written(&mut caches, &format!("{scale}.data"), piece, MEMORY);
                    self.scale_strides(&mut caches, scale, true);
                }
            }
        }
        self.disturb(&mut caches);
        let [inputs_at, tables_at, caches_at, outputs_at] = [&inputs, &tables, &caches, &outputs].map(Struct::address);
        // SAFETY: the structs say what memory there is, or something that is refused.
        let status = unsafe { (library.kvcache_run_host)(plan, inputs_at, tables_at, caches_at, outputs_at) };
        let is_computed = self.answered(status, "flashcore_kvcache_run_host");
        // As in a launch: key and value are the caches, and the new ones are in the other struct.
        let mut tensors = Self::tensors(&inputs, &outputs);
        let mut rest = Struct::zeroed("flashcore_kvcache_tensors_t");
        for (cache, new) in [("key", "new_key"), ("value", "new_value")] {
            rest.set(new, inputs.get(&format!("{cache}.data")));
            tensors.set(cache, caches.get(&format!("{cache}_cache.data")));
        }
        if problem.get("compute_scales") == 1 {
            Self::copy_scales(&mut tensors, &caches, &["k_scale", "v_scale"]);
        }
        for name in ["cu_seqlens_k_new", "rotary_seqlens", "cos", "sin", "query_norm", "key_norm"] {
            rest.set(name, tables.get(&format!("{name}.data")));
        }
        if is_computed && caches.get("value_cache.data") != 0 {
            let by_bytes = self.everything();
            self.memory.poison();
            // SAFETY: the memory was long enough in the run before.
            let status = unsafe { (library.kvcache_run_tensors)(plan, tensors.address(), rest.address()) };
            if !self.answered(status, "flashcore_kvcache_run_tensors") || self.everything() != by_bytes {
                let words = library.last_error();
                self.complain(format!("a growing cache by addresses differs from one by bytes: {words}"));
            }
        }
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

    pub(super) fn rotary(&mut self, problem: &mut Struct, head_dim: i128) {
        if self.random.once_in(2) {
            problem.set("rotary", constant(self.random.pick(&["ROTARY_NEOX", "ROTARY_GPTJ"])));
            let rows = self.random.pick(&[9, 20]);
            problem.set("rotary_dim", head_dim / 2 * 2).set("max_position", rows).set("table_stride", head_dim.max(1));
        }
        problem.set("qk_norm", self.random.once_in(4).into()).set_real("norm_eps", 1e-6);
    }

    /// Cosines, sines and weights of norms.
    pub(super) fn tables(&mut self, target: &mut Struct, problem: &Struct, sized: &Struct) {
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

    pub(super) fn append(&mut self) -> bool {
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
        // The function writes the fields of the first header; the rest is zeros.
        problem.set("struct_size", Header::get().layout("flashcore_append_problem_t").size as i128);
        if self.random.once_in(3) {
            problem.set("cache_dtype", constant(self.random.pick(&["DTYPE_E4M3", "DTYPE_E5M2"])));
            let switches = [self.random.once_in(2), self.random.once_in(2)];
            problem.set("k_scale", switches[0].into()).set("v_scale", switches[1].into());
            problem.set("compute_scales", (switches != [false; 2] && self.random.once_in(2)).into());
        }
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
        // Slots of 64 bits: 0 is one for all tokens, which none or one may have; counted ones are beyond the cache, an error.
        let slots = self.random.pick(&[Pattern::Zeros, Pattern::Zeros, Pattern::Counted, Pattern::Garbage]);
        self.read(&mut inputs, "slot_mapping", slots, 8 * count("tokens"));
        if problem.get("rotary") != 0 {
            let bytes = count("position_bits") / 8 * count("tokens");
            let positions = self.random.pick(&[Pattern::Zeros, Pattern::Zeros, Pattern::Garbage]);
            self.read(&mut inputs, "positions", positions, bytes);
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
        for (piece, scale) in [(4, "k_scale"), (5, "v_scale")] {
            let is_computed = problem.get("compute_scales") == 1;
            if problem.get(scale) == 1 && is_computed {
                self.written(&mut outputs, &format!("{scale}.data"), piece, MEMORY);
                self.scale_strides(&mut outputs, scale, true);
            } else if problem.get(scale) == 1 {
                self.read(&mut inputs, &format!("{scale}.data"), Pattern::Scales, MEMORY);
                self.scale_strides(&mut inputs, scale, false);
            }
        }
        self.disturb(&mut outputs);
        // SAFETY: the structs say what memory there is, or something that is refused.
        let status = unsafe { (library.append_run_host)(plan, inputs.address(), outputs.address()) };
        let is_computed = self.answered(status, "flashcore_append_run_host");
        let tensors = Struct::zeroed("flashcore_append_tensors_t");
        // SAFETY: a plan on the CPU launches nothing.
        let status = unsafe { (library.append_launch)(plan, ptr::null_mut(), tensors.address()) };
        if self.answered(status, "flashcore_append_launch") {
            self.complain("a plan on the CPU was launched".to_owned());
        }
        // SAFETY: a plan.
        let status = unsafe { (library.append_destroy)(plan) };
        self.answered(status, "flashcore_append_destroy");
        is_computed
    }

    pub(super) fn merge(&mut self) -> bool {
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
