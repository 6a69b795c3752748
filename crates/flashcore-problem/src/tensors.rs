//! The numbers of a problem: its inputs and what a backend answers.

use crate::views::validate_outputs;
use crate::{
    BiasView, DType, HostElement, InputViews, Invalid, Operand, OutputViews, Problem, Scale, ScaleView, Shape,
    SplitMix64, Strides, TensorView,
};

/// Elements of one type as little-endian bytes, in the storage order of its strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Type of the elements.
    pub dtype: DType,
    /// The bytes, those between rows of a strided tensor included.
    pub data: Vec<u8>,
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

macro_rules! define_inputs {
    (
        tensors { $($tensors:tt)* }
        outputs { $($outputs:tt)* }
        inputs { $($(#[$doc:meta])* $input:ident: $Input:ident, $type:ty, $extent:expr, $with:ident, $stream:literal, $fill:ident,
            $(#[$switch_doc:meta])* $switch:ident: $switch_type:ty, $with_switch:ident;)* }
        strided { $($strided:tt)* }
        scales { $($(#[$scale_doc:meta])* $scale:ident: $Scale:ident, $with_scale:ident, $scale_stream:literal,
            $(#[$scale_switch_doc:meta])* $scale_switch:ident: $scale_switch_type:ty, $with_scale_switch:ident;)* }
    ) => {
        /// Everything a backend reads.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Inputs {
            /// The query, `query_heads` by `query_length` by `head_dim`.
            pub query: Tensor,
            /// The key, `key_heads` by `key_length` by `head_dim`.
            pub key: Tensor,
            /// The value, `key_heads` by `key_length` by `value_dim`.
            pub value: Tensor,
            $($(#[$doc])* pub $input: Option<Vec<$type>>,)*
            /// The bias that is added to the scores.
            pub bias: Option<Bias>,
            $($(#[$scale_doc])* pub $scale: Option<Scale>,)*
        }

        impl Inputs {
            /// Query, key and value, and nothing optional.
            pub const fn new(query: Tensor, key: Tensor, value: Tensor) -> Self {
                Self { query, key, value, $($input: None,)* bias: None, $($scale: None,)* }
            }

            /// The same, borrowed.
            pub fn views(&self) -> InputViews<'_> {
                InputViews {
                    query: (&self.query).into(),
                    key: (&self.key).into(),
                    value: (&self.value).into(),
                    $($input: self.$input.as_deref(),)*
                    bias: self.bias.as_ref().map(|bias| BiasView { data: &bias.data, strides: bias.strides }),
                    $($scale: self.$scale.as_ref().map(Scale::view),)*
                }
            }

            /// A copy of borrowed inputs.
            pub(crate) fn copied(views: &InputViews<'_>) -> Self {
                let tensor = |view: TensorView<'_>| Tensor { dtype: view.dtype, data: view.data.to_vec() };
                Self {
                    query: tensor(views.query),
                    key: tensor(views.key),
                    value: tensor(views.value),
                    $($input: views.$input.map(<[$type]>::to_vec),)*
                    bias: views.bias.map(|bias| Bias { data: bias.data.to_vec(), strides: bias.strides }),
                    $($scale: views.$scale.map(ScaleView::to_owned_scale),)*
                }
            }

            /// Fills every vector that the problem has from its own stream of random numbers.
            pub(crate) fn fill_vectors(&mut self, problem: &Problem, seed: u64) {
                $(if Operand::$Input.is_present(problem) {
                    let mut random = SplitMix64::stream(seed, $stream);
                    let elements = Operand::$Input.elements(problem).unwrap_or(0);
                    self.$input = Some(crate::verify::random::$fill(problem, elements, &mut random));
                })*
            }

            /// Fills every scale that the problem has from its own stream of random numbers; lengths and tables are there.
            pub(crate) fn fill_scales(&mut self, problem: &Problem, seed: u64) {
                $(if Operand::$Scale.is_present(problem) {
                    let mut random = SplitMix64::stream(seed, $scale_stream);
                    self.$scale = Some(Scale::random(Operand::$Scale, problem, &self.views(), &mut random));
                })*
            }
        }
    };
}

operands!(define_inputs);

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

/// Everything a backend writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// The output, `query_heads` by `query_length` by `value_dim`.
    pub output: Tensor,
    /// The log-sum-exp of each row, contiguous `[batch, query head, query row]`, where the problem wants it.
    pub lse: Option<Vec<f32>>,
}

impl Outputs {
    /// Outputs of the right size in which every element, and all storage between them, is poison.
    ///
    /// A backend must replace every element and leave everything else; the gate checks both.
    ///
    /// # Panics
    ///
    /// When `problem` does not validate.
    pub fn poisoned(problem: &Problem) -> Self {
        assert_eq!(problem.validate(), Ok(()), "outputs are made for valid problems");
        let extent = problem.strides().output.extent(problem.output_shape()).unwrap_or(0);
        let poison = f32::from_bits(DType::F32.poison() as u32);
        let rows = Operand::Lse.elements(problem).unwrap_or(0);
        Self { output: Tensor::poisoned(problem.dtypes().output, extent), lse: problem.lse.then(|| vec![poison; rows]) }
    }

    /// The same, borrowed.
    pub fn views_mut(&mut self) -> OutputViews<'_> {
        OutputViews { output: (&mut self.output).into(), lse: self.lse.as_deref_mut() }
    }

    /// Everything that is wrong with `problem`, or else with these outputs for it.
    pub fn validate(&self, problem: &Problem) -> Result<(), Invalid> {
        validate_outputs(problem, (&self.output).into(), self.lse.as_deref())
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
