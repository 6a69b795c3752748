//! Cases whose kernels the typed builder writes: what several warps do together reads better in its words.

use flashcore_ir::types::U64;
use flashcore_ir::{Arch, Builder, Reg, TABLE, TensorMap, Type};

use super::case::{BufferMap, ConformanceCase, Input, Output, Tolerance};
use super::inputs::Fill;

/// Everything of a case but its kernel.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) name: String,
    /// The row of the table.
    pub(super) operation: &'static str,
    pub(super) threads: u32,
    pub(super) grid: [u32; 3],
    pub(super) cluster: [u32; 3],
    pub(super) inputs: Vec<Input>,
    pub(super) outputs: Vec<Output>,
    pub(super) tensor_maps: Vec<BufferMap>,
    pub(super) tolerance: Tolerance,
}

impl Plan {
    /// A case of moves of bits by one CTA, without buffers yet.
    pub(super) fn new(operation: &'static str, form: &str, threads: u32) -> Self {
        Self {
            name: format!("{operation}{}{form}", if form.is_empty() { "" } else { " " }),
            operation,
            threads,
            grid: [1; 3],
            cluster: [1; 3],
            inputs: Vec::new(),
            outputs: Vec::new(),
            tensor_maps: Vec::new(),
            tolerance: Tolerance::Bits,
        }
    }

    /// With so many elements to read.
    pub(super) fn input(mut self, name: &str, ty: Type, count: u32, fill: Fill) -> Self {
        self.inputs.push(Input { name: name.to_owned(), ty, count: count as usize, fill });
        self
    }

    /// With so many elements to write.
    pub(super) fn output(mut self, name: &str, ty: Type, count: u32) -> Self {
        self.outputs.push(Output { name: name.to_owned(), ty, count: count as usize });
        self
    }

    /// With a tensor in a buffer, of which the inputs are counted first.
    pub(super) fn tensor(mut self, buffer: usize, map: TensorMap) -> Self {
        self.tensor_maps.push(BufferMap { buffer, map });
        self
    }

    /// The case whose kernel `write` writes; it declares the tensor maps itself, in order. It is given the addresses of its inputs and outputs.
    pub(super) fn case(self, write: impl FnOnce(&mut Builder, &[Reg<U64>], &[Reg<U64>])) -> ConformanceCase {
        let identifier: String =
            self.name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
        let mut k = Builder::new(identifier, self.threads);
        k.set_cluster(self.cluster);
        let addresses = |k: &mut Builder, kind: &str, count: usize| -> Vec<Reg<U64>> {
            (0..count).map(|index| k.parameter(&format!("{kind}{index}"))).collect()
        };
        let inputs = addresses(&mut k, "input", self.inputs.len());
        let outputs = addresses(&mut k, "output", self.outputs.len());
        write(&mut k, &inputs, &outputs);
        let kernel = k.finish();
        let since = kernel.since();
        let row = TABLE.iter().map(|entry| entry.name).find(|name| *name == self.operation);
        ConformanceCase {
            name: self.name,
            operation: row.unwrap_or("no row of the table"),
            arch: Arch::ALL.into_iter().find(|arch| arch.has(since)).unwrap_or(Arch::Sm90a),
            kernel,
            grid: self.grid,
            inputs: self.inputs,
            outputs: self.outputs,
            scalars: Vec::new(),
            tensor_maps: self.tensor_maps,
            tolerance: self.tolerance,
        }
    }
}
