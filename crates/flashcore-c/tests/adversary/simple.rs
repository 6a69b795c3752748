//! A problem with its tensors, for tests that are not about numbers.

use crate::abi::header::Struct;
use crate::abi::library::{Library, Plan};
use crate::abi::random::normal_at;
use crate::fuzz::element::Element;

/// Contiguous self-attention of random numbers, with a log-sum-exp.
pub(crate) struct Simple {
    pub(crate) problem: Struct,
    pub(crate) inputs: Struct,
    pub(crate) outputs: Struct,
    /// Query, key, value, output, in words so that they are aligned for every type.
    tensors: Vec<Vec<u64>>,
    lse: Vec<f32>,
}

impl Simple {
    pub(crate) fn new(sizes: [u64; 4], element: Element, seed: u64) -> Self {
        let [batch, heads, length, dim] = sizes;
        let mut problem = Library::get().problem(batch, heads, length, dim, element.code());
        problem.set("lse", 1);
        let elements = (batch * heads * length * dim) as usize;
        let bytes = elements * element.size();
        let random = |salt: u64| -> Vec<u64> {
            let mut bytes = vec![0_u8; bytes.next_multiple_of(8)];
            for (index, place) in bytes.chunks_exact_mut(element.size()).enumerate() {
                element.write(normal_at(seed ^ salt << 40, index as u64), place);
            }
            bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()
        };
        let mut made = Self {
            problem,
            inputs: Struct::zeroed("flashcore_inputs_t"),
            outputs: Struct::zeroed("flashcore_outputs_t"),
            tensors: vec![random(1), random(2), random(3), vec![0; bytes.div_ceil(8)]],
            lse: vec![0.0; (batch * heads * length) as usize],
        };
        for (name, tensor) in ["query", "key", "value"].into_iter().zip(&made.tensors) {
            made.inputs.set_bytes(name, (tensor.as_ptr().cast(), bytes));
        }
        made.outputs.set_bytes("output", (made.tensors[3].as_mut_ptr().cast_const().cast(), bytes));
        let rows = made.lse.as_mut_ptr().cast_const();
        made.outputs.set_bytes("lse", (rows.cast(), made.lse.len() * 4));
        made
    }

    pub(crate) fn run(&self, plan: Plan) -> Result<(), (i32, String)> {
        // SAFETY: the structs point to the vectors of this value, and are as long as they.
        unsafe { Library::get().run(plan, &self.inputs, &self.outputs) }
    }

    /// Output and log-sum-exp, bit for bit.
    pub(crate) fn result(&self) -> (Vec<u64>, Vec<u32>) {
        (self.tensors[3].clone(), self.lse.iter().map(|row| row.to_bits()).collect())
    }

    /// Forgets the result.
    pub(crate) fn clear(&mut self) {
        self.tensors[3].fill(u64::MAX);
        self.lse.fill(f32::NAN);
    }
}
