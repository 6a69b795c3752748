//! State of attention, its output and LSE, and the merge of a new partial result into it: `continue` from a given (O, LSE).

use crate::{LseForm, MergeProblem, MergeStrides, Problem, ProblemError, Shape, Strides};

/// The merge of a new partial result of attention into the state that earlier keys gave, an output and an LSE of the same
/// rows: one merge of two parts for each group of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct StateMerge {
    /// The merge of one group: two parts of the type and the strides of the output.
    pub merge: MergeProblem,
    /// Number of groups.
    pub groups: usize,
    /// Elements from the output of a group to that of the next.
    pub output_stride: usize,
    /// Elements from the LSE of a group to that of the next.
    pub lse_stride: usize,
}

impl StateMerge {
    /// The merge for a problem of attention, or every reason against it. A batch is a group of its own unless its rows follow
    /// from those of the one before by the stride of tokens or of heads.
    pub fn of(problem: &Problem) -> Result<Self, Vec<ProblemError>> {
        let mut errors = problem.errors();
        let mut refuse = |argument, value: &str, allowed: &str| {
            let (value, allowed) = (value.to_owned(), allowed.to_owned());
            errors.push(ProblemError::OutOfRange { argument, value, allowed });
        };
        if !problem.lse {
            refuse("lse", "false", "true to continue from an LSE");
        }
        if !LseForm::of(problem).includes_sink {
            refuse("lse_form.includes_sink", "false", "true to continue: the output has the sink in its denominator");
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let state = Self::of_valid(problem);
        let errors = state.merge.errors();
        if errors.is_empty() { Ok(state) } else { Err(errors) }
    }

    fn of_valid(problem: &Problem) -> Self {
        let Shape { batch, heads, rows, columns } = problem.output_shape();
        let output = problem.strides().output;
        let lse = Strides { batch: heads * rows, head: rows, row: 1 };
        // Tokens, heads and groups, with the strides of tokens and groups.
        let (tokens, merged_heads, groups) = if batch <= 1 {
            (rows, heads, batch)
        } else if rows == 1 {
            (batch, heads, 1)
        } else if output.batch == heads * output.head {
            (rows, batch * heads, 1)
        } else {
            (rows, heads, batch)
        };
        let of_tokens = |strides: Strides| {
            let row = if rows == 1 && batch > 1 { strides.batch } else { strides.row };
            Strides { batch: 0, head: strides.head, row }
        };
        let (token_output, token_lse) = (of_tokens(output), of_tokens(lse));
        let strides = MergeStrides { part: token_output, part_lse: token_lse, output: token_output, lse: token_lse };
        let merge = MergeProblem::new(2, tokens, merged_heads, columns, problem.dtypes().output)
            .with_base(problem.lse_form.base)
            .with_strides(strides);
        Self { merge, groups, output_stride: output.batch, lse_stride: lse.batch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Layout};

    /// Every row of the output and of the LSE is one row of one group, at its place.
    fn check(problem: &Problem, groups: usize) {
        let problem = problem.clone().with_lse(true);
        let state = StateMerge::of(&problem).unwrap_or_else(|errors| panic!("{errors:?}"));
        assert_eq!(state.groups, groups, "{problem}");
        let mut found = Vec::new();
        for group in 0..state.groups {
            for token in 0..state.merge.tokens {
                for head in 0..state.merge.heads {
                    let row = |strides: Strides| strides.row_start(0, head, token);
                    let output = group * state.output_stride + row(state.merge.strides.output);
                    found.push((output, group * state.lse_stride + row(state.merge.strides.lse)));
                }
            }
        }
        let (shape, strides) = (problem.output_shape(), problem.strides().output);
        let mut expected = Vec::new();
        for batch in 0..shape.batch {
            for head in 0..shape.heads {
                for row in 0..shape.rows {
                    let lse = (batch * shape.heads + head) * shape.rows + row;
                    expected.push((strides.row_start(batch, head, row), lse));
                }
            }
        }
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "{problem}");
    }

    #[test]
    fn every_row_of_the_state_is_merged_once() {
        let problem = Problem::new(3, 4, 5, 8, DType::F16);
        check(&problem, 1);
        check(&problem.clone().with_layout(Layout::Bshd), 3);
        check(&problem.clone().with_query_length(1).with_layout(Layout::Bshd), 1);
        check(&problem.clone().with_query_length(1), 1);
        check(&problem.clone().with_batch(1).with_layout(Layout::Bshd), 1);
        check(&problem.clone().with_total_q(Some(11)).with_layout(Layout::Bshd), 1);
        check(&problem.clone().with_total_q(Some(11)), 1);
        check(&problem.with_batch(0), 0);
    }

    #[test]
    fn what_cannot_be_continued_is_refused() {
        let check = |problem: Problem, argument: &str| {
            let errors = StateMerge::of(&problem).unwrap_err();
            assert!(errors[0].to_string().starts_with(argument), "{errors:?}");
        };
        let problem = Problem::new(1, 2, 3, 8, DType::F16).with_lse(true);
        check(problem.clone().with_lse(false), "lse is false; it must be true");
        let of_keys = LseForm::default().without_sink();
        assert!(StateMerge::of(&problem.clone().with_lse_form(of_keys)).is_ok());
        check(problem.clone().with_lse_form(of_keys).with_sinks(true), "lse_form.includes_sink is false");
        check(Problem { dtype: DType::F64, ..problem.clone() }, "part_dtype is f64");
        check(problem.with_value_dim(600), "value_dim is 600");
    }
}
