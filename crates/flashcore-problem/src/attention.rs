//! The operands of attention, as its problems have them.

use crate::verify::random;
use crate::{
    Access, CallStrides, DType, ElementType, Extent, Operand, PagedKv, Paging, Problem, Row, Shape, Strides, Switch,
    TotalRows,
};

/// The type of a field that switches an operand on.
trait SwitchField {
    fn is_on(&self) -> bool;
    fn switch_on(&mut self);
}

impl SwitchField for bool {
    fn is_on(&self) -> bool {
        *self
    }

    fn switch_on(&mut self) {
        *self = true;
    }
}

impl SwitchField for usize {
    fn is_on(&self) -> bool {
        *self > 0
    }

    fn switch_on(&mut self) {
        *self = 1;
    }
}

impl SwitchField for TotalRows {
    fn is_on(&self) -> bool {
        self.is_some()
    }

    fn switch_on(&mut self) {
        *self = Some(1);
    }
}

impl SwitchField for Paging {
    fn is_on(&self) -> bool {
        self.is_some()
    }

    fn switch_on(&mut self) {
        *self = Some(PagedKv::new(1, 1, 1));
    }
}

macro_rules! switch {
    ($field:ident) => {
        Switch {
            feature: stringify!($field),
            is_on: |problem: &Problem| problem.$field.is_on(),
            switch_on: |problem: &mut Problem| problem.$field.switch_on(),
            copy: |to: &mut Problem, from: &Problem| to.$field = from.$field,
        }
    };
}

const U32: fn(&Problem) -> ElementType = |_| ElementType::U32;
const I32: fn(&Problem) -> ElementType = |_| ElementType::I32;
const F32: fn(&Problem) -> ElementType = |_| ElementType::F32;
const BATCH: fn(&Problem) -> usize = |problem| problem.batch;
const OFFSETS: fn(&Problem) -> usize = |problem| problem.batch.saturating_add(1);
const QUERY_HEADS: fn(&Problem) -> usize = |problem| problem.query_heads;

/// A scale, whose strides come with each call.
const fn scale(operand: Operand, extent: fn(&Problem, CallStrides) -> Option<usize>) -> Row<Problem> {
    Row::new(operand, Extent::Strided(extent))
}

