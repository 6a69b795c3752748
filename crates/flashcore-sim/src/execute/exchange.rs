//! Exchange between the lanes of a warp: shuffles, votes, reductions. All lanes are active.

use flashcore_ir::{ReduceOp, RegisterId, ShuffleMode, Type, VoteMode};

use crate::error::Stop;
use crate::execute::lanes::Lanes;
use crate::state::registers::{ALL, Words};

/// The lane that `lane` receives from: itself where the source would lie outside its segment.
fn source(mode: ShuffleMode, control: u32, lane: u32, index: u32) -> u32 {
    let (index, clamp, segment) = (index & 31, control & 31, control >> 8 & 31);
    let lowest = lane & segment;
    let bound = lowest | clamp & !segment;
    let (source, inside) = match mode {
        ShuffleMode::Up => (lane.wrapping_sub(index), lane as i32 - index as i32 >= bound as i32),
        ShuffleMode::Down => (lane + index, lane + index <= bound),
        ShuffleMode::Butterfly => (lane ^ index, lane ^ index <= bound),
        ShuffleMode::Index => {
            let source = lowest | index & !segment;
            (source, source <= bound)
        }
    };
    if inside { source } else { lane }
}

/// `d` is `a` of another lane.
pub(crate) fn shuffle(
    lanes: &mut Lanes<'_, '_>,
    mode: ShuffleMode,
    control: u32,
    d: RegisterId,
    index: &Words,
    a: RegisterId,
) {
    let a = *lanes.registers.word_of(a);
    let received = core::array::from_fn(|lane| a[source(mode, control, lane as u32, index[lane]) as usize]);
    lanes.set_word(d, &received);
}

/// The vote of all lanes on a predicate.
pub(crate) fn vote(lanes: &mut Lanes<'_, '_>, mode: VoteMode, d: RegisterId, a: RegisterId) {
    let holds = lanes.registers.predicate_of(a);
    let answer = match mode {
        VoteMode::All => holds == ALL,
        VoteMode::Any => holds != 0,
        VoteMode::Uniform => holds == 0 || holds == ALL,
    };
    lanes.set_predicate(d, if answer { ALL } else { 0 });
}

/// The reduction of `a` over the warp.
pub(crate) fn reduce(
    lanes: &mut Lanes<'_, '_>,
    op: ReduceOp,
    ty: Type,
    d: RegisterId,
    a: RegisterId,
) -> Result<(), Stop> {
    let combine: fn(u32, u32) -> u32 = match (op, ty) {
        (ReduceOp::Add, Type::U32 | Type::S32) => u32::wrapping_add,
        (ReduceOp::Min, Type::U32) => u32::min,
        (ReduceOp::Max, Type::U32) => u32::max,
        (ReduceOp::Min, Type::S32) => |a, b| (a as i32).min(b as i32) as u32,
        (ReduceOp::Max, Type::S32) => |a, b| (a as i32).max(b as i32) as u32,
        (ReduceOp::And, Type::U32 | Type::S32) => |a, b| a & b,
        (ReduceOp::Or, Type::U32 | Type::S32) => |a, b| a | b,
        (ReduceOp::Xor, Type::U32 | Type::S32) => |a, b| a ^ b,
        _ => return Err(Stop::no_such_form("ReduceWarp", format_args!("{op} of {ty}"))),
    };
    let a = *lanes.registers.word_of(a);
    let result = a[1..].iter().fold(a[0], |result, &value| combine(result, value));
    lanes.set_word(d, &[result; 32]);
    Ok(())
}
