//! Attention of host tensors with shapes, in one call.

use flashcore_problem::{Alignment, HostElement, InputViews, Mask, OutputViews, Problem, ProblemError, Tensor};

use crate::{Device, Error, Invalid, Plan};

/// Elements in the host's memory and their shape `[batch, head, row, column]`, contiguous.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShapedTensor<'a, T> {
    /// The elements.
    pub elements: &'a [T],
    /// Batches, heads, rows and columns.
    pub shape: [usize; 4],
}

impl<'a, T> From<(&'a [T], [usize; 4])> for ShapedTensor<'a, T> {
    fn from((elements, shape): (&'a [T], [usize; 4])) -> Self {
        Self { elements, shape }
    }
}

impl<'a, T> From<(&'a Vec<T>, [usize; 4])> for ShapedTensor<'a, T> {
    fn from((elements, shape): (&'a Vec<T>, [usize; 4])) -> Self {
        Self { elements, shape }
    }
}

/// Options of [`attention`]: the names of `PyTorch` and `FlashAttention`. A [`Plan`] has everything else.
///
/// ```
/// let options = flashcore::AttentionOptions::default().causal().softmax_scale(0.125);
/// assert!(options.is_causal);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Default)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// True if a row attends the keys up to its own position, the last row at the last key (bottom-right).
    pub is_causal: bool,
    /// Sliding window: keys attended before and after the row's own position; `None` for no limit.
    pub window: Option<(Option<usize>, Option<usize>)>,
    /// Factor of the scores; `None` for `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f64>,
    /// `score = softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
}

impl AttentionOptions {
    /// Attends the keys up to the row's own position.
    #[must_use]
    pub const fn causal(mut self) -> Self {
        self.is_causal = true;
        self
    }

    /// Attends a sliding window: so many keys before and after the row's own position; `None` for no limit. With
    /// [`causal`](Self::causal), `right` is `None` or `Some(0)`; another one is an error.
    #[must_use]
    pub const fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window = Some((left, right));
        self
    }

    /// Sets the factor of the scores.
    #[must_use]
    pub const fn softmax_scale(mut self, scale: f64) -> Self {
        self.softmax_scale = Some(scale);
        self
    }

    /// Caps the scores.
    #[must_use]
    pub const fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = Some(softcap);
        self
    }

    fn mask(self) -> Result<Mask, ProblemError> {
        let alignment = Alignment::BottomRight;
        Ok(match (self.window, self.is_causal) {
            (None | Some((None, None)), false) => Mask::None,
            (None | Some((None, None)), true) => Mask::Causal(alignment),
            (Some((_, Some(right @ 1..))), true) => {
                return Err(ProblemError::OutOfRange {
                    argument: "the right side of window",
                    value: right.to_string(),
                    allowed: "None or Some(0) with causal, under which a row attends no key after its own; drop one of the two"
                        .to_owned(),
                });
            }
            (Some((left, _)), true) => Mask::Window { left, right: Some(0), alignment },
            (Some((left, right)), false) => Mask::Window { left, right, alignment },
        })
    }
}

/// Attention of tensors in the host's memory, on the best device there is: `softmax(Q K^T * scale) V`.
///
/// Heads of key and value may be fewer than those of the query (GQA, MQA). The output has the shape
/// `[batch, query head, query row, value column]`. Convenient, not fast: it plans anew each time and, on a GPU, copies
/// everything there and back. [`Plan`] is for the rest.
///
/// ```
/// let (shape, elements) = ([1, 2, 16, 64], vec![0.5_f32; 2 * 16 * 64]);
/// let tensor = (&elements, shape);
/// let output = flashcore::attention(tensor, tensor, tensor, flashcore::AttentionOptions::default().causal())?;
/// assert_eq!(output, elements);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn attention<'a, T: HostElement + 'a>(
    query: impl Into<ShapedTensor<'a, T>>,
    key: impl Into<ShapedTensor<'a, T>>,
    value: impl Into<ShapedTensor<'a, T>>,
    options: AttentionOptions,
) -> Result<Vec<T>, Error> {
    let (query, key, value) = (query.into(), key.into(), value.into());
    let problem = problem(query.shape, key.shape, value.shape, T::DTYPE, options)?;
    let plan = Plan::new(&problem, &Device::best())?;
    let elements = problem.output_shape().elements().unwrap_or(0);
    let mut output = Tensor::zeros(T::DTYPE, elements);
    plan.run(InputViews::new(query.elements, key.elements, value.elements), OutputViews::new(&mut output))?;
    Ok(output.to_elements())
}

