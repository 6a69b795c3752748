//! `score_mod` and `mask_mod` expressions as code.

mod block_verdict;
mod bound;
mod codegen;
mod interval;
mod tables;

pub use bound::BoundExpression;
pub use codegen::{AddedTerm, ExpressionCode, ExpressionOfTile, ExpressionPlace};
pub use interval::{Span, TileSpan};
pub use tables::ExpressionTables;
