//! The numbers of a problem: its inputs and what a backend answers.

use crate::rows::check_outputs;
use crate::views::slot;
use crate::{
    Access, BiasView, CallStrides, DType, ElementType, HostElement, InputViews, Invalid, Operand, OutputViews,
    Positions, Problem, Row, Scale, ScaleView, Shape, Slot, SplitMix64, Strides, TensorView,
};

/// Elements of one type as little-endian bytes, in the storage order of its strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Type of the elements.
    pub dtype: DType,
    /// The bytes, those between rows of a strided tensor included.
    pub data: Vec<u8>,
}

impl Default for Tensor {
    fn default() -> Self {
        Self { dtype: DType::F32, data: Vec::new() }
    }
}

impl Tensor {
    /// `elements` zeros.
    ///
    /// # Panics
    ///
    /// When they have more bytes than the address space.
    pub fn zeros(dtype: DType, elements: usize) -> Self {
        Self { dtype, data: vec![0; elements * dtype.size_bytes()] }
    }

    /// `elements` times the [poison](DType::poison) of the type.
    ///
    /// # Panics
    ///
    /// When they have more bytes than the address space.
    pub fn poisoned(dtype: DType, elements: usize) -> Self {
        let pattern = &dtype.poison().to_le_bytes()[..dtype.size_bytes()];
        Self { dtype, data: pattern.repeat(elements) }
    }

    /// `values`, rounded to the type.
    pub fn from_values(dtype: DType, values: &[f64]) -> Self {
        let mut tensor = Self::zeros(dtype, values.len());
        for (index, &value) in values.iter().enumerate() {
            tensor.set(index, value);
        }
        tensor
    }

    /// The elements as numbers of their Rust type.
    ///
    /// # Panics
    ///
    /// When the type is another.
    pub fn to_elements<T: HostElement>(&self) -> Vec<T> {
        assert_eq!(self.dtype, T::DTYPE, "elements have the type of the tensor");
        let size = size_of::<T>();
        let element = |bytes: &[u8]| T::read_from_bytes(bytes).expect("as many bytes as an element has");
        self.data.chunks_exact(size).map(element).collect()
    }

    /// Elements of the tensor, those between rows included.
    pub fn len(&self) -> usize {
        self.data.len() / self.dtype.size_bytes()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The element at `index` of the storage.
    ///
    /// # Panics
    ///
    /// When `index` is not below [`len`](Self::len).
    pub fn get(&self, index: usize) -> f64 {
        self.dtype.decode(self.element(index))
    }

    /// Replaces the element at `index` of the storage by `value`, rounded to the type.
    ///
    /// # Panics
    ///
    /// When `index` is not below [`len`](Self::len).
    pub fn set(&mut self, index: usize, value: f64) {
        let size = self.dtype.size_bytes();
        self.dtype.encode(value, &mut self.data[index * size..(index + 1) * size]);
    }

    /// True if the element at `index` of the storage holds the poison.
    ///
    /// # Panics
    ///
    /// When `index` is not below [`len`](Self::len).
    pub fn is_poisoned(&self, index: usize) -> bool {
        self.dtype.bits(self.element(index)) == self.dtype.poison()
    }

    fn element(&self, index: usize) -> &[u8] {
        let size = self.dtype.size_bytes();
        &self.data[index * size..(index + 1) * size]
    }

    /// The elements as `f64` in the order of a contiguous `[batch, head, row, column]` tensor.
    ///
    /// # Panics
    ///
    /// When the tensor is shorter than the extent of `shape` with `strides`.
    pub fn dense(&self, shape: Shape, strides: Strides) -> Vec<f64> {
        let mut values = Vec::with_capacity(shape.elements().unwrap_or(0));
        for (batch, head, row) in shape.each_row() {
            let start = strides.row_start(batch, head, row);
            values.extend((start..start + shape.columns).map(|index| self.get(index)));
        }
        values
    }
}

/// A term that is added to the scores.
///
/// A bias of minus infinity gives its key no weight, and a row of nothing else counts as attending no key; unlike a
/// [`Mask`](crate::Mask), it does not hide a NaN in that key or value.
#[derive(Clone, Debug, PartialEq)]
pub struct Bias {
    /// The terms.
    pub data: Vec<f32>,
    /// Where they lie.
    pub strides: BiasStrides,
}

/// Distances in elements between neighbours of each dimension of a [`Bias`]; 0 repeats one element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BiasStrides {
    /// From one batch to the next.
    pub batch: usize,
    /// From one query head to the next.
    pub head: usize,
    /// From one query row to the next.
    pub row: usize,
    /// From one key to the next.
    pub key: usize,
}

