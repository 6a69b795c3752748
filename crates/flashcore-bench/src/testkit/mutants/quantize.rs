//! Bugs of the append to an FP8 cache: wrong scales, and codes without saturation.

use flashcore_ir::{Fp8, Instruction, Kernel, Op, Operand, RegisterId, ShuffleMode, Type};

use super::Group;
use super::addressing::capped;
use super::catalogue::{Mutation, mutations};
use super::edit::rewrite_if;

/// Wrong scales and codes of what is appended.
pub const QUANTIZE: &[Mutation] = mutations! { Group::Quantize;
    "append": "quantize-by-the-scale-of-another-head", "heads from the second on have the scale of the first" =>
        |kernel| capped(kernel, "k_scale_key_head_stride", 0);
    "append": "quantize-values-by-the-scale-of-another-head", "values of heads from the second on have that of the first" =>
        |kernel| capped(kernel, "v_scale_key_head_stride", 0);
    "append": "quantize-by-the-scale-of-another-row", "rows from the second of a page on have the scale of the first" =>
        |kernel| capped(kernel, "k_scale_row_stride", 0);
    "append": "quantize-without-saturation", "what is beyond the largest number becomes NaN" => without_saturation;
    "append": "quantize-by-the-scale-before-rotation", "the largest magnitude is taken before the rotary embedding" =>
        scale_before_rotation;
    "append": "quantize-by-half-of-the-row", "half of the lanes of a row do not count for its largest magnitude" =>
        half_of_the_row;
    "append": "quantize-by-the-sign", "negative elements do not count for the largest magnitude" => without_magnitude;
};

const fn is_f32(ty: Type) -> bool {
    matches!(ty, Type::F32)
}

/// An operand of a conversion becomes NaN from 512 on, and stays below.
fn without_saturation(kernel: &mut Kernel) -> usize {
    // 512 times this is infinite.
    let large = Operand::Constant(u64::from(((119 + 127_u32) << 23).to_le()));
    let converts = |op: &Op| matches!(op, Op::ConvertFp8 { to: Fp8::E4m3, .. });
    rewrite_if(kernel, converts, |kernel, mut instruction| {
        let section = instruction.origin.section;
        let Op::ConvertFp8 { low, .. } = &mut instruction.op else { return vec![instruction] };
        let [product, zero, changed] = [(); 3].map(|()| kernel.add_register(Type::F32, section));
        let (ty, x) = (Type::F32, *low);
        *low = Operand::Register(changed);
        let ops = [
            Op::Mul { ty, d: product, a: x, b: large },
            Op::Mul { ty, d: zero, a: Operand::Register(product), b: Operand::Constant(0) },
            Op::Add { ty, d: changed, a: x, b: Operand::Register(zero) },
        ];
        let mut all: Vec<_> = ops.map(|op| Instruction { op, ..instruction.clone() }).into();
        all.push(instruction);
        all
    })
}

/// Magnitudes are those of what a rotation multiplied by the cosine.
fn scale_before_rotation(kernel: &mut Kernel) -> usize {
    let mut rotated: Vec<(RegisterId, Operand)> = Vec::new();
    kernel.instructions(&mut |instruction| {
        if let Op::Fma { ty: Type::F32, d, a, .. } = &instruction.op {
            rotated.push((*d, *a));
        }
    });
    let before =
        |operand: Operand| rotated.iter().find(|(d, _)| operand == Operand::Register(*d)).map(|&(_, before)| before);
    let is_rotated = |op: &Op| matches!(op, Op::Abs { ty, a, .. } if is_f32(*ty) && before(*a).is_some());
    rewrite_if(kernel, is_rotated, |_, mut instruction| {
        if let Op::Abs { a, .. } = &mut instruction.op
            && let Some(before) = before(*a)
        {
            *a = before;
        }
        vec![instruction]
    })
}

/// The first exchange between lanes, which is that over half of the row, brings back what the lane has itself.
fn half_of_the_row(kernel: &mut Kernel) -> usize {
    let mut widest = 0;
    let distance = |op: &Op| match op {
        Op::Shuffle { mode: ShuffleMode::Butterfly, index: Operand::Constant(distance), .. } => Some(*distance),
        _ => None,
    };
    kernel.instructions(&mut |instruction| widest = distance(&instruction.op).unwrap_or(0).max(widest));
    let is_widest = |op: &Op| distance(op).is_some_and(|distance| distance == widest);
    rewrite_if(kernel, is_widest, |_, mut instruction| {
        if let Op::Shuffle { index, .. } = &mut instruction.op {
            *index = Operand::Constant(0);
        }
        vec![instruction]
    })
}

fn without_magnitude(kernel: &mut Kernel) -> usize {
    let is_magnitude = |op: &Op| matches!(op, Op::Abs { ty, .. } if is_f32(*ty));
    rewrite_if(kernel, is_magnitude, |_, mut instruction| {
        if let Op::Abs { ty, d, a } = instruction.op {
            instruction.op = Op::Mov { ty, d, a };
        }
        vec![instruction]
    })
}