/// Rows in the order of the table of operands, with streams of random numbers that never change: seeds of records depend
/// on them.
const ROWS: &[Row<Problem>] = &[
    Row::tensor(
        Operand::Query,
        |problem: &Problem| problem.dtypes().query.into(),
        |problem| (problem.query_shape(), problem.strides().query),
    )
    .stream(random::QUERY),
    Row::tensor(
        Operand::Key,
        |problem: &Problem| problem.dtypes().key_value.into(),
        |problem| (problem.key_shape(), problem.strides().key),
    )
    .stream(random::KEY),
    Row::tensor(
        Operand::Value,
        |problem: &Problem| problem.dtypes().key_value.into(),
        |problem| (problem.value_shape(), problem.strides().value),
    )
    .stream(random::VALUE),
    Row::tensor(
        Operand::Output,
        |problem: &Problem| problem.dtypes().output.into(),
        |problem| (problem.output_shape(), problem.strides().output),
    ),
    Row::vector(Operand::Lse, F32, |problem| {
        let Shape { batch, heads, rows, .. } = problem.output_shape();
        batch.saturating_mul(heads).saturating_mul(rows)
    })
    .switched(switch!(lse)),
    Row::vector(Operand::CuSeqlensQ, U32, OFFSETS).switched(switch!(total_q)).filled(9, random::cu_seqlens_q),
    Row::vector(Operand::CuSeqlensK, U32, OFFSETS).switched(switch!(total_k)).filled(10, random::cu_seqlens_k),
    Row::vector(Operand::SequsedQ, U32, BATCH).switched(switch!(seqused_q)).filled(11, random::seqused_q),
    Row::vector(Operand::SequsedK, U32, BATCH).switched(switch!(seqused_k)).filled(5, random::seqused_k),
    Row::vector(Operand::LeftpadK, U32, BATCH).switched(switch!(leftpad_k)).filled(12, random::leftpad_k),
    Row::vector(Operand::KvBatchIdx, U32, BATCH).switched(switch!(kv_batch)).filled(13, random::kv_batch_idx),
    Row::vector(Operand::PageTable, I32, Problem::table_entries)
        .switched(switch!(paged))
        .filled(14, |problem, entries, random| random::page_table(problem, entries, random).into()),
    Row::vector(Operand::AlibiSlopes, F32, QUERY_HEADS).switched(switch!(alibi)).filled(8, random::alibi_slopes),
    Row::vector(Operand::Sinks, F32, QUERY_HEADS).switched(switch!(sinks)).filled(4, random::per_head),
    Row::vector(Operand::AuxF32, F32, |problem| problem.aux_f32).switched(switch!(aux_f32)).filled(6, random::aux_f32),
    Row::vector(Operand::AuxI32, I32, |problem| problem.aux_i32).switched(switch!(aux_i32)).filled(7, random::aux_i32),
    Row::new(Operand::Bias, Extent::Strided(|problem, strides| strides.bias.extent(problem)))
        .switched(switch!(bias))
        .stream(random::BIAS),
    scale(Operand::QScale, |problem, strides| strides.scales[0].extent(Operand::QScale, problem))
        .switched(switch!(q_scale))
        .stream(15),
    scale(Operand::KScale, |problem, strides| strides.scales[1].extent(Operand::KScale, problem))
        .switched(switch!(k_scale))
        .stream(16),
    scale(Operand::VScale, |problem, strides| strides.scales[2].extent(Operand::VScale, problem))
        .switched(switch!(v_scale))
        .stream(17),
];

impl Problem {
    /// The operands of attention: the first of all, its scales last.
    pub const OPERANDS: &'static [Row<Self>] = ROWS;

    /// The problem with the optional operands of another switched on, vectors in the sizes of the other, the
    /// log-sum-exp in its form, key, value and output of its types.
    #[must_use]
    pub fn with_operands_of(mut self, other: &Self) -> Self {
        self.lse_form = other.lse_form;
        (self.kv_dtype, self.out_dtype) = (other.kv_dtype, other.out_dtype);
        Self::OPERANDS.iter().filter_map(|row| row.switch.as_ref()).for_each(|switch| (switch.copy)(&mut self, other));
        self
    }
}