impl BiasStrides {
    /// The index of a term. Saturates; that of a bias that validated cannot overflow.
    pub fn index(self, batch: usize, head: usize, row: usize, key: usize) -> usize {
        let distances = [(batch, self.batch), (head, self.head), (row, self.row), (key, self.key)];
        distances.iter().fold(0, |index: usize, &(count, stride)| index.saturating_add(count.saturating_mul(stride)))
    }

    /// Elements from the first to the last, both included, or `None` when the number does not fit.
    pub fn extent(self, problem: &Problem) -> Option<usize> {
        let sizes = [
            (self.batch, problem.batch),
            (self.head, problem.query_heads),
            (self.row, problem.query_length),
            (self.key, problem.key_length),
        ];
        if sizes.iter().any(|&(_, size)| size == 0) {
            return Some(0);
        }
        sizes.iter().try_fold(1_usize, |extent, &(stride, size)| extent.checked_add(stride.checked_mul(size - 1)?))
    }
}

/// Owned numbers of a vector.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `f32`.
    F32(Vec<f32>),
    /// `u32`.
    U32(Vec<u32>),
    /// `i32`.
    I32(Vec<i32>),
}

macro_rules! values {
    ($($variant:ident($number:ident);)*) => {
        $(impl From<Vec<$number>> for Value {
            fn from(numbers: Vec<$number>) -> Self {
                Self::$variant(numbers)
            }
        })*
    };
}

values! {
    F32(f32);
    U32(u32);
    I32(i32);
}

/// The owner of a kind of operand.
macro_rules! owned {
    (Tensor) => { Tensor };
    (Tensors) => { Vec<Tensor> };
    (Bias) => { Option<Bias> };
    (Scale) => { Option<Scale> };
    (Positions) => { Option<PositionNumbers> };
    ($element:ident) => { Option<Vec<$element>> };
}

macro_rules! borrowed {
    (Tensor $owned:expr) => {
        (&$owned).into()
    };
    (Tensors $owned:expr) => {
        (&$owned).into()
    };
    (Bias $owned:expr) => {
        $owned.as_ref().map(|bias| BiasView { data: &bias.data, strides: bias.strides })
    };
    (Scale $owned:expr) => {
        $owned.as_ref().map(Scale::view)
    };
    (Positions $owned:expr) => {
        $owned.as_ref().map(PositionNumbers::view)
    };
    ($element:ident $owned:expr) => {
        $owned.as_deref()
    };
}

macro_rules! copied {
    (Tensor $view:expr) => {
        $view.to_owned_tensor()
    };
    (Tensors $view:expr) => {
        $view.iter().map(TensorView::to_owned_tensor).collect()
    };
    (Bias $view:expr) => {
        $view.map(|bias| Bias { data: bias.data.to_vec(), strides: bias.strides })
    };
    (Scale $view:expr) => {
        $view.map(ScaleView::to_owned_scale)
    };
    (Positions $view:expr) => {
        $view.map(Positions::to_owned_numbers)
    };
    ($element:ident $view:expr) => {
        $view.map(<[$element]>::to_vec)
    };
}

/// Stores random numbers.
macro_rules! filled {
    (f32 $owned:expr, $value:expr) => {
        if let Value::F32(numbers) = $value {
            $owned = Some(numbers)
        }
    };
    (u32 $owned:expr, $value:expr) => {
        if let Value::U32(numbers) = $value {
            $owned = Some(numbers)
        }
    };
    (i32 $owned:expr, $value:expr) => {
        if let Value::I32(numbers) = $value {
            $owned = Some(numbers)
        }
    };
    ($kind:ident $owned:expr, $value:expr) => {
        unreachable!("rows of vectors alone have random numbers: {:?}", $value)
    };
}

macro_rules! borrowed_mut {
    (Tensor $owned:expr) => {
        (&mut $owned).into()
    };
    (Scale $owned:expr) => {
        $owned.as_mut().map(Scale::view_mut)
    };
    ($element:ident $owned:expr) => {
        $owned.as_deref_mut()
    };
}

