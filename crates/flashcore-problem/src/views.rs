//! The numbers of a problem, borrowed: what backends read and write.

use crate::expression::Tables;
use crate::{
    BiasStrides, CallStrides, DType, Inputs, Invalid, Operand, Outputs, Problem, ScaleStrides, ScaleView, Tensor,
    TensorError,
};
use half::{bf16, f16};
use zerocopy::{FromBytes, Immutable, IntoBytes};

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

macro_rules! define_input_views {
    (
        tensors { $($tensors:tt)* }
        outputs { $($outputs:tt)* }
        inputs { $($(#[$doc:meta])* $input:ident: $Input:ident, $type:ty, $extent:expr, $with:ident, $stream:literal, $fill:ident,
            $(#[$switch_doc:meta])* $switch:ident: $switch_type:ty, $with_switch:ident;)* }
        strided { $($strided:tt)* }
        scales { $($(#[$scale_doc:meta])* $scale:ident: $Scale:ident, $with_scale:ident, $scale_stream:literal,
            $(#[$scale_switch_doc:meta])* $scale_switch:ident: $scale_switch_type:ty, $with_scale_switch:ident;)* }
    ) => {
        /// Everything a backend reads, borrowed. See [`Inputs`] for owned ones.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct InputViews<'a> {
            /// The query, `query_heads` by `query_length` by `head_dim`.
            pub query: TensorView<'a>,
            /// The key, `key_heads` by `key_length` by `head_dim`.
            pub key: TensorView<'a>,
            /// The value, `key_heads` by `key_length` by `value_dim`.
            pub value: TensorView<'a>,
            $($(#[$doc])* pub $input: Option<&'a [$type]>,)*
            /// The bias that is added to the scores.
            pub bias: Option<BiasView<'a>>,
            $($(#[$scale_doc])* pub $scale: Option<ScaleView<'a>>,)*
        }

        impl<'a> InputViews<'a> {
            /// Query, key and value, and nothing optional.
            ///
            /// ```
            /// # use flashcore_problem as flashcore;
            /// use flashcore::{DType, InputViews};
            ///
            /// let (query, key, value) = (vec![0.0_f32; 64], vec![0.0_f32; 64], vec![0.0_f32; 64]);
            /// let inputs = InputViews::new(&query, &key, &value).with_sinks(&[0.5, 1.5]);
            /// assert_eq!(inputs.query.dtype, DType::F32);
            /// ```
            pub fn new(
                query: impl Into<TensorView<'a>>,
                key: impl Into<TensorView<'a>>,
                value: impl Into<TensorView<'a>>,
            ) -> Self {
                Self {
                    query: query.into(),
                    key: key.into(),
                    value: value.into(),
                    $($input: None,)*
                    bias: None,
                    $($scale: None,)*
                }
            }

            $(#[doc = concat!("Adds [`", stringify!($input), "`](Self::", stringify!($input), ").")]
            #[must_use]
            pub const fn $with(mut self, $input: &'a [$type]) -> Self {
                self.$input = Some($input);
                self
            })*

            $(#[doc = concat!("Adds [`", stringify!($scale), "`](Self::", stringify!($scale), ").")]
            #[must_use]
            pub const fn $with_scale(mut self, $scale: ScaleView<'a>) -> Self {
                self.$scale = Some($scale);
                self
            })*

            /// The bytes of an operand; `None` where it is not there, or is no input.
            pub fn bytes(&self, operand: Operand) -> Option<&'a [u8]> {
                match operand {
                    Operand::Query => Some(self.query.data),
                    Operand::Key => Some(self.key.data),
                    Operand::Value => Some(self.value.data),
                    $(Operand::$Input => self.$input.map(IntoBytes::as_bytes),)*
                    Operand::Bias => self.bias.map(|bias| bias.data.as_bytes()),
                    $(Operand::$Scale => self.$scale.map(|scale| scale.data.as_bytes()),)*
                    Operand::Output | Operand::Lse => None,
                }
            }

            /// The same operands in other memory, as `bytes` gives it for each that is there.
            ///
            /// # Panics
            ///
            /// When `bytes` gives a vector of numbers that is not aligned or not whole.
            pub fn in_other_memory<'b>(&self, bytes: impl Fn(Operand) -> &'b [u8]) -> InputViews<'b> {
                let tensor = |operand, like: TensorView<'_>| TensorView { dtype: like.dtype, data: bytes(operand) };
                InputViews {
                    query: tensor(Operand::Query, self.query),
                    key: tensor(Operand::Key, self.key),
                    value: tensor(Operand::Value, self.value),
                    $($input: self.$input.map(|_| vector(bytes(Operand::$Input))),)*
                    bias: self.bias.map(|bias| BiasView { data: vector(bytes(Operand::Bias)), strides: bias.strides }),
                    $($scale: self.$scale.map(|scale| ScaleView {
                        data: vector(bytes(Operand::$Scale)),
                        strides: scale.strides,
                    }),)*
                }
            }

            /// The vectors of numbers as `bytes` gives them, without tensors and bias.
            pub(crate) fn vectors(bytes: impl Fn(Operand) -> Option<&'a [u8]>) -> Self {
                let none = TensorView { dtype: DType::F32, data: &[] };
                let vectors = Self::new(none, none, none);
                Self { $($input: bytes(Operand::$Input).map(vector),)* ..vectors }
            }

            fn check_vectors(&self, problem: &Problem, errors: &mut Vec<TensorError>) {
                $(check_count(Operand::$Input, problem, self.$input.map(<[$type]>::len), errors);)*
            }

            /// The strides of bias and scales; those of one that is not there are 0.
            pub fn call_strides(&self) -> CallStrides {
                CallStrides {
                    bias: self.bias.map_or_else(BiasStrides::default, |bias| bias.strides),
                    scales: [$(self.$scale.map_or(ScaleStrides::TENSOR, |scale| scale.strides),)*],
                }
            }

            /// The scales that are there.
            fn scales(&self) -> impl Iterator<Item = (Operand, ScaleView<'a>)> {
                [$((Operand::$Scale, self.$scale),)*].into_iter().filter_map(|(operand, scale)| Some((operand, scale?)))
            }

            fn check_scales_present(&self, problem: &Problem, errors: &mut Vec<TensorError>) {
                $(check_presence(Operand::$Scale, problem, self.$scale.is_some(), errors);)*
                for (operand, scale) in self.scales() {
                    scale.check_extent(operand, problem, errors);
                }
            }
        }
    };
}

operands!(define_input_views);

/// Bytes as numbers. Where there are none, their address may be anything, like that of an empty `Vec<u8>`.
fn vector<T: FromBytes + Immutable>(bytes: &[u8]) -> &[T] {
    if bytes.is_empty() { &[] } else { <[T]>::ref_from_bytes(bytes).expect("whole numbers, aligned") }
}

/// Everything a backend writes, borrowed. See [`Outputs`] for owned ones.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct OutputViews<'a> {
    /// The output, `query_heads` by `query_length` by `value_dim`.
    pub output: TensorViewMut<'a>,
    /// The log-sum-exp of each row, contiguous `[batch, query head, query row]`, where the problem wants it.
    pub lse: Option<&'a mut [f32]>,
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
}

impl TensorViewMut<'_> {
    /// The same, not to be written to.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, data: self.data }
    }
}

impl<'a> InputViews<'a> {
    /// A copy in memory of its own.
    pub fn to_owned_inputs(&self) -> Inputs {
        Inputs::copied(self)
    }

    /// Adds the bias.
    #[must_use]
    pub const fn with_bias(mut self, bias: BiasView<'a>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Everything that is wrong with `problem`, or else with these inputs for it.
    pub fn validate(&self, problem: &Problem) -> Result<(), Invalid> {
        self.validate_read(problem, |_, _| false)
    }

    /// [`validate`](Self::validate), but for scales that are `written`, by operand and index, before they are read.
    pub(crate) fn validate_read(
        &self,
        problem: &Problem,
        written: impl Fn(Operand, usize) -> bool,
    ) -> Result<(), Invalid> {
        problem.validate()?;
        let mut errors = Vec::new();
        for (operand, view) in [(Operand::Query, self.query), (Operand::Key, self.key), (Operand::Value, self.value)] {
            check_tensor(operand, problem, view, &mut errors);
        }
        self.check_numbers(problem, written, &mut errors);
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }

    fn check_numbers(
        &self,
        problem: &Problem,
        written: impl Fn(Operand, usize) -> bool,
        errors: &mut Vec<TensorError>,
    ) {
        self.check_vectors(problem, errors);
        check_presence(Operand::Bias, problem, self.bias.is_some(), errors);

        if let Some(bias) = &self.bias {
            let needed = bias.strides.extent(problem).unwrap_or(usize::MAX);
            if bias.data.len() < needed {
                errors.push(TensorError::TooShort { tensor: "bias", actual: bias.data.len(), needed });
            }
        }
        self.check_scales_present(problem, errors);
        // A vector that the problem does not have may have any size.
        let is_unsized = |error: &TensorError| {
            matches!(
                error,
                TensorError::Missing { .. } | TensorError::Unexpected { .. } | TensorError::WrongCount { .. }
            )
        };
        if !errors.iter().any(is_unsized) {
            self.check_sequences(problem, errors);
        }
        // The scales in use are those of the keys in use, which lengths and tables must have been right to tell.
        if errors.is_empty() {
            for (operand, scale) in self.scales() {
                scale.check_numbers(operand, problem, self, |index| written(operand, index), errors);
            }
        }
    }

    /// The tables that expressions read; empty where there is none.
    pub fn tables(&self) -> Tables<'a> {
        Tables { numbers: self.aux_f32.unwrap_or_default(), integers: self.aux_i32.unwrap_or_default() }
    }

    /// Number of keys of a sequence, from inputs that validate.
    pub fn key_length(&self, problem: &Problem, batch: usize) -> usize {
        self.sequence(problem, batch).key_length
    }
}

impl<'a> OutputViews<'a> {
    /// The output alone.
    pub fn new(output: impl Into<TensorViewMut<'a>>) -> Self {
        Self { output: output.into(), lse: None }
    }

    /// The output and the log-sum-exp of each row.
    pub fn with_lse(output: impl Into<TensorViewMut<'a>>, lse: &'a mut [f32]) -> Self {
        Self { output: output.into(), lse: Some(lse) }
    }

    /// Everything that is wrong with `problem`, or else with these outputs for it.
    pub fn validate(&self, problem: &Problem) -> Result<(), Invalid> {
        validate_outputs(problem, self.output.as_view(), self.lse.as_deref())
    }
}

pub(crate) fn validate_outputs(problem: &Problem, output: TensorView<'_>, lse: Option<&[f32]>) -> Result<(), Invalid> {
    problem.validate()?;
    let mut errors = Vec::new();
    check_tensor(Operand::Output, problem, output, &mut errors);
    check_count(Operand::Lse, problem, lse.map(<[f32]>::len), &mut errors);
    if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
}

fn check_tensor(operand: Operand, problem: &Problem, view: TensorView<'_>, errors: &mut Vec<TensorError>) {
    let tensor = operand.name();
    if let Some(expected) = operand.dtype(problem).filter(|&expected| view.dtype != expected) {
        errors.push(TensorError::DType { tensor, actual: view.dtype, expected });
    }
    let needed = operand.tensor(problem).and_then(|(shape, strides)| strides.extent(shape)).unwrap_or(usize::MAX);
    if view.len() < needed {
        errors.push(TensorError::TooShort { tensor, actual: view.len(), needed });
    }
}

fn check_presence(operand: Operand, problem: &Problem, given: bool, errors: &mut Vec<TensorError>) {
    let tensor = operand.name();
    match (operand.is_present(problem), given) {
        (true, false) => errors.push(TensorError::Missing { tensor }),
        (false, true) => errors.push(TensorError::Unexpected { tensor }),
        (true, true) | (false, false) => {}
    }
}

pub(crate) fn check_count(operand: Operand, problem: &Problem, actual: Option<usize>, errors: &mut Vec<TensorError>) {
    check_presence(operand, problem, actual.is_some(), errors);
    let (tensor, needed) = (operand.name(), operand.elements(problem).unwrap_or(0));
    if let Some(actual) = actual.filter(|&actual| operand.is_present(problem) && actual != needed) {
        errors.push(TensorError::WrongCount { tensor, actual, needed });
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

impl<'a> From<&'a Inputs> for InputViews<'a> {
    fn from(inputs: &'a Inputs) -> Self {
        inputs.views()
    }
}

impl<'a> From<&InputViews<'a>> for InputViews<'a> {
    fn from(views: &InputViews<'a>) -> Self {
        *views
    }
}

impl<'a> From<&'a mut Outputs> for OutputViews<'a> {
    fn from(outputs: &'a mut Outputs) -> Self {
        outputs.views_mut()
    }
}

impl<'a> From<&'a mut OutputViews<'_>> for OutputViews<'a> {
    fn from(views: &'a mut OutputViews<'_>) -> Self {
        OutputViews {
            output: TensorViewMut { dtype: views.output.dtype, data: views.output.data },
            lse: views.lse.as_deref_mut(),
        }
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

    /// Its numbers are not looked at: there may be none.
    #[test]
    fn a_vector_that_the_problem_does_not_have() {
        let problem = Problem::new(2, 1, 3, 1, DType::F32).with_seqused_k(true);
        let numbers = [0.0_f32; 6];
        let inputs = InputViews::new(&numbers, &numbers, &numbers).with_seqused_k(&[1, 2]).with_cu_seqlens_k(&[5]);
        let expected = Invalid::from(vec![TensorError::Unexpected { tensor: "cu_seqlens_k" }]);
        assert_eq!(inputs.validate(&problem), Err(expected));
    }

    #[test]
    fn every_setter_sets_its_field() {
        let bias = BiasView { data: &[1.0], strides: BiasStrides { batch: 0, head: 0, row: 0, key: 0 } };
        let mut expected = InputViews::new(&[1.0_f32], &[2.0_f32], &[3.0_f32]);
        expected.alibi_slopes = Some(&[4.0]);
        expected.sinks = Some(&[5.0]);
        expected.bias = Some(bias);
        expected.seqused_k = Some(&[6]);
        expected.aux_f32 = Some(&[7.0]);
        expected.aux_i32 = Some(&[8]);
        let set = InputViews::new(&[1.0_f32], &[2.0_f32], &[3.0_f32])
            .with_alibi_slopes(&[4.0])
            .with_sinks(&[5.0])
            .with_bias(bias)
            .with_seqused_k(&[6])
            .with_aux_f32(&[7.0])
            .with_aux_i32(&[8]);
        assert_eq!(set, expected);
    }

    #[test]
    fn vectors_without_numbers_may_be_anywhere() {
        let (words, views) = ([0_u32], InputViews::new(&[0.0_f32], &[0.0_f32], &[0.0_f32]).with_aux_f32(&[]));
        let misaligned = &words.as_bytes()[1..1];
        assert_eq!(views.in_other_memory(|_| misaligned).aux_f32, Some([].as_slice()));
    }

    #[test]
    fn owned_and_borrowed_are_the_same() {
        let mut problem = Problem::new(3, 2, 5, 8, DType::Bf16);
        (problem.alibi, problem.sinks, problem.bias) = (true, true, true);
        (problem.seqused_k, problem.lse) = (true, true);
        let inputs = Inputs::random(&problem, 4);
        let views = inputs.views();
        assert_eq!(views.value.data, inputs.value.data);
        assert_eq!(views.alibi_slopes, inputs.alibi_slopes.as_deref());
        assert_eq!(views.key_length(&problem, 1), 0);
        assert_eq!(views.validate(&problem), Ok(()));

        let mut outputs = Outputs::poisoned(&problem);
        let mut views = outputs.views_mut();
        let again = OutputViews::from(&mut views);
        again.output.data.fill(7);
        assert_eq!(again.validate(&problem), Ok(()));
        assert!(outputs.output.data.iter().all(|&byte| byte == 7));
    }
}
