//! Rows of operands: what an operation makes of each operand, as data.

use zerocopy::{Immutable, IntoBytes};

use crate::{
    Access, CallStrides, DType, Operand, OperandSet, PositionType, Shape, SplitMix64, Strides, TensorError, TensorList,
    TensorView, Value,
};

/// Element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// A type of tensors.
    Float(DType),
    /// 32 bits, unsigned.
    U32,
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
}

impl ElementType {
    /// `f32`.
    pub const F32: Self = Self::Float(DType::F32);

    /// Bytes of an element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size_bytes(),
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

impl From<PositionType> for ElementType {
    fn from(positions: PositionType) -> Self {
        match positions {
            PositionType::I32 => Self::I32,
            PositionType::I64 => Self::I64,
        }
    }
}

/// Memory that an operand needs, in elements.
#[derive(Debug)]
pub enum Extent<P: 'static> {
    /// Rows of a shape, with strides of the problem.
    Tensor(fn(&P) -> (Shape, Strides)),
    /// Elements from the first to the last; `None` when the number does not fit.
    AtLeast(fn(&P) -> Option<usize>),
    /// A contiguous vector of no more elements than that.
    Exactly(fn(&P) -> usize),
    /// Elements from the first to the last, with strides of the call.
    Strided(fn(&P, CallStrides) -> Option<usize>),
}

/// The field of a problem that switches an operand on.
#[derive(Debug)]
pub struct Switch<P: 'static> {
    /// Name of the field, which is that of the feature that the operand brings.
    pub feature: &'static str,
    /// True if it is on.
    pub is_on: fn(&P) -> bool,
    /// Switches it on; a table gets one entry.
    pub switch_on: fn(&mut P),
    /// Copies it to the first problem.
    pub copy: fn(&mut P, &P),
}

/// Random numbers for an operand: problem, elements, generator.
pub type Fill<P> = fn(&P, usize, &mut SplitMix64) -> Value;

/// An operand of an operation, as its problems have it.
#[derive(Debug)]
pub struct Row<P: 'static> {
    /// The operand.
    pub operand: Operand,
    /// Its name in messages.
    pub name: &'static str,
    /// Memory that it needs.
    pub extent: Extent<P>,
    /// True if it may be absent although a problem has it.
    pub is_optional: bool,
    /// The field that switches it on; `None` where other fields decide.
    pub switch: Option<Switch<P>>,
    /// The stream of its random numbers.
    pub stream: Option<u64>,
    /// Its random numbers.
    pub fill: Option<Fill<P>>,
    element: fn(&P) -> ElementType,
    is_present: fn(&P) -> bool,
    is_written: fn(&P) -> bool,
    count: fn(&P) -> usize,
}

impl<P> Row<P> {
    /// An operand that every problem has: read or written as the table of operands says, of `f32`.
    pub(crate) const fn new(operand: Operand, extent: Extent<P>) -> Self {
        let is_written: fn(&P) -> bool = if matches!(operand.access(), Access::Write) { |_| true } else { |_| false };
        Self {
            operand,
            name: operand.name(),
            extent,
            is_optional: false,
            switch: None,
            stream: None,
            fill: None,
            element: |_| ElementType::F32,
            is_present: |_| true,
            is_written,
            count: |_| 1,
        }
    }

    /// A tensor with strides of the problem.
    pub(crate) const fn tensor(
        operand: Operand,
        element: fn(&P) -> ElementType,
        extent: fn(&P) -> (Shape, Strides),
    ) -> Self {
        Self { element, ..Self::new(operand, Extent::Tensor(extent)) }
    }

    /// A vector of exactly so many elements.
    pub(crate) const fn vector(operand: Operand, element: fn(&P) -> ElementType, elements: fn(&P) -> usize) -> Self {
        Self { element, ..Self::new(operand, Extent::Exactly(elements)) }
    }

    /// A tensor of at least so many elements.
    pub(crate) const fn at_least(
        operand: Operand,
        element: fn(&P) -> ElementType,
        elements: fn(&P) -> Option<usize>,
    ) -> Self {
        Self { element, ..Self::new(operand, Extent::AtLeast(elements)) }
    }

    /// The row of an operand that some problems have.
    pub(crate) const fn when(self, is_present: fn(&P) -> bool) -> Self {
        Self { is_present, ..self }
    }

    /// The row of an operand that may be absent although a problem has it.
    pub(crate) const fn optional(self) -> Self {
        Self { is_optional: true, ..self }
    }

    /// The row of an operand that some problems compute.
    pub(crate) const fn written_if(self, is_written: fn(&P) -> bool) -> Self {
        Self { is_written, ..self }
    }

    /// The row of a list of tensors.
    pub(crate) const fn list(self, count: fn(&P) -> usize) -> Self {
        Self { count, ..self }
    }

    /// The row with a field that switches it on.
    pub(crate) const fn switched(self, switch: Switch<P>) -> Self {
        Self { is_present: switch.is_on, switch: Some(switch), ..self }
    }

    /// The row with a stream of random numbers.
    pub(crate) const fn stream(self, stream: u64) -> Self {
        Self { stream: Some(stream), ..self }
    }

    /// The row with random numbers from a stream.
    pub(crate) const fn filled(self, stream: u64, fill: Fill<P>) -> Self {
        Self { fill: Some(fill), ..self.stream(stream) }
    }

