//! Bindings: the arguments of a launch that its plan does not know.
//!
//! A plan depends on no address. Of each argument that a launch brings it says where the value comes from: the address of an
//! operand, a place in the workspace, a stride of the call. [`LaunchValues`] is what a launch brings.

use flashcore_problem::{BiasStrides, CallStrides, Operand};

use crate::cache::{FUSED_WORDS, FusedValues};

/// A place in device memory: bytes into an operand or into the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The operand; `None` for the workspace.
    pub operand: Option<Operand>,
    /// Bytes from its beginning.
    pub offset: u64,
}

impl Place {
    /// A place in the workspace.
    pub const fn in_workspace(offset: u64) -> Self {
        Self { operand: None, offset }
    }
}

impl From<Operand> for Place {
    fn from(operand: Operand) -> Self {
        Self { operand: Some(operand), offset: 0 }
    }
}

/// A 64-bit argument that a launch brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// An address.
    Address(Place),
    /// Bytes of a stride of the bias: of batches, heads, rows or keys.
    BiasStride(usize),
    /// Bytes of a stride of a scale, in the order of [`ScaleStrides`](flashcore_problem::ScaleStrides).
    ScaleStride(Operand, usize),
    /// A word of an append inside of the launch.
    Append(usize),
}

/// The values that change from launch to launch: device addresses, and the strides of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchValues {
    /// The address of each operand; any number where the problem has none.
    pub operands: [u64; Operand::COUNT],
    /// Strides of bias and scales in elements.
    pub strides: CallStrides,
    /// The address of [`LaunchPlan::workspace_bytes`](crate::LaunchPlan::workspace_bytes) bytes; any number if that is 0.
    pub workspace: u64,
    /// The addresses of an append inside of the launch.
    pub append: FusedValues,
}

impl LaunchValues {
    /// No operand anywhere.
    pub const NONE: Self =
        Self { operands: [0; Operand::COUNT], strides: CallStrides::NONE, workspace: 0, append: FusedValues::NONE };

    /// The address of an operand.
    pub const fn address(&self, operand: Operand) -> u64 {
        self.operands[operand as usize]
    }

    /// Sets the address of an operand.
    pub const fn set(&mut self, operand: Operand, address: u64) {
        self.operands[operand as usize] = address;
    }

    /// The address of a place.
    pub const fn place(&self, place: Place) -> u64 {
        let base = match place.operand {
            Some(operand) => self.address(operand),
            None => self.workspace,
        };
        base.wrapping_add(place.offset)
    }

    /// The value of a word.
    pub fn word(&self, word: Word) -> u64 {
        let bytes = |stride: usize| stride as u64 * size_of::<f32>() as u64;
        match word {
            Word::Address(place) => self.place(place),
            Word::BiasStride(index) => {
                let BiasStrides { batch, head, row, key } = self.strides.bias;
                bytes([batch, head, row, key][index])
            }
            Word::ScaleStride(scale, index) => {
                let strides = scale.scale_index().map(|scale| self.strides.scales[scale].to_array());
                strides.map_or(0, |strides| bytes(strides[index]))
            }
            Word::Append(index) => {
                let words: [u64; FUSED_WORDS] = self.append.words();
                words[index]
            }
        }
    }
}
