//! `score_mod` and `mask_mod` expressions: their code, and what interval arithmetic tells of a whole block.

mod block_verdict;
mod bound;
mod codegen;
mod interval;
mod tables;

pub use bound::BoundExpression;
pub use codegen::{AddedTerm, ExpressionBlock, ExpressionCode, LaneScores};
pub use interval::{Interval, ScoreBlock};
pub use tables::ExpressionTables;