macro_rules! poisoned {
    (Tensor $dtype:expr, $elements:expr) => {
        Tensor::poisoned($dtype, $elements)
    };
    ($element:ident $dtype:expr, $elements:expr) => {
        Some(vec![f32::from_bits(DType::F32.poison() as u32); $elements])
    };
}

macro_rules! define_tensors {
    ($($(#[$doc:meta])* $name:ident: $Name:ident, $with:ident,
        $(reads $in:ident)? $(writes $out:ident)? $(, or writes $computed:ident)?;)*) => {
        /// Everything an operation reads.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Inputs {
            $($(#[doc = concat!("See [`Operand::", stringify!($Name), "`].")] pub $name: owned!($in),)?)*
        }

        impl Inputs {
            /// The same, borrowed.
            pub fn views(&self) -> InputViews<'_> {
                let mut views = InputViews::default();
                $($(views.$name = borrowed!($in self.$name);)?)*
                views
            }

            /// A copy of borrowed inputs.
            pub(crate) fn copied(views: &InputViews<'_>) -> Self {
                Self { $($($name: copied!($in views.$name),)?)* }
            }

            /// Sets a vector of numbers.
            fn set(&mut self, operand: Operand, value: Value) {
                match operand {
                    $($(Operand::$Name => filled!($in self.$name, value),)?)*
                    other => unreachable!("{} is no input", other.name()),
                }
            }
        }

        /// Everything an operation writes.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Outputs {
            $($(#[doc = concat!("See [`Operand::", stringify!($Name), "`].")] pub $name: owned!($out),)? $(#[doc = concat!("See [`Operand::", stringify!($Name), "`].")] pub $name: owned!($computed),)?)*
        }

        impl Outputs {
            /// The same, borrowed.
            pub fn views_mut(&mut self) -> OutputViews<'_> {
                let mut views = OutputViews::default();
                $($(views.$name = borrowed_mut!($out self.$name);)? $(views.$name = borrowed_mut!($computed self.$name);)?)*
                views
            }

            /// The memory of an operand; `None` where it is absent, or no output.
            pub fn slot(&self, operand: Operand) -> Option<Slot<'_>> {
                match operand {
                    $($(Operand::$Name => slot!($out self.$name),)? $(Operand::$Name => slot!($computed self.$name),)?)*
                    _ => None,
                }
            }

            fn poison(&mut self, operand: Operand, dtype: DType, elements: usize) {
                match operand {
                    $($(Operand::$Name => self.$name = poisoned!($out dtype, elements),)?)*
                    other => unreachable!("{} has no extent that the problem knows", other.name()),
                }
            }
        }
    };
}

operands!(define_tensors);

impl Inputs {
    /// The query, key and value of attention, and nothing optional.
    pub fn new(query: Tensor, key: Tensor, value: Tensor) -> Self {
        Self { query, key, value, ..Self::default() }
    }

    /// Fills every vector that the problem has from its own stream of random numbers.
    pub(crate) fn fill_vectors(&mut self, problem: &Problem, seed: u64) {
        for row in Problem::OPERANDS.iter().filter(|row| row.is_present(problem)) {
            if let Some((stream, fill)) = row.stream.zip(row.fill) {
                let elements = row.elements(problem, CallStrides::NONE).unwrap_or(0);
                self.set(row.operand, fill(problem, elements, &mut SplitMix64::stream(seed, stream)));
            }
        }
    }

    /// Fills every scale that the problem has from its own stream of random numbers; lengths and tables are there.
    pub(crate) fn fill_scales(&mut self, problem: &Problem, seed: u64) {
        for operand in Operand::SCALES.into_iter().filter(|operand| operand.is_present(problem)) {
            let stream = operand.row().and_then(|row| row.stream).expect("scales have streams");
            let scale = Scale::random(operand, problem, &self.views(), &mut SplitMix64::stream(seed, stream));
            match operand {
                Operand::QScale => self.q_scale = Some(scale),
                Operand::KScale => self.k_scale = Some(scale),
                _ => self.v_scale = Some(scale),
            }
        }
    }
}

impl Inputs {
    /// Everything that is wrong with `problem`, or else with these inputs for it.
    pub fn validate(&self, problem: &Problem) -> Result<(), Invalid> {
        self.views().validate(problem)
    }

    /// Number of keys of `batch`: those of the problem where there is no length for it.
    pub fn key_length(&self, problem: &Problem, batch: usize) -> usize {
        self.views().key_length(problem, batch)
    }
}

