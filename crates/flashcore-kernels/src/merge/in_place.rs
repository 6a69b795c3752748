//! Merge in place: a second partial result is merged into the first, whose output and LSE are replaced (`continue`).
//!
//! Rows that the second part has not written are left alone, whatever the first holds there: their LSE has the bits
//! [`UNWRITTEN`], which no kernel writes (a NaN that arithmetic makes is `0x7fff_ffff`). Every lane of a row reads both parts
//! before any lane stores.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Kernel, SpecialRegister};

use super::{LaneColumns, MergeSpec, Parameters, RowParts, THREADS, merge_few, store};

/// Bits of an LSE in a row that was not written.
pub const UNWRITTEN: u32 = u32::MAX;

/// Writes the kernel.
pub(super) fn kernel(spec: MergeSpec) -> Kernel {
    let mut builder = Builder::new(spec.name(), THREADS);
    let k = &mut builder;
    let p = Parameters::load(k);
    let thread = k.special(SpecialRegister::ThreadX);
    let lane_in_row = k.and(thread, spec.lanes() - 1);
    let row_in_cta = k.shr(thread, spec.lanes().ilog2());
    let cta = k.special(SpecialRegister::CtaX);
    let row = k.mad(cta, spec.rows_per_cta(), row_in_cta);
    let tokens = k.truncate(p.tokens);
    let rows = k.mul(tokens, p.heads);
    let exists = k.compare(Compare::Lt, row, rows);
    let token = k.div(row, p.heads);
    let first = k.mul(token, p.heads);
    let head = k.sub(row, first);
    let (token, head) = (k.widen(token), k.widen(head));
    let address = |k: &mut Builder, base, token_stride, head_stride| {
        let address = k.mad(token, token_stride, base);
        k.mad(head, head_stride, address)
    };
    let row_parts = RowParts {
        p: &p,
        part: address(k, p.part, p.part_token_stride, p.part_head_stride),
        lse: address(k, p.part_lse, p.part_lse_token_stride, p.part_lse_head_stride),
    };
    let columns = LaneColumns::new(k, spec, lane_in_row);
    let bits = k.copy(UNWRITTEN);
    k.if_then(exists, |k| {
        let second = k.add(row_parts.lse, p.part_lse_stride);
        let loaded = k.load_one::<U32>(second);
        k.set(bits, loaded);
    });
    let is_written = k.compare(Compare::Ne, bits, UNWRITTEN);
    let (shift, sum) = (k.copy(0.0f32), k.copy(0.0f32));
    k.if_then(is_written, |k| {
        let merged = merge_few(k, &row_parts, &columns, 2);
        k.set(shift, merged.0);
        k.set(sum, merged.1);
    });
    // The lanes of a row, all in one warp, read what others of them store.
    k.warp_sync();
    k.if_then(is_written, |k| {
        k.section("epilogue", |k| {
            store(k, spec, &columns, row_parts.part, sum);
            let logarithm = k.log2(sum);
            let lse = k.fma(logarithm, p.from_log2, shift);
            let is_first = k.compare(Compare::Eq, lane_in_row, 0u32);
            k.when(is_first, |k| k.store_one(row_parts.lse, lse));
        });
    });
    builder.finish()
}
