//! A problem with its tensors, for tests that are not about numbers.

use crate::abi::header::{Struct, Tensors};
use crate::abi::library::{Library, Plan};
use crate::abi::random::normal_at;
use crate::fuzz::element::Element;

/// Contiguous self-attention of random numbers, with a log-sum-exp.
pub(crate) struct Simple {
    pub(crate) problem: Struct,
    pub(crate) tensors: Tensors,
    /// Query, key, value, output, in words so that they are aligned for every type.
    memory: Vec<Vec<u64>>,
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
            tensors: Tensors::default(),
            memory: vec![random(1), random(2), random(3), vec![0; bytes.div_ceil(8)]],
            lse: vec![0.0; (batch * heads * length) as usize],
        };
        for (name, memory) in ["query", "key", "value", "output"].into_iter().zip(&mut made.memory) {
            made.tensors.push(name, element.code(), (memory.as_mut_ptr().cast_const().cast(), bytes));
        }
        let rows = made.lse.as_mut_ptr().cast_const();
        made.tensors.push_as("lse", "F32", (rows.cast(), made.lse.len() * 4));
        made
    }

    pub(crate) fn run(&self, plan: Plan) -> Result<(), (i32, String)> {
        // SAFETY: the tensors are the vectors of this value, and as long as they.
        unsafe { Library::get().try_run(plan, &self.tensors) }
    }

    /// Output and log-sum-exp, bit for bit.
    pub(crate) fn result(&self) -> (Vec<u64>, Vec<u32>) {
        (self.memory[3].clone(), self.lse.iter().map(|row| row.to_bits()).collect())
    }

    /// Forgets the result.
    pub(crate) fn clear(&mut self) {
        self.memory[3].fill(u64::MAX);
        self.lse.fill(f32::NAN);
    }
}