/// Of an operand as attention has it.
impl Operand {
    /// Its row; `None` for an operand of other operations.
    pub fn row(self) -> Option<&'static Row<Problem>> {
        Problem::OPERANDS.get(self as usize)
    }

    /// Name of its switch in [`Problem`], which is that of the feature that it brings.
    pub fn feature(self) -> &'static str {
        self.row().and_then(|row| row.switch.as_ref()).map_or(self.name(), |switch| switch.feature)
    }

    /// Switches it on in a problem; a table gets one entry.
    pub fn switch_on(self, problem: &mut Problem) {
        if let Some(switch) = self.row().and_then(|row| row.switch.as_ref()) {
            (switch.switch_on)(problem);
        }
    }

    /// True if a problem has it.
    pub fn is_present(self, problem: &Problem) -> bool {
        self.row().is_some_and(|row| row.is_present(problem))
    }

    /// Shape and strides of an operand that has the layout of the problem: query, key, value and output.
    pub fn tensor(self, problem: &Problem) -> Option<(Shape, Strides)> {
        match self.row()?.extent {
            Extent::Tensor(extent) => Some(extent(problem)),
            _ => None,
        }
    }

    /// Elements of a contiguous vector of numbers; `None` for the operands with strides.
    pub fn elements(self, problem: &Problem) -> Option<usize> {
        match self.row()?.extent {
            Extent::Exactly(elements) => Some(elements(problem)),
            _ => None,
        }
    }

    /// The element type, where it is one that tensors of a problem can have: of query, key, value and output.
    pub fn dtype(self, problem: &Problem) -> Option<DType> {
        match (self.tensor(problem)?, self.row()?.element(problem)) {
            (_, ElementType::Float(dtype)) => Some(dtype),
            _ => None,
        }
    }

    /// Bytes of an element.
    pub fn element_bytes(self, problem: &Problem) -> usize {
        self.row().map_or(4, |row| row.element(problem).size_bytes())
    }

    /// Multiple of which its device address must be: TMA and the widest accesses take 16 bytes at a time.
    pub const fn alignment(self) -> u64 {
        match self {
            Self::Query | Self::Key | Self::Value | Self::Output => 16,
            _ => 4,
        }
    }

    /// Elements from the first to the last, gaps included, or `None` when the number does not fit. Bias and scales lie by
    /// the strides of the call.
    pub fn extent(self, problem: &Problem, strides: impl Into<CallStrides>) -> Option<usize> {
        self.row()?.elements(problem, strides.into())
    }

    /// Operands of attention that kernels read.
    pub fn inputs() -> impl Iterator<Item = Self> {
        let operands = Problem::OPERANDS.iter().map(|row| row.operand);
        operands.filter(|operand| operand.access() == Access::Read)
    }

    /// Operands that a problem of attention can do without.
    pub fn optional() -> impl Iterator<Item = Self> {
        Problem::OPERANDS.iter().filter(|row| row.switch.is_some()).map(|row| row.operand)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BiasStrides, OperandSet};
    use std::collections::HashSet;

    #[test]
    fn the_table_is_what_problems_have() {
        let mut problem = Problem::new(2, 6, 5, 8, DType::F16);
        problem.key_heads = 3;
        let names = |problem: &Problem| OperandSet::of(problem).iter().map(Operand::name).collect::<Vec<_>>();
        assert_eq!(names(&problem), ["query", "key", "value", "output"]);
        Operand::optional().for_each(|operand| operand.switch_on(&mut problem));
        (problem.aux_f32, problem.aux_i32) = (7, 9);
        (problem.total_q, problem.total_k, problem.kv_batch) = (Some(11), None, Some(4));
        problem.paged = Some(PagedKv { page_size: 4, num_pages: 3, table_width: 2, table_stride: 5 });
        let all = Problem::OPERANDS.iter().map(|row| row.name).filter(|name| *name != "cu_seqlens_k");
        assert_eq!(names(&problem), all.collect::<Vec<_>>());
        let strides = BiasStrides { batch: 0, head: 25, row: 5, key: 1 };
        let extents = Problem::OPERANDS.iter().map(|row| row.operand.extent(&problem, strides));
        let expected = [528, 288, 288, 528, 66, 3, 3, 2, 2, 2, 2, 17, 6, 6, 7, 9, 150].map(Some);
        assert_eq!(extents.collect::<Vec<_>>(), [&expected[..], &[Some(1); 3]].concat());
        assert_eq!(Operand::PARAMETERS, expected.len());
        assert_eq!(Operand::inputs().count() + 2, Problem::OPERANDS.len());
        assert_eq!(Operand::optional().count() + 4, Problem::OPERANDS.len());
    }

    #[test]
    fn rows_are_in_the_order_of_the_table() {
        let operands = Problem::OPERANDS.iter().map(|row| row.operand);
        assert!(operands.eq(Operand::ALL[..Problem::OPERANDS.len()].iter().copied()));
    }

    #[test]
    fn streams_of_random_numbers_are_unique() {
        let streams: Vec<u64> = Problem::OPERANDS.iter().filter_map(|row| row.stream).collect();
        assert_eq!(streams.len(), Operand::inputs().count());
        assert_eq!(streams.iter().collect::<HashSet<_>>().len(), streams.len());
    }
}
