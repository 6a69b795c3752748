//! Bugs of packed and paged sequences: the wrong offset, length, padding, cache batch, table row or page.

use flashcore_ir::{Instruction, Kernel, Op, Operand};

use super::Group;
use super::addressing::capped_index;
use super::catalogue::{Mutation, mutations};
use super::edit::{parameter, rewrite_if};

/// The wrong offset, length, padding, cache batch, table row or page.
pub const SEQUENCES: &[Mutation] = mutations! { Group::Sequences;
    "scalar": "rows-of-another-sequence", "sequences from the third on have the query rows of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_q", 2);
    "scalar": "keys-of-another-sequence", "sequences from the third on have the keys of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_k", 2);
    "scalar": "query-length-of-another-sequence", "sequences from the third on have the query length of the third" =>
        |kernel| capped_index(kernel, "seqused_q", 2);
    "scalar": "padding-of-another-sequence", "sequences from the third on have the padding of the third" =>
        |kernel| capped_index(kernel, "leftpad_k", 2);
    "scalar": "cache-batch-of-another-sequence", "sequences from the third on have the cache batch of the third" =>
        |kernel| capped_index(kernel, "kv_batch_idx", 2);
    "scalar": "table-row-of-another-sequence", "table rows from the second on are the second" =>
        |kernel| capped_index(kernel, "page_table", 1);
    "scalar": "wrong-page", "pages from the third on are the third" => |kernel| capped_page(kernel, 2);
    "ampere": "rows-of-another-sequence", "sequences from the third on have the query rows of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_q", 2);
    "ampere": "keys-of-another-sequence", "sequences from the third on have the keys of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_k", 2);
    "ampere": "query-length-of-another-sequence", "sequences from the third on have the query length of the third" =>
        |kernel| capped_index(kernel, "seqused_q", 2);
    "ampere": "padding-of-another-sequence", "sequences from the third on have the padding of the third" =>
        |kernel| capped_index(kernel, "leftpad_k", 2);
    "ampere": "cache-batch-of-another-sequence", "sequences from the third on have the cache batch of the third" =>
        |kernel| capped_index(kernel, "kv_batch_idx", 2);
    "ampere": "table-row-of-another-sequence", "table rows from the second on are the second" =>
        |kernel| capped_index(kernel, "page_table", 1);
    "ampere": "wrong-page", "pages from the third on are the third" => |kernel| capped_page(kernel, 2);
    "hopper": "rows-of-another-sequence", "sequences from the third on have the query rows of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_q", 2);
    "hopper": "keys-of-another-sequence", "sequences from the third on have the keys of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_k", 2);
    "hopper": "query-length-of-another-sequence", "sequences from the third on have the query length of the third" =>
        |kernel| capped_index(kernel, "seqused_q", 2);
    "hopper": "table-row-of-another-sequence", "table rows from the second on are the second" =>
        |kernel| capped_index(kernel, "page_table", 1);
    "combine": "rows-of-another-sequence", "sequences from the third on have the query rows of the third" =>
        |kernel| capped_index(kernel, "cu_seqlens_q", 2);
    "combine": "length-of-another-sequence", "sequences from the third on have as many chunks as the third" =>
        |kernel| capped_index(kernel, "seqused_k", 2);
};

/// Pages from a number on are that page.
fn capped_page(kernel: &mut Kernel, most: u64) -> usize {
    let Some(last_page) = parameter(kernel, "last_page").map(Operand::Register) else { return 0 };
    let clamps = |op: &Op| matches!(op, Op::Min { b, .. } if *b == last_page);
    rewrite_if(kernel, clamps, |_, mut instruction| {
        if let Op::Min { b, .. } = &mut instruction.op {
            *b = Operand::Constant(most);
        }
        vec![Instruction { ..instruction }]
    })
}
