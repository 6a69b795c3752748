//! Tensor maps (TMA descriptors): tensors in global memory as TMA sees them. The host encodes one, and a kernel
//! receives it as 128 bytes.

use crate::operand::Swizzle;

/// The most dimensions of a tensor.
pub const MOST_DIMENSIONS: usize = 5;

/// The element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorElement {
    /// 8-bit unsigned integers, and 8-bit floats.
    U8,
    /// 16-bit unsigned integers.
    U16,
    /// 32-bit unsigned integers.
    U32,
    /// IEEE half precision.
    F16,
    /// The upper 16 bits of an `f32`.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl TensorElement {
    /// Bytes of an element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::F32 => 4,
        }
    }
}

/// The value that a load gives for elements outside the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OutOfBounds {
    /// Zeros.
    #[default]
    Zero,
    /// A NaN; for floats only.
    Nan,
}

/// A tensor in global memory and the box of it that one TMA copy moves.
///
/// Dimensions are counted from the innermost, whose elements are adjacent. Elements outside the tensor are read as
/// [`TensorMap::fill`] and not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorMap {
    /// The address of the first element, a multiple of 16.
    pub base: u64,
    /// The type of the elements.
    pub element: TensorElement,
    /// The number of dimensions, 1 to 5; only that many entries of the arrays count.
    pub rank: u32,
    /// Elements in each dimension.
    pub dimensions: [u64; MOST_DIMENSIONS],
    /// Bytes from one element to the next in each dimension but the innermost, multiples of 16.
    pub strides: [u64; MOST_DIMENSIONS - 1],
    /// Elements of the box in each dimension, 1 to 256; the innermost is a multiple of 16 bytes.
    pub box_dimensions: [u32; MOST_DIMENSIONS],
    /// Steps between the elements that are moved, 1 to 8; 1 in the innermost dimension.
    pub element_strides: [u32; MOST_DIMENSIONS],
    /// The swizzle of the box in shared memory.
    pub swizzle: Swizzle,
    /// The value read outside the tensor.
    pub fill: OutOfBounds,
}

/// A description that the hardware cannot encode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum InvalidTensorMap {
    #[error("a tensor map has 1 to 5 dimensions, not {rank}")]
    Rank { rank: u32 },
    #[error("a tensor begins at a multiple of 16 bytes, not at {base:#x}")]
    Base { base: u64 },
    #[error("dimension {axis} has {size} elements; allowed are 1 to 4294967296")]
    Dimension { axis: usize, size: u64 },
    #[error("the stride of dimension {axis} is {stride} bytes; it must be a multiple of 16 below 1099511627776")]
    Stride { axis: usize, stride: u64 },
    #[error("a box has 1 to 256 elements in each dimension, not {size} in dimension {axis}")]
    Box { axis: usize, size: u32 },
    #[error("the innermost dimension of a box has {bytes} bytes; it must be a multiple of 16")]
    InnerBox { bytes: u32 },
    #[error(
        "the innermost dimension of a box has {bytes} bytes, more than the {swizzle} of its swizzle; split the box"
    )]
    SwizzledBox { bytes: u32, swizzle: Swizzle },
    #[error("the element stride of dimension {axis} is {stride}; allowed are 1 to 8, and only 1 in dimension 0")]
    ElementStride { axis: usize, stride: u32 },
    #[error("integers have no NaN to fill with")]
    Fill,
}

impl TensorMap {
    /// A tensor of these dimensions, strides and box, the innermost first, without swizzle, filled with zeros. Dimensions
    /// beyond the fifth are left out, which [`TensorMap::validate`] notices.
    pub fn new(base: u64, element: TensorElement, dimensions: &[u64], strides: &[u64], box_dimensions: &[u32]) -> Self {
        let mut map = Self {
            base,
            element,
            rank: dimensions.len() as u32,
            dimensions: [1; MOST_DIMENSIONS],
            strides: [0; MOST_DIMENSIONS - 1],
            box_dimensions: [1; MOST_DIMENSIONS],
            element_strides: [1; MOST_DIMENSIONS],
            swizzle: Swizzle::None,
            fill: OutOfBounds::Zero,
        };
        map.dimensions.iter_mut().zip(dimensions).for_each(|(target, value)| *target = *value);
        map.strides.iter_mut().zip(strides).for_each(|(target, value)| *target = *value);
        map.box_dimensions.iter_mut().zip(box_dimensions).for_each(|(target, value)| *target = *value);
        map
    }

    /// This map with a swizzle of its box in shared memory.
    #[must_use]
    pub const fn with_swizzle(self, swizzle: Swizzle) -> Self {
        Self { swizzle, ..self }
    }

    /// Elements that a copy moves in each dimension.
    pub fn moved(&self) -> [u32; MOST_DIMENSIONS] {
        core::array::from_fn(|axis| self.box_dimensions[axis].div_ceil(self.element_strides[axis].max(1)))
    }

    /// Bytes of a box in shared memory: those that a copy adds to its `mbarrier` (`complete_tx`), elements outside the
    /// tensor included.
    pub fn box_bytes(&self) -> u32 {
        self.moved().iter().product::<u32>() * self.element.bytes()
    }

    /// Checks the limits of the hardware.
    pub fn validate(&self) -> Result<(), InvalidTensorMap> {
        let rank = self.rank as usize;
        if !(1..=MOST_DIMENSIONS).contains(&rank) {
            return Err(InvalidTensorMap::Rank { rank: self.rank });
        }
        if !self.base.is_multiple_of(16) {
            return Err(InvalidTensorMap::Base { base: self.base });
        }
        for axis in 0..rank {
            let (size, boxed, stride) = (self.dimensions[axis], self.box_dimensions[axis], self.element_strides[axis]);
            if !(1..=1 << 32).contains(&size) {
                return Err(InvalidTensorMap::Dimension { axis, size });
            }
            if !(1..=256).contains(&boxed) {
                return Err(InvalidTensorMap::Box { axis, size: boxed });
            }
            if !(1..=8).contains(&stride) || axis == 0 && stride != 1 {
                return Err(InvalidTensorMap::ElementStride { axis, stride });
            }
        }
        for (index, &stride) in self.strides[..rank - 1].iter().enumerate() {
            // 0 is right: an H200 repeats such a dimension, in the suite `features` with tensors that batches or heads share.
            if !stride.is_multiple_of(16) || stride >= 1 << 40 {
                return Err(InvalidTensorMap::Stride { axis: index + 1, stride });
            }
        }
        let bytes = self.box_dimensions[0] * self.element.bytes();
        if !bytes.is_multiple_of(16) {
            return Err(InvalidTensorMap::InnerBox { bytes });
        }
        if let Some(width) = self.swizzle.bytes()
            && bytes > width
        {
            return Err(InvalidTensorMap::SwizzledBox { bytes, swizzle: self.swizzle });
        }
        match (self.fill, self.element) {
            (OutOfBounds::Nan, TensorElement::U16 | TensorElement::U32) => Err(InvalidTensorMap::Fill),
            (OutOfBounds::Zero | OutOfBounds::Nan, _) => Ok(()),
        }
    }
}