/// The problem of tensors with these shapes, or the first size that does not fit the others.
fn problem(
    query: [usize; 4],
    key: [usize; 4],
    value: [usize; 4],
    dtype: flashcore_problem::DType,
    options: AttentionOptions,
) -> Result<Problem, Error> {
    let agree = [
        ("the batch size of key", key[0], query[0]),
        ("the batch size of value", value[0], query[0]),
        ("the number of heads of value", value[1], key[1]),
        ("the number of rows of value", value[2], key[2]),
        ("the number of columns of key", key[3], query[3]),
    ];
    let differ = agree.into_iter().filter(|(_, actual, expected)| actual != expected);
    let errors: Vec<_> =
        differ.map(|(argument, actual, expected)| ProblemError::ShapesDiffer { argument, actual, expected }).collect();
    if !errors.is_empty() {
        return Err(Invalid::from(errors).into());
    }
    let mut problem = Problem::new(query[0], query[1], query[2], query[3], dtype);
    (problem.key_heads, problem.key_length, problem.value_dim) = (key[1], key[2], value[3]);
    (problem.mask, problem.softcap) = (options.mask().map_err(|error| Invalid::from(vec![error]))?, options.softcap);
    problem.scale = options.softmax_scale.unwrap_or(problem.scale);
    problem.validate()?;
    Ok(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::DType;

    #[test]
    fn options_are_masks() {
        let options = AttentionOptions::default;
        let alignment = Alignment::BottomRight;
        for (options, mask) in [
            (options(), Mask::None),
            (options().window(None, None), Mask::None),
            (options().causal(), Mask::Causal(alignment)),
            (options().window(Some(3), Some(4)), Mask::Window { left: Some(3), right: Some(4), alignment }),
            (options().window(Some(3), None).causal(), Mask::Window { left: Some(3), right: Some(0), alignment }),
            (options().causal().window(Some(3), Some(0)), Mask::Window { left: Some(3), right: Some(0), alignment }),
        ] {
            assert_eq!(options.mask(), Ok(mask));
        }
    }

    #[test]
    fn no_key_is_both_after_the_row_and_causal() {
        for options in [
            AttentionOptions::default().causal().window(Some(3), Some(5)),
            AttentionOptions::default().window(Some(3), Some(5)).causal(),
            AttentionOptions::default().causal().window(None, Some(5)),
        ] {
            let shape = [1, 2, 16, 8];
            let elements = vec![0.5_f32; 2 * 16 * 8];
            let tensor = (&elements, shape);
            let refused = attention(tensor, tensor, tensor, options).map_err(|error| error.to_string());
            assert_eq!(
                refused,
                Err("the right side of window is 5; it must be None or Some(0) with causal, under which a row attends no key after its own; drop one of the two".to_owned())
            );
        }
    }

    #[test]
    fn shapes_must_agree() {
        let check = |key, value, expected: &str| {
            let found = problem([2, 4, 5, 8], key, value, DType::F32, AttentionOptions::default());
            assert_eq!(found.map(|_| ()).map_err(|error| error.to_string()), Err(expected.to_owned()));
        };
        check([3, 2, 7, 8], [2, 2, 7, 6], "the batch size of key is 3; it must be 2");
        check(
            [2, 2, 7, 9],
            [2, 1, 6, 6],
            "the number of heads of value is 1; it must be 2; the number of rows of value is 6; it must be 7; the number of columns of key is 9; it must be 8",
        );
        check(
            [2, 3, 7, 8],
            [2, 3, 7, 6],
            "query_heads is 4 and key_heads is 3; query_heads must be a multiple of key_heads",
        );
        let good = problem([2, 4, 5, 8], [2, 2, 7, 8], [2, 2, 7, 6], DType::F32, AttentionOptions::default()).unwrap();
        assert_eq!(good.output_shape().columns, 6);
    }
}
