//! The numbers of a problem, borrowed: what backends read and write.

use crate::expression::Tables;
use crate::rows::check_outputs;
use crate::{
    Access, BiasStrides, BiasView, CallStrides, Inputs, Invalid, Operand, OperandSet, Outputs, Positions, Problem, Row,
    ScaleStrides, ScaleView, ScaleViewMut, Slot, TensorError, TensorList, TensorView, TensorViewMut,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The view of a kind of operand that is read.
macro_rules! view {
    (Tensor $a:lifetime) => { TensorView<$a> };
    (Tensors $a:lifetime) => { TensorList<$a> };
    (Bias $a:lifetime) => { Option<BiasView<$a>> };
    (Scale $a:lifetime) => { Option<ScaleView<$a>> };
    (Positions $a:lifetime) => { Option<Positions<$a>> };
    ($element:ident $a:lifetime) => { Option<&$a [$element]> };
}

/// The view of a kind of operand that is written.
macro_rules! view_mut {
    (Tensor $a:lifetime) => { TensorViewMut<$a> };
    (Scale $a:lifetime) => { Option<ScaleViewMut<$a>> };
    ($element:ident $a:lifetime) => { Option<&$a mut [$element]> };
}

/// Argument type of a setter.
macro_rules! argument {
    (Tensor $a:lifetime) => { impl Into<TensorView<$a>> };
    (Tensors $a:lifetime) => { impl Into<TensorList<$a>> };
    (Bias $a:lifetime) => { BiasView<$a> };
    (Scale $a:lifetime) => { ScaleView<$a> };
    (Positions $a:lifetime) => { impl Into<Positions<$a>> };
    ($element:ident $a:lifetime) => { &$a [$element] };
}

macro_rules! argument_mut {
    (Tensor $a:lifetime) => { impl Into<TensorViewMut<$a>> };
    (Scale $a:lifetime) => { ScaleViewMut<$a> };
    ($element:ident $a:lifetime) => { &$a mut [$element] };
}

/// The view of the argument of a setter.
macro_rules! taken {
    (Tensor $view:expr) => {
        $view.into()
    };
    (Tensors $view:expr) => {
        $view.into()
    };
    (Positions $view:expr) => {
        Some($view.into())
    };
    ($kind:ident $view:expr) => {
        Some($view)
    };
}

/// The memory of a view or of what owns it.
macro_rules! slot {
    (Tensor $tensor:expr) => {{
        let data = &$tensor.data[..];
        (!data.is_empty()).then_some(Slot { element: $tensor.dtype.into(), data })
    }};
    (Tensors $tensors:expr) => { None };
    (Positions $positions:expr) => { $positions.map(Positions::slot) };
    (Bias $bias:expr) => { slot!(Scale $bias) };
    (Scale $scale:expr) => { $scale.as_ref().map(|scale| Slot::of(&scale.data[..])) };
    ($element:ident $vector:expr) => { $vector.as_ref().map(|vector| Slot::of(&vector[..])) };
}

pub(crate) use slot;

macro_rules! slot_mut {
    (Tensor $tensor:expr) => {
        (!$tensor.data.is_empty()).then_some(&mut *$tensor.data)
    };
    (Scale $scale:expr) => {
        $scale.as_mut().map(|scale| scale.data.as_mut_bytes())
    };
    ($element:ident $vector:expr) => {
        $vector.as_mut().map(|vector| vector.as_mut_bytes())
    };
}

/// A view in other memory.
macro_rules! relocated {
    (Tensor $view:expr, $bytes:expr) => {
        TensorView { dtype: $view.dtype, data: if $view.data.is_empty() { &[] } else { $bytes } }
    };
    (Tensors $view:expr, $bytes:expr) => {
        TensorList::default()
    };
    (Bias $view:expr, $bytes:expr) => {
        $view.map(|view| BiasView { data: vector($bytes), strides: view.strides })
    };
    (Scale $view:expr, $bytes:expr) => {
        $view.map(|view| ScaleView { data: vector($bytes), strides: view.strides })
    };
    (Positions $view:expr, $bytes:expr) => {
        $view.map(|view| match view {
            Positions::I32(_) => Positions::I32(vector($bytes)),
            Positions::I64(_) => Positions::I64(vector($bytes)),
        })
    };
    ($element:ident $view:expr, $bytes:expr) => {
        $view.map(|_| vector($bytes))
    };
}

/// A vector of bytes; nothing of the other kinds.
macro_rules! from_bytes {
    (Tensor $bytes:expr) => {
        TensorView::default()
    };
    (Tensors $bytes:expr) => {
        TensorList::default()
    };
    (Bias $bytes:expr) => {
        None
    };
    (Scale $bytes:expr) => {
        None
    };
    (Positions $bytes:expr) => {
        None
    };
    ($element:ident $bytes:expr) => {
        $bytes.map(vector)
    };
}

macro_rules! list {
    (Tensors $view:expr) => {
        Some($view)
    };
    ($kind:ident $view:expr) => {
        None
    };
}

macro_rules! reborrowed {
    (Tensor $view:expr) => {
        TensorViewMut { dtype: $view.dtype, data: &mut *$view.data }
    };
    (Scale $view:expr) => {
        $view.as_mut().map(|view| ScaleViewMut { data: &mut *view.data, strides: view.strides })
    };
    ($element:ident $view:expr) => {
        $view.as_deref_mut()
    };
}

macro_rules! define_views {
    ($($(#[$doc:meta])* $name:ident: $Name:ident, $with:ident,
        $(reads $in:ident)? $(writes $out:ident)? $(, or writes $computed:ident)?;)*) => {
        /// Everything an operation reads, borrowed. See [`Inputs`] for owned ones. A tensor without elements is absent.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[non_exhaustive]
        pub struct InputViews<'a> {
            $($(#[doc = concat!("See [`Operand::", stringify!($Name), "`].")] pub $name: view!($in 'a),)?)*
        }

        impl<'a> InputViews<'a> {
            $($(#[doc = concat!("Adds [`", stringify!($name), "`](Self::", stringify!($name), ").")]
            #[must_use]
            pub fn $with(mut self, $name: argument!($in 'a)) -> Self {
                self.$name = taken!($in $name);
                self
            })?)*

            /// The memory of an operand; `None` where it is absent, a list, or no input.
            pub fn slot(&self, operand: Operand) -> Option<Slot<'a>> {
                match operand {
                    $($(Operand::$Name => slot!($in self.$name),)?)*
                    _ => None,
                }
            }

            /// The tensors of an operand that is a list of them.
            pub fn list(&self, operand: Operand) -> Option<TensorList<'a>> {
                match operand {
                    $($(Operand::$Name => list!($in self.$name),)?)*
                    _ => None,
                }
            }

            /// The same operands in other memory, as `bytes` gives it for each that is there; without lists.
            ///
            /// # Panics
            ///
            /// When `bytes` gives a vector of numbers that is not aligned or not whole.
            pub fn in_other_memory<'b>(&self, bytes: impl Fn(Operand) -> &'b [u8]) -> InputViews<'b> {
                InputViews { $($($name: relocated!($in self.$name, bytes(Operand::$Name)),)?)* }
            }

            /// The vectors of numbers as `bytes` gives them, without tensors, bias and scales.
            pub(crate) fn vectors(bytes: impl Fn(Operand) -> Option<&'a [u8]>) -> Self {
                Self { $($($name: from_bytes!($in bytes(Operand::$Name)),)?)* }
            }
        }

        /// Everything an operation writes, borrowed. See [`Outputs`] for owned ones. A tensor without elements is absent.
        #[derive(Debug, Default, PartialEq)]
        #[non_exhaustive]
        pub struct OutputViews<'a> {
            $($(#[doc = concat!("See [`Operand::", stringify!($Name), "`].")] pub $name: view_mut!($out 'a),)? $(#[doc = concat!("See [`Operand::", stringify!($Name), "`].")] pub $name: view_mut!($computed 'a),)?)*
            /// Elements from the first of the key cache to the first of the value cache, where both lie in the memory of
            /// `key_cache` (K and V interleaved).
            pub value_offset: Option<usize>,
        }

        impl<'a> OutputViews<'a> {
            $($(#[doc = concat!("Adds [`", stringify!($name), "`](Self::", stringify!($name), ").")]
            #[must_use]
            pub fn $with(mut self, $name: argument_mut!($out 'a)) -> Self {
                self.$name = taken!($out $name);
                self
            })?
            $(#[doc = concat!("Adds [`", stringify!($name), "`](Self::", stringify!($name), "), to be computed.")]
            #[must_use]
            pub fn $with(mut self, $name: argument_mut!($computed 'a)) -> Self {
                self.$name = taken!($computed $name);
                self
            })?)*

            /// The memory of an operand; `None` where it is absent, or no output.
            pub fn slot(&self, operand: Operand) -> Option<Slot<'_>> {
                match operand {
                    Operand::ValueCache if self.value_offset.is_some() => slot!(Tensor self.value_cache_view()),
                    $($(Operand::$Name => slot!($out self.$name),)? $(Operand::$Name => slot!($computed self.$name),)?)*
                    _ => None,
                }
            }
        }

        impl OutputViews<'_> {
            /// The bytes of an operand, to be written to; `None` where it is absent, or no output.
            pub fn bytes_mut(&mut self, operand: Operand) -> Option<&mut [u8]> {
                match operand {
                    $($(Operand::$Name => slot_mut!($out self.$name),)? $(Operand::$Name => slot_mut!($computed self.$name),)?)*
                    _ => None,
                }
            }
        }

        impl<'a> From<&'a mut OutputViews<'_>> for OutputViews<'a> {
            fn from(views: &'a mut OutputViews<'_>) -> Self {
                OutputViews {
                    $($($name: reborrowed!($out views.$name),)? $($name: reborrowed!($computed views.$name),)?)*
                    value_offset: views.value_offset,
                }
            }
        }
    };
}

operands!(define_views);

/// Bytes as numbers. Where there are none, their address may be anything, like that of an empty `Vec<u8>`.
fn vector<T: FromBytes + Immutable>(bytes: &[u8]) -> &[T] {
    if bytes.is_empty() { &[] } else { <[T]>::ref_from_bytes(bytes).expect("whole numbers, aligned") }
}

impl<'a> InputViews<'a> {
    /// The query, key and value of attention, and nothing optional.
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
        Self { query: query.into(), key: key.into(), value: value.into(), ..Self::default() }
    }

    /// A copy that owns its memory.
    pub fn to_owned_inputs(&self) -> Inputs {
        Inputs::copied(self)
    }

    /// The bytes of an operand; `None` where it is absent, a list, or no input.
    pub fn bytes(&self, operand: Operand) -> Option<&'a [u8]> {
        self.slot(operand).map(|slot| slot.data)
    }

    /// The strides of bias and scales; those of one that is not there are 0.
    pub fn call_strides(&self) -> CallStrides {
        CallStrides {
            bias: self.bias.map_or_else(BiasStrides::default, |bias| bias.strides),
            scales: [self.q_scale, self.k_scale, self.v_scale]
                .map(|scale| scale.map_or(ScaleStrides::TENSOR, |scale| scale.strides)),
        }
    }

    /// The scales that are there.
    fn scales(&self) -> impl Iterator<Item = (Operand, ScaleView<'a>)> {
        let scales = [self.q_scale, self.k_scale, self.v_scale];
        Operand::SCALES.into_iter().zip(scales).filter_map(|(operand, scale)| Some((operand, scale?)))
    }

    /// Names every operand that is missing, unexpected, or of a wrong type or size, by the rows of an operation.
    pub(crate) fn check_rows<P>(&self, rows: &[Row<P>], problem: &P, errors: &mut Vec<TensorError>) {
        let strides = self.call_strides();
        let mut read = OperandSet::NONE;
        for row in rows.iter().filter(|row| row.access(problem) == Access::Read) {
            read = read.with(row.operand);
            match self.list(row.operand) {
                Some(list) => row.check_list(problem, list, errors),
                None => row.check(problem, self.slot(row.operand), strides, errors),
            }
        }
        let is_given =
            |operand: Operand| self.slot(operand).is_some() || self.list(operand).is_some_and(|list| !list.is_empty());
        let unexpected = Operand::ALL.iter().filter(|&&operand| !read.has(operand) && is_given(operand));
        errors.extend(unexpected.map(|operand| TensorError::Unexpected { tensor: operand.name() }));
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
        self.check_rows(Problem::OPERANDS, problem, &mut errors);
        // A vector that the problem does not have may have any size.
        let is_unsized = |error: &TensorError| {
            matches!(
                error,
                TensorError::Missing { .. } | TensorError::Unexpected { .. } | TensorError::WrongCount { .. }
            )
        };
        if !errors.iter().any(is_unsized) {
            self.check_sequences(problem, &mut errors);
        }
        // The scales in use are those of the keys in use, which lengths and tables must have been right to tell.
        if errors.is_empty() {
            for (operand, scale) in self.scales() {
                scale.check_numbers(operand, problem, self, |index| written(operand, index), &mut errors);
            }
        }
        Invalid::unless_empty(errors)
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
    /// The output of attention alone.
    pub fn new(output: impl Into<TensorViewMut<'a>>) -> Self {
        Self { output: output.into(), ..Self::default() }
    }

    /// Places the value cache in the memory of the key cache, `offset` elements past the first key (K and V interleaved).
    #[must_use]
    pub fn with_value_offset(mut self, offset: usize) -> Self {
        self.value_offset = Some(offset);
        self
    }

    /// The value cache, to be read; empty where it begins past the end of the key cache.
    pub fn value_cache_view(&self) -> TensorView<'_> {
        let Some(offset) = self.value_offset else { return self.value_cache.as_view() };
        let memory = self.key_cache.as_view();
        let start = offset.saturating_mul(memory.dtype.size_bytes()).min(memory.data.len());
        TensorView { data: &memory.data[start..], ..memory }
    }

    /// The strides of scales that are computed; those of one that is not there are 0.
    pub fn call_strides(&self) -> CallStrides {
        let strides =
            |scale: &Option<ScaleViewMut<'_>>| scale.as_ref().map_or(ScaleStrides::TENSOR, |scale| scale.strides);
        CallStrides {
            scales: [ScaleStrides::TENSOR, strides(&self.k_scale), strides(&self.v_scale)],
            ..CallStrides::NONE
        }
    }

    /// Names every operand that is missing, unexpected, or of a wrong type or size, by the rows of an operation.
    pub(crate) fn check_rows<P>(&self, rows: &[Row<P>], problem: &P, errors: &mut Vec<TensorError>) {
        check_outputs(rows, problem, |operand| self.slot(operand), self.call_strides(), errors);
    }

    /// Everything that is wrong with `problem`, or else with these outputs for it.
    pub fn validate(&self, problem: &Problem) -> Result<(), Invalid> {
        problem.validate()?;
        let mut errors = Vec::new();
        self.check_rows(Problem::OPERANDS, problem, &mut errors);
        Invalid::unless_empty(errors)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use zerocopy::IntoBytes;

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
