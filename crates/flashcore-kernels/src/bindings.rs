//! Bindings: the arguments of a launch that its plan does not know.
//!
//! A plan depends on no address. Of each argument that a launch brings it says where the value comes from: the address of an
//! operand, a place in the workspace, a stride of the call. [`LaunchValues`] is what a launch brings.

use flashcore_problem::{BiasStrides, CallStrides, Operand};

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

    /// The place, so many bytes further.
    pub(crate) const fn plus(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
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
    /// Bytes from one place to another, modulo 2^64.
    Distance {
        /// The first place.
        from: Place,
        /// The second.
        to: Place,
    },
    /// Bytes of a stride of the bias: of batches, heads, rows or keys.
    BiasStride(usize),
    /// Bytes of a stride of a scale, in the order of [`ScaleStrides`](flashcore_problem::ScaleStrides).
    ScaleStride(Operand, usize),
    /// Bytes between the first two tensors of a list, modulo 2^64.
    PartStride(Operand),
    /// Tokens of the launch.
    Tokens,
}

impl Word {
    /// The address of an operand.
    pub(crate) fn address(of: impl Into<Place>) -> Self {
        Self::Address(of.into())
    }

    /// The words of a scale: its address and its strides.
    pub(crate) fn scale(scale: Operand) -> impl Iterator<Item = Self> {
        [Self::address(scale)].into_iter().chain((0..5).map(move |index| Self::ScaleStride(scale, index)))
    }

    /// The word with a place for each of its places.
    pub(crate) fn map(self, change: impl Fn(Place) -> Place) -> Self {
        match self {
            Self::Address(place) => Self::Address(change(place)),
            Self::Distance { from, to } => Self::Distance { from: change(from), to: change(to) },
            other => other,
        }
    }
}

/// The values that change from launch to launch: device addresses, strides of the call, and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchValues {
    /// The address of each operand, of a list that of its first tensor; any number where the problem has none.
    pub operands: [u64; Operand::COUNT],
    /// Strides of bias and scales in elements.
    pub strides: CallStrides,
    /// Bytes between the parts of a merge, of outputs and of LSEs, modulo 2^64: the second part may lie before the first.
    pub part_strides: [u64; 2],
    /// Tokens of this launch, at most those of the plan; `None` for as many.
    pub tokens: Option<u32>,
    /// The address of [`LaunchPlan::workspace_bytes`](crate::LaunchPlan::workspace_bytes) bytes; any number if that is 0.
    pub workspace: u64,
}

impl LaunchValues {
    /// No operand anywhere.
    pub const NONE: Self = Self {
        operands: [0; Operand::COUNT],
        strides: CallStrides::NONE,
        part_strides: [0; 2],
        tokens: None,
        workspace: 0,
    };

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

    /// The value of a word of a launch whose plan has so many tokens.
    pub fn word(&self, word: Word, tokens: u32) -> u64 {
        let bytes = |stride: usize| stride as u64 * size_of::<f32>() as u64;
        match word {
            Word::Address(place) => self.place(place),
            Word::Distance { from, to } => self.place(to).wrapping_sub(self.place(from)),
            Word::BiasStride(index) => {
                let BiasStrides { batch, head, row, key } = self.strides.bias;
                bytes([batch, head, row, key][index])
            }
            Word::ScaleStride(scale, index) => {
                let strides = scale.scale_index().map(|scale| self.strides.scales[scale].to_array());
                strides.map_or(0, |strides| bytes(strides[index]))
            }
            Word::PartStride(list) => self.part_strides[usize::from(list == Operand::PartLses)],
            Word::Tokens => self.tokens.unwrap_or(tokens).into(),
        }
    }
}