impl Outputs {
    /// Outputs of attention of the right size in which every element, and all storage between them, is poison.
    ///
    /// A backend must replace every element and leave everything else; the gate checks both.
    ///
    /// # Panics
    ///
    /// When `problem` does not validate.
    pub fn poisoned(problem: &Problem) -> Self {
        assert_eq!(problem.validate(), Ok(()), "outputs are made for valid problems");
        Self::poisoned_rows(Problem::OPERANDS, problem)
    }

    /// The outputs of an operation full of poison, without scales that it computes.
    pub(crate) fn poisoned_rows<P>(rows: &[Row<P>], problem: &P) -> Self {
        let mut outputs = Self::default();
        let is_written = |row: &&Row<P>| row.is_present(problem) && row.access(problem) == Access::Write;
        for row in rows.iter().filter(is_written).filter(|row| !row.operand.is_scale()) {
            let elements = row.elements(problem, CallStrides::NONE).unwrap_or(0);
            if let ElementType::Float(dtype) = row.element(problem) {
                outputs.poison(row.operand, dtype, elements);
            }
        }
        outputs
    }

    /// Everything that is wrong with `problem`, or else with these outputs for it.
    pub fn validate(&self, problem: &Problem) -> Result<(), Invalid> {
        problem.validate()?;
        let mut errors = Vec::new();
        check_outputs(Problem::OPERANDS, problem, |operand| self.slot(operand), CallStrides::NONE, &mut errors);
        Invalid::unless_empty(errors)
    }
}

/// Owned positions of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PositionNumbers {
    /// In 32 bits.
    I32(Vec<i32>),
    /// In 64 bits.
    I64(Vec<i64>),
}

impl PositionNumbers {
    /// The same, borrowed.
    pub fn view(&self) -> Positions<'_> {
        match self {
            Self::I32(positions) => Positions::I32(positions),
            Self::I64(positions) => Positions::I64(positions),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, TensorError};

    fn check(change: impl FnOnce(&mut Problem, &mut Inputs), expected: &[TensorError]) {
        let mut problem = Problem::new(2, 4, 5, 8, DType::F16);
        problem.alibi = true;
        problem.bias = true;
        problem.seqused_k = true;
        let mut inputs = Inputs::random(&problem, 1);
        change(&mut problem, &mut inputs);
        let actual = match inputs.validate(&problem) {
            Ok(()) => Vec::new(),
            Err(Invalid::Tensors(errors)) => errors,
            Err(Invalid::Problem(errors)) => unreachable!("{errors:?}"),
        };
        assert_eq!(actual, expected);
    }

    #[test]
    fn wrong_tensors_are_named() {
        check(|_, _| {}, &[]);
        check(
            |_, inputs| inputs.key = Tensor::zeros(DType::Bf16, 319),
            &[
                TensorError::DType { tensor: "key", actual: DType::Bf16, expected: DType::F16 },
                TensorError::TooShort { tensor: "key", actual: 319, needed: 320 },
            ],
        );
        check(
            |problem, inputs| {
                problem.sinks = true;
                problem.alibi = false;
                inputs.seqused_k = Some(vec![5]);
            },
            &[
                TensorError::WrongCount { tensor: "seqused_k", actual: 1, needed: 2 },
                TensorError::Unexpected { tensor: "alibi_slopes" },
                TensorError::Missing { tensor: "sinks" },
            ],
        );
        check(
            |_, inputs| {
                inputs.seqused_k = Some(vec![5, 6]);
                inputs.bias =
                    Some(Bias { data: vec![0.0; 24], strides: BiasStrides { batch: 0, head: 0, row: 5, key: 1 } });
            },
            &[
                TensorError::TooShort { tensor: "bias", actual: 24, needed: 25 },
                TensorError::KeyLength { batch: 1, length: 6, key_length: 5 },
            ],
        );
    }

    #[test]
    fn dense_reads_through_any_layout() {
        let mut problem = Problem::new(2, 3, 5, 4, DType::F32);
        let contiguous = Inputs::random(&problem, 3);
        let expected = contiguous.query.dense(problem.query_shape(), problem.strides().query);
        for layout in [Layout::Bshd, Layout::PackedQkv] {
            problem.layout = layout;
            let inputs = Inputs::random(&problem, 3);
            assert_eq!(inputs.query.dense(problem.query_shape(), problem.strides().query), expected);
        }
    }
}
