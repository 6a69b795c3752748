//! The kernels.

pub mod ampere;
pub mod scalar;

use flashcore_ir::types::{S32, U32, U64};
use flashcore_ir::{Builder, Reg, SpecialRegister};

use crate::parameters::Parameters;
use crate::tile::GlobalRows;

/// What one CTA works on: some query rows of one head of one batch.
#[derive(Debug, Clone, Copy)]
struct Work {
    parameters: Parameters,
    /// Its first query row.
    first_row: Reg<U32>,
    batch: Reg<U64>,
    head: Reg<U64>,
    /// The head of key and value, and its batch.
    key_head: Reg<U64>,
}

impl Work {
    /// That of this CTA, which has `query_rows` rows.
    fn new(k: &mut Builder, query_rows: u32) -> Self {
        let parameters = Parameters::load(k);
        let query_tile = k.special(SpecialRegister::CtaX);
        let first_row = k.mul(query_tile, query_rows);
        let head = k.special(SpecialRegister::CtaY);
        let key_head = k.div(head, parameters.heads_per_key_head);
        let batch = k.special(SpecialRegister::CtaZ);
        let (batch, head, key_head) = (k.widen(batch), k.widen(head), k.widen(key_head));
        Self { parameters, first_row, batch, head, key_head }
    }

    /// The rows of this CTA's query, from its first on.
    fn query(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { query, query_batch_stride, query_head_stride, query_row_stride: stride, .. } = self.parameters;
        let head = self.matrix(k, query, query_batch_stride, query_head_stride, self.head);
        self.rows_of_cta(k, head, stride)
    }

    /// The rows of this CTA's output, from its first on.
    fn output(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { output, output_batch_stride, output_head_stride, output_row_stride: stride, .. } =
            self.parameters;
        let head = self.matrix(k, output, output_batch_stride, output_head_stride, self.head);
        self.rows_of_cta(k, head, stride)
    }

    /// All rows of its key.
    fn key(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { key, key_batch_stride, key_head_stride, key_row_stride: stride, .. } = self.parameters;
        GlobalRows { first: self.matrix(k, key, key_batch_stride, key_head_stride, self.key_head), stride }
    }

    /// All rows of its value.
    fn value(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { value, value_batch_stride, value_head_stride, value_row_stride: stride, .. } = self.parameters;
        GlobalRows { first: self.matrix(k, value, value_batch_stride, value_head_stride, self.key_head), stride }
    }

    fn matrix(
        &self,
        k: &mut Builder,
        tensor: Reg<U64>,
        batch_stride: Reg<U64>,
        head_stride: Reg<U64>,
        head: Reg<U64>,
    ) -> Reg<U64> {
        let batch = k.mad(self.batch, batch_stride, tensor);
        k.mad(head, head_stride, batch)
    }

    fn rows_of_cta(&self, k: &mut Builder, head: Reg<U64>, stride: Reg<U64>) -> GlobalRows {
        let first_row = k.widen(self.first_row);
        GlobalRows { first: k.mad(first_row, stride, head), stride }
    }

    /// The address of the log-sum-exp of a row.
    fn log_sum_exp(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        let heads = k.special(SpecialRegister::GridY);
        let heads = k.widen(heads);
        let length = k.widen(self.parameters.query_length);
        let matrix = k.mad(self.batch, heads, self.head);
        let row = k.widen(row);
        let index = k.mad(matrix, length, row);
        k.mad(index, 4u64, self.parameters.log_sum_exp)
    }

    /// How many keys, from the first on, a query row attends.
    fn key_limit(&self, k: &mut Builder, row: Reg<U32>, causal: bool) -> Reg<S32> {
        let length = k.reinterpret::<U32, S32>(self.parameters.key_length);
        if !causal {
            return length;
        }
        k.section("causal limit", |k| {
            let row = k.reinterpret::<U32, S32>(row);
            let last = k.add(row, self.parameters.causal_offset);
            let limit = k.add(last, 1i32);
            let limit = k.min(limit, length);
            k.max(limit, 0i32)
        })
    }
}
