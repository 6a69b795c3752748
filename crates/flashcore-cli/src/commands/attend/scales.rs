//! Scales of 8-bit tensors in a file: `q_scale`, `k_scale` and `v_scale`, of one of four shapes.

use flashcore_problem::{DType, Layout, Operand, Problem, Scale, ScaleStrides};
use safetensors::SafeTensors;

use super::tensors::{find, values};

/// The scale of a tensor, if the file has one.
pub(super) fn scale(file: &SafeTensors<'_>, scale: Operand, problem: &Problem) -> Result<Option<Scale>, String> {
    let name = scale.name();
    let Some(tensor) = find(file, name) else { return Ok(None) };
    let (owner, dtype) = owner(scale, problem);
    if !dtype.is_float8() {
        return Err(format!("{name} scales a {owner} of F8_E4M3 or F8_E5M2, and the {owner} is {dtype}"));
    }
    let data = values(name, &tensor)?;
    let Problem { batch, key_heads, .. } = *problem;
    let (heads, rows) = match scale {
        Operand::QScale => (problem.query_heads, problem.query_length),
        _ => (key_heads, problem.key_length),
    };
    let is_bshd = problem.layout == Layout::Bshd;
    let per_token = if is_bshd { [batch, rows, heads] } else { [batch, heads, rows] };
    let (head, row) = if is_bshd { (1, heads) } else { (rows, 1) };
    let group = heads.checked_div(key_heads).unwrap_or(1);
    let query_head = if group > 1 { head } else { 0 };
    let strides = match tensor.shape() {
        [] | [1] => ScaleStrides::TENSOR,
        shape if shape == [key_heads] => ScaleStrides::KEY_HEAD,
        shape if shape == [batch, key_heads] => ScaleStrides::per_sequence(problem),
        shape if shape == per_token => {
            ScaleStrides { sequence: 0, batch: heads * rows, row, key_head: head * group, query_head }
        }
        shape => {
            let axes = if is_bshd { "[batch, rows, heads]" } else { "[batch, heads, rows]" };
            return Err(format!(
                "{name} has shape {shape:?}; it must be [1], one of the tensor, {:?}, one per KV head, {:?}, one per batch and KV head, or {per_token:?}, one per token: {axes}",
                [key_heads],
                [batch, key_heads]
            ));
        }
    };
    Ok(Some(Scale { data, strides }))
}

/// The tensor that a scale belongs to, and its type.
fn owner(scale: Operand, problem: &Problem) -> (&'static str, DType) {
    let types = problem.dtypes();
    match scale {
        Operand::QScale => ("query", types.query),
        Operand::KScale => ("key", types.key_value),
        _ => ("value", types.key_value),
    }
}