    /// True if a problem has it.
    pub fn is_present(&self, problem: &P) -> bool {
        (self.is_present)(problem)
    }

    /// Access of kernels.
    pub fn access(&self, problem: &P) -> Access {
        if (self.is_written)(problem) { Access::Write } else { Access::Read }
    }

    /// Element type.
    pub fn element(&self, problem: &P) -> ElementType {
        (self.element)(problem)
    }

    /// Elements from the first to the last, gaps included; `None` when the number does not fit.
    pub fn elements(&self, problem: &P, strides: CallStrides) -> Option<usize> {
        match self.extent {
            Extent::Tensor(extent) => {
                let (shape, strides) = extent(problem);
                strides.extent(shape)
            }
            Extent::AtLeast(elements) => elements(problem),
            Extent::Exactly(elements) => Some(elements(problem)),
            Extent::Strided(elements) => elements(problem, strides),
        }
    }

    /// Names what is wrong with a list of tensors.
    pub(crate) fn check_list(&self, problem: &P, list: TensorList<'_>, errors: &mut Vec<TensorError>) {
        let (tensor, actual) = (self.name, list.len());
        let needed = if self.is_present(problem) { (self.count)(problem) } else { 0 };
        if actual != needed {
            errors.push(TensorError::WrongCount { tensor, actual, needed });
            return;
        }
        for TensorView { dtype, data } in list.iter() {
            let slot = Slot { element: dtype.into(), data };
            self.check(problem, Some(slot), CallStrides::NONE, errors);
        }
    }

    /// Names what is wrong with the memory of an operand.
    pub(crate) fn check(
        &self,
        problem: &P,
        slot: Option<Slot<'_>>,
        strides: CallStrides,
        errors: &mut Vec<TensorError>,
    ) {
        self.check_named(self.name, problem, slot, strides, errors);
    }

    /// [`check`](Self::check) under another name.
    pub(crate) fn check_named(
        &self,
        tensor: &'static str,
        problem: &P,
        slot: Option<Slot<'_>>,
        strides: CallStrides,
        errors: &mut Vec<TensorError>,
    ) {
        match slot {
            Some(_) if !self.is_present(problem) => errors.push(TensorError::Unexpected { tensor }),
            Some(Slot { element, data }) => {
                match (element, self.element(problem)) {
                    (ElementType::Float(actual), ElementType::Float(expected)) if actual != expected => {
                        errors.push(TensorError::DType { tensor, actual, expected });
                    }
                    (actual, expected) if actual != expected => {
                        let expected = if expected == ElementType::I32 { PositionType::I32 } else { PositionType::I64 };
                        errors.push(TensorError::PositionType { expected });
                    }
                    _ => {}
                }
                let actual = data.len() / element.size_bytes();
                let needed = self.elements(problem, strides).unwrap_or(usize::MAX);
                match self.extent {
                    Extent::Exactly(_) if actual != needed => {
                        errors.push(TensorError::WrongCount { tensor, actual, needed });
                    }
                    _ if actual < needed => errors.push(TensorError::TooShort { tensor, actual, needed }),
                    _ => {}
                }
            }
            None if self.is_optional || !self.is_present(problem) => {}
            None => {
                let needed = self.elements(problem, strides).unwrap_or(usize::MAX);
                match self.extent {
                    // Memory without elements is no memory.
                    Extent::Tensor(_) | Extent::AtLeast(_) if needed == 0 => {}
                    Extent::Tensor(_) if self.switch.is_none() => {
                        errors.push(TensorError::TooShort { tensor, actual: 0, needed });
                    }
                    _ => errors.push(TensorError::Missing { tensor }),
                }
            }
        }
    }
}

/// Names every output that is missing, unexpected, or of a wrong type or size, by the rows of an operation.
pub(crate) fn check_outputs<'a, P>(
    rows: &[Row<P>],
    problem: &P,
    slot: impl Fn(Operand) -> Option<Slot<'a>>,
    strides: CallStrides,
    errors: &mut Vec<TensorError>,
) {
    let mut written = OperandSet::NONE;
    for row in rows.iter().filter(|row| row.access(problem) == Access::Write) {
        written = written.with(row.operand);
        row.check_named(row.operand.output_name(), problem, slot(row.operand), strides, errors);
    }
    let unexpected = Operand::ALL.iter().filter(|&&operand| !written.has(operand) && slot(operand).is_some());
    errors.extend(unexpected.map(|operand| TensorError::Unexpected { tensor: operand.output_name() }));
}

/// The memory of an operand on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot<'a> {
    /// Element type.
    pub element: ElementType,
    /// The bytes.
    pub data: &'a [u8],
}

impl<'a> Slot<'a> {
    /// The memory of numbers.
    pub(crate) fn of<T: Number>(numbers: &'a [T]) -> Self {
        Self { element: T::ELEMENT, data: numbers.as_bytes() }
    }
}

/// A number of a vector.
pub(crate) trait Number: IntoBytes + Immutable {
    const ELEMENT: ElementType;
}

macro_rules! numbers {
    ($($number:ident: $element:expr;)*) => {
        $(impl Number for $number {
            const ELEMENT: ElementType = $element;
        })*
    };
}

numbers! {
    f32: ElementType::F32;
    u32: ElementType::U32;
    i32: ElementType::I32;
    i64: ElementType::I64;
}
