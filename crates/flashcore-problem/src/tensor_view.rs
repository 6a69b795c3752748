//! Tensors, borrowed: elements of any type as little-endian bytes.

use crate::{BiasStrides, DType, Tensor};
use half::{bf16, f16};
use zerocopy::IntoBytes;

// Views are little-endian bytes, and slices of numbers become views as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "flashcore needs a little-endian processor");

/// A Rust type of the elements of a tensor: `f16`, `bf16`, `f32` or `f64`, and no other.
pub trait HostElement: sealed::Plain + Copy {
    /// The same as a value.
    const DTYPE: DType;
}

mod sealed {
    /// Types that are the same as their bytes.
    pub trait Plain: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::Immutable {}
}

macro_rules! host_elements {
    ($($element:ident = $dtype:ident;)*) => {
        $(impl sealed::Plain for $element {}
        impl HostElement for $element {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

host_elements! {
    f16 = F16;
    bf16 = Bf16;
    f32 = F32;
    f64 = F64;
}

/// Elements of one type as little-endian bytes, in the storage order of their strides. See [`Tensor`] for owned ones.
///
/// Made from a slice, an array, a `Vec` or a [`Tensor`] by `into()`. It may be longer than its tensor, like the rest of a
/// buffer that holds several: what is past the last element is neither read nor written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// The bytes, those between rows of a strided tensor included. They need not be aligned.
    pub data: &'a [u8],
}

/// Like [`TensorView`], to be written to.
#[derive(Debug, PartialEq, Eq)]
pub struct TensorViewMut<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// The bytes, those between rows of a strided tensor included. They need not be aligned.
    pub data: &'a mut [u8],
}

/// A term that is added to the scores. See [`Bias`](crate::Bias) for an owned one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BiasView<'a> {
    /// The terms.
    pub data: &'a [f32],
    /// Where they lie.
    pub strides: BiasStrides,
}

/// A list of tensors, borrowed: views, or owned tensors.
#[derive(Clone, Copy, Debug)]
pub enum TensorList<'a> {
    /// Views.
    Views(&'a [TensorView<'a>]),
    /// Owned tensors.
    Owned(&'a [Tensor]),
}

impl<'a> TensorList<'a> {
    /// Number of tensors.
    pub const fn len(self) -> usize {
        match self {
            Self::Views(views) => views.len(),
            Self::Owned(tensors) => tensors.len(),
        }
    }

    /// True if there are no tensors.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The tensor of an index.
    ///
    /// # Panics
    ///
    /// When `index` is not below [`len`](Self::len).
    pub fn get(self, index: usize) -> TensorView<'a> {
        match self {
            Self::Views(views) => views[index],
            Self::Owned(tensors) => (&tensors[index]).into(),
        }
    }

    /// The tensors in their order.
    pub fn iter(self) -> impl Iterator<Item = TensorView<'a>> {
        (0..self.len()).map(move |index| self.get(index))
    }
}

/// Lists are equal if their tensors are, owned or not.
impl PartialEq for TensorList<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Default for TensorList<'_> {
    fn default() -> Self {
        Self::Views(&[])
    }
}

impl<'a> From<&'a [TensorView<'a>]> for TensorList<'a> {
    fn from(views: &'a [TensorView<'a>]) -> Self {
        Self::Views(views)
    }
}

impl<'a, const N: usize> From<&'a [TensorView<'a>; N]> for TensorList<'a> {
    fn from(views: &'a [TensorView<'a>; N]) -> Self {
        Self::Views(views)
    }
}

impl<'a> From<&'a Vec<Tensor>> for TensorList<'a> {
    fn from(tensors: &'a Vec<Tensor>) -> Self {
        Self::Owned(tensors)
    }
}

impl Default for TensorView<'_> {
    fn default() -> Self {
        Self { dtype: DType::F32, data: &[] }
    }
}

impl Default for TensorViewMut<'_> {
    fn default() -> Self {
        Self { dtype: DType::F32, data: &mut [] }
    }
}

impl TensorView<'_> {
    /// Elements of the tensor, those between rows included.
    pub fn len(&self) -> usize {
        self.data.len() / self.dtype.size_bytes()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy that owns its memory.
    pub fn to_owned_tensor(self) -> Tensor {
        Tensor { dtype: self.dtype, data: self.data.to_vec() }
    }
}

impl TensorViewMut<'_> {
    /// The same, not to be written to.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, data: self.data }
    }
}

impl<'a, T: HostElement> From<&'a [T]> for TensorView<'a> {
    fn from(elements: &'a [T]) -> Self {
        Self { dtype: T::DTYPE, data: elements.as_bytes() }
    }
}

impl<'a, T: HostElement, const N: usize> From<&'a [T; N]> for TensorView<'a> {
    fn from(elements: &'a [T; N]) -> Self {
        elements.as_slice().into()
    }
}

impl<'a, T: HostElement> From<&'a Vec<T>> for TensorView<'a> {
    fn from(elements: &'a Vec<T>) -> Self {
        elements.as_slice().into()
    }
}

impl<'a> From<&'a Tensor> for TensorView<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { dtype: tensor.dtype, data: &tensor.data }
    }
}

impl<'a, T: HostElement> From<&'a mut [T]> for TensorViewMut<'a> {
    fn from(elements: &'a mut [T]) -> Self {
        Self { dtype: T::DTYPE, data: elements.as_mut_bytes() }
    }
}

impl<'a, T: HostElement, const N: usize> From<&'a mut [T; N]> for TensorViewMut<'a> {
    fn from(elements: &'a mut [T; N]) -> Self {
        elements.as_mut_slice().into()
    }
}

impl<'a, T: HostElement> From<&'a mut Vec<T>> for TensorViewMut<'a> {
    fn from(elements: &'a mut Vec<T>) -> Self {
        elements.as_mut_slice().into()
    }
}

impl<'a> From<&'a mut Tensor> for TensorViewMut<'a> {
    fn from(tensor: &'a mut Tensor) -> Self {
        Self { dtype: tensor.dtype, data: &mut tensor.data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_become_views_of_their_type_and_bytes() {
        let check = |view: TensorView<'_>, dtype: DType, data: &[u8]| {
            assert_eq!((view.dtype, view.data, view.len()), (dtype, data, data.len() / dtype.size_bytes()));
        };
        check((&[f16::ONE, f16::NEG_ONE][..]).into(), DType::F16, &[0x00, 0x3C, 0x00, 0xBC]);
        check((&[f16::ONE, f16::NEG_ONE]).into(), DType::F16, &[0x00, 0x3C, 0x00, 0xBC]);
        check((&vec![bf16::ONE]).into(), DType::Bf16, &[0x80, 0x3F]);
        check((&vec![1.0_f32]).into(), DType::F32, &1.0_f32.to_le_bytes());
        check((&vec![-2.0_f64]).into(), DType::F64, &(-2.0_f64).to_le_bytes());
        check((&Tensor::from_values(DType::F16, &[1.0])).into(), DType::F16, &[0x00, 0x3C]);
    }

    #[test]
    fn arrays_can_be_written() {
        let mut elements = [1.0_f32, 2.0];
        let view: TensorViewMut<'_> = (&mut elements).into();
        assert_eq!((view.dtype, view.data.len()), (DType::F32, 8));
        view.data.fill(0);
        assert_eq!(elements, [0.0, 0.0]);
    }
}
