//! Auxiliary tables (`aux_f32`, `aux_i32`) of expressions, and the integers that index them.

use flashcore_ir::types::{S32, Storable, U32, U64};
use flashcore_ir::{Builder, GlobalAddress, Reg, VoteMode};
use flashcore_problem::expression::{Binary, Expression, Size, Step, Term};

/// The auxiliary tables: their addresses, and the indices of their last entries.
#[derive(Debug, Clone, Copy)]
pub struct ExpressionTables {
    /// `aux_f32`.
    pub numbers: (Reg<U64>, Reg<S32>),
    /// `aux_i32`.
    pub integers: (Reg<U64>, Reg<S32>),
}

/// The bound of an integer of which nothing is known.
pub(crate) const ANYTHING: i64 = 1 << 31;

/// The largest magnitude of a constant, by its size.
pub(crate) const fn largest_magnitude(size: Size) -> i64 {
    match size {
        Size::Small => Size::SMALL as i64,
        Size::Any => ANYTHING,
    }
}

/// A register plus a constant; the constant alone where there is no register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offset {
    pub(crate) base: Option<Reg<S32>>,
    pub(crate) plus: i32,
    /// Bound of the magnitude of the register and of the sum.
    pub(crate) bound: i64,
}

impl Offset {
    pub(crate) const fn number(plus: i32) -> Self {
        Self { base: None, plus, bound: plus.unsigned_abs() as i64 }
    }

    /// The sum in a register.
    pub(crate) fn register(self, k: &mut Builder) -> Reg<S32> {
        match self.base {
            Some(base) if self.plus == 0 => base,
            Some(base) => k.add(base, self.plus),
            None => k.copy(self.plus),
        }
    }

    /// A register whose magnitude has a bound.
    pub(crate) const fn within(register: Reg<S32>, bound: i64) -> Self {
        Self { base: Some(register), plus: 0, bound }
    }
}

/// True if an integer is the key plus something that is the same for all keys.
pub(crate) fn goes_with_key(expression: &Expression, term: Term) -> bool {
    let is_same = |term| !expression.uses(term).key;
    match expression.step(term) {
        Step::Key => true,
        Step::Binary(Binary::Add, a, b) if is_same(a) => goes_with_key(expression, b),
        Step::Binary(Binary::Add | Binary::Subtract, a, b) if is_same(b) => goes_with_key(expression, a),
        _ => false,
    }
}

/// The entries of a table at indices that differ by constants alone.
pub(crate) fn read_run<T: Storable>(k: &mut Builder, table: (Reg<U64>, Reg<S32>), indices: &[Offset]) -> Vec<Reg<T>> {
    let entries: Vec<Reg<T>> = indices.iter().map(|_| k.register()).collect();
    let by_number = |index: &&Offset| index.plus;
    let (Some(first), Some(last)) = (indices.iter().min_by_key(by_number), indices.iter().max_by_key(by_number)) else {
        return entries;
    };
    let (first_index, last_index) = (first.register(k), last.register(k));
    let inside = k.eval(first_index.ge(0) & last_index.le(table.1));
    let inside = k.vote(VoteMode::All, inside);
    k.if_else_uniform(
        inside,
        |k| {
            let first_index = k.reinterpret::<S32, U32>(first_index);
            let address = GlobalAddress::from(k.mad_wide(first_index, 4u32, table.0));
            for (entry, index) in entries.iter().zip(indices) {
                k.load_into(*entry, address.plus(4 * (index.plus - first.plus)));
            }
        },
        |k| {
            for (read, index) in entries.iter().zip(indices) {
                let address = entry(k, table, *index);
                k.load_into(*read, address);
            }
        },
    );
    entries
}

/// The address of an entry of a table; of an index past an end, of the entry there.
pub(crate) fn entry(k: &mut Builder, (table, last): (Reg<U64>, Reg<S32>), index: Offset) -> Reg<U64> {
    let index = index.register(k);
    let index = k.eval(index.max(0).min(last).unsigned());
    k.mad_wide(index, 4u32, table)
}
