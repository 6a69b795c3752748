//! The tables that expressions read, and the integers that say where.

use flashcore_ir::types::{S32, Storable, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg, VoteMode};
use flashcore_problem::expression::{Binary, Expression, Size, Step, Term};

/// The tables that expressions read: their addresses, and the indices of their last entries.
#[derive(Debug, Clone, Copy)]
pub struct ExpressionTables {
    /// Of numbers.
    pub numbers: (Reg<U64>, Reg<S32>),
    /// Of integers.
    pub integers: (Reg<U64>, Reg<S32>),
}

/// The bound of an integer of which nothing is known.
pub(super) const ANYTHING: i64 = 1 << 31;

/// How far from zero a constant is at most, by its size.
pub(super) const fn largest_magnitude(size: Size) -> i64 {
    match size {
        Size::Small => Size::SMALL as i64,
        Size::Any => ANYTHING,
    }
}

/// A register plus a number; the number alone where there is no register.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offset {
    pub(super) base: Option<Reg<S32>>,
    pub(super) plus: i32,
    /// Neither the register nor the sum is further from zero than this.
    pub(super) bound: i64,
}

impl Offset {
    pub(super) const fn number(plus: i32) -> Self {
        Self { base: None, plus, bound: plus.unsigned_abs() as i64 }
    }

    /// All of it in a register.
    pub(super) fn register(self, k: &mut Builder) -> Reg<S32> {
        match self.base {
            Some(base) if self.plus == 0 => base,
            Some(base) => k.add(base, self.plus),
            None => k.copy(self.plus),
        }
    }

    /// A register of one that has a bound.
    pub(super) const fn within(register: Reg<S32>, bound: i64) -> Self {
        Self { base: Some(register), plus: 0, bound }
    }
}

/// Whether an integer is the key plus something that is the same for all keys.
pub(super) fn goes_with_key(expression: &Expression, term: Term) -> bool {
    let is_same = |term| !expression.uses(term).key;
    match expression.step(term) {
        Step::Key => true,
        Step::Binary(Binary::Add, a, b) if is_same(a) => goes_with_key(expression, b),
        Step::Binary(Binary::Add | Binary::Subtract, a, b) if is_same(b) => goes_with_key(expression, a),
        _ => false,
    }
}

/// The entries of a table at places that differ by numbers alone.
pub(super) fn read_run<T: Storable>(k: &mut Builder, table: (Reg<U64>, Reg<S32>), places: &[Offset]) -> Vec<Reg<T>> {
    let entries: Vec<Reg<T>> = places.iter().map(|_| k.register()).collect();
    let by_number = |place: &&Offset| place.plus;
    let (Some(first), Some(last)) = (places.iter().min_by_key(by_number), places.iter().max_by_key(by_number)) else {
        return entries;
    };
    let (first_index, last_index) = (first.register(k), last.register(k));
    let begins = k.compare(Compare::Ge, first_index, 0i32);
    let ends = k.compare(Compare::Le, last_index, table.1);
    let inside = k.and(begins, ends);
    let inside = k.vote(VoteMode::All, inside);
    k.if_else_uniform(
        inside,
        |k| {
            let index = k.reinterpret::<S32, U32>(first_index);
            let address = GlobalAddress::from(k.mad_wide(index, 4u32, table.0));
            for (entry, place) in entries.iter().zip(places) {
                k.load_into(*entry, address.plus(4 * (place.plus - first.plus)));
            }
        },
        |k| {
            for (read, place) in entries.iter().zip(places) {
                let address = entry(k, table, *place);
                k.load_into(*read, address);
            }
        },
    );
    entries
}

/// The address of an entry of a table, or of that at the nearest end.
pub(super) fn entry(k: &mut Builder, (table, last): (Reg<U64>, Reg<S32>), index: Offset) -> Reg<U64> {
    let index = index.register(k);
    let index = k.max(index, 0i32);
    let index = k.min(index, last);
    let index = k.reinterpret::<S32, U32>(index);
    k.mad_wide(index, 4u32, table)
}
