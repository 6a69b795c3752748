//! Tensor layouts: shapes and strides.

use crate::Problem;

/// The logical shape of query, key, value or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Batches.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Rows: the sequence.
    pub rows: usize,
    /// Columns: the head dimension.
    pub columns: usize,
}

impl Shape {
    /// Elements of the shape, or `None` when the number does not fit.
    pub fn elements(self) -> Option<usize> {
        self.batch.checked_mul(self.heads)?.checked_mul(self.rows)?.checked_mul(self.columns)
    }

    /// True if the shape has no elements.
    pub fn is_empty(self) -> bool {
        self.batch == 0 || self.heads == 0 || self.rows == 0 || self.columns == 0
    }

    /// Every row as (batch, head, row), in the order of a contiguous `[batch, head, row, column]` tensor.
    pub fn each_row(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let Self { heads, rows, .. } = self;
        // An empty shape may have any number of batches, which are not counted one by one.
        let batches = if self.is_empty() { 0 } else { self.batch };
        (0..batches)
            .flat_map(move |batch| (0..heads).flat_map(move |head| (0..rows).map(move |row| (batch, head, row))))
    }
}

/// The most pairs of distances in two dimensions that are tried to decide if elements overlap.
const MOST_PAIRS: usize = 1 << 12;

/// Distances in elements between neighbours of each dimension. Neighbouring columns are always adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// From one batch to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one row of the sequence to the next.
    pub row: usize,
}

impl Strides {
    /// Contiguous `[batch, head, row, column]`. Saturates; validation refuses sizes that do not fit.
    pub fn bhsd(shape: Shape) -> Self {
        let row = shape.columns;
        let head = row.saturating_mul(shape.rows);
        Self { batch: head.saturating_mul(shape.heads), head, row }
    }

    /// Contiguous `[batch, row, head, column]`. Saturates; validation refuses sizes that do not fit.
    pub fn bshd(shape: Shape) -> Self {
        let head = shape.columns;
        let row = head.saturating_mul(shape.heads);
        Self { batch: row.saturating_mul(shape.rows), head, row }
    }

    /// The index of the first column of a row. Saturates; within [`extent`](Self::extent) it cannot overflow.
    pub const fn row_start(self, batch: usize, head: usize, row: usize) -> usize {
        let (batch, head) = (batch.saturating_mul(self.batch), head.saturating_mul(self.head));
        batch.saturating_add(head).saturating_add(row.saturating_mul(self.row))
    }

    /// Elements from the first to the last of the tensor, both included, or `None` when the number does not fit.
    pub fn extent(self, shape: Shape) -> Option<usize> {
        if shape.is_empty() {
            return Some(0);
        }
        let last_batch = (shape.batch - 1).checked_mul(self.batch)?;
        let last_head = (shape.heads - 1).checked_mul(self.head)?;
        let last_row = (shape.rows - 1).checked_mul(self.row)?;
        last_batch.checked_add(last_head)?.checked_add(last_row)?.checked_add(shape.columns)
    }

    /// True if no two elements share an address, as far as that can be decided cheaply: where dimensions are
    /// interleaved and two of them have many elements, the answer is false.
    pub fn is_disjoint(self, shape: Shape) -> bool {
        shape.is_empty() || self.is_nested(shape) || self.is_interleaved(shape)
    }

    /// True if, sorted by stride, each dimension steps over everything inside it.
    fn is_nested(self, shape: Shape) -> bool {
        let mut dimensions = [(self.batch, shape.batch), (self.head, shape.heads), (self.row, shape.rows)];
        dimensions.sort_unstable();
        let mut inside = shape.columns;
        for (stride, size) in dimensions {
            if size > 1 {
                if stride < inside {
                    return false;
                }
                inside = inside.saturating_add(stride.saturating_mul(size - 1));
            }
        }
        true
    }

    /// True if no two rows are nearer than a row is long: for all distances in the two smaller dimensions, no distance
    /// in the largest brings rows together.
    fn is_interleaved(self, shape: Shape) -> bool {
        let mut dimensions = [(shape.batch, self.batch), (shape.heads, self.head), (shape.rows, self.row)];
        dimensions.sort_unstable();
        let [(first, _), (second, _), _] = dimensions;
        if first.checked_mul(second).is_none_or(|pairs| pairs > MOST_PAIRS) {
            return false;
        }
        let [(first, first_stride), (second, second_stride), (third, third_stride)] =
            dimensions.map(|(size, stride)| (size as i128, stride as i128));
        // Rows closer than this overlap.
        let near = shape.columns as i128 - 1;
        let meets = |base: i128, furthest: i128| {
            // The multiples of the stride from `-base - near` to `-base + near`, no more than `furthest` of them away.
            if third_stride == 0 {
                return (base.abs() <= near).then_some((-furthest, furthest));
            }
            let lowest = -(base + near).div_euclid(third_stride);
            let highest = (near - base).div_euclid(third_stride);
            let (lowest, highest) = (lowest.max(-furthest), highest.min(furthest));
            (lowest <= highest).then_some((lowest, highest))
        };
        // Of two distances that differ in sign alone, one is enough.
        (0..first).all(|x| {
            let from = if x == 0 { 0 } else { 1 - second };
            (from..second).all(|y| {
                let meeting = meets(x * first_stride + y * second_stride, third - 1);
                // A row is at no distance from itself.
                if (x, y) == (0, 0) { meeting == Some((0, 0)) } else { meeting.is_none() }
            })
        })
    }
}

/// The layout of the four tensors of a [`Problem`].
///
/// A named layout follows the problem when its sizes change; [`Layout::Strided`] is used as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Each tensor contiguous, `[batch, head, row, column]`: `PyTorch`.
    Bhsd,
    /// Each tensor contiguous, `[batch, row, head, column]`: `FlashAttention`, candle.
    Bshd,
    /// Query, key and value of one row side by side, `[batch, row, query heads | key heads | value heads, column]`,
    /// each tensor beginning at its own first element; the output contiguous, `[batch, row, head, column]`.
    PackedQkv,
    /// Any strides.
    Strided(TensorStrides),
}

/// The strides of the four tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorStrides {
    /// Strides of the query.
    pub query: Strides,
    /// Strides of the key.
    pub key: Strides,
    /// Strides of the value.
    pub value: Strides,
    /// Strides of the output.
    pub output: Strides,
}

impl Layout {
    /// The strides of this layout for `problem`. Saturates; validation refuses sizes that do not fit.
    pub(crate) fn strides(self, problem: &Problem) -> TensorStrides {
        let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape(), problem.output_shape()];
        let [query, key, value, output] = match self {
            Self::Bhsd => shapes.map(Strides::bhsd),
            Self::Bshd => shapes.map(Strides::bshd),
            Self::PackedQkv => {
                let row_of = |shape: Shape| shape.heads.saturating_mul(shape.columns);
                let row = shapes[..3].iter().fold(0_usize, |row, &shape| row.saturating_add(row_of(shape)));
                let packed = |shape: Shape| Strides { batch: row.saturating_mul(shape.rows), head: shape.columns, row };
                [packed(shapes[0]), packed(shapes[1]), packed(shapes[2]), Strides::bshd(shapes[3])]
            }
            Self::Strided(strides) => return strides,
        };
        TensorStrides { query, key, value, output }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    const SHAPE: Shape = Shape { batch: 2, heads: 3, rows: 5, columns: 7 };

    #[test]
    fn contiguous_layouts_fill_their_extent() {
        for strides in [Strides::bhsd(SHAPE), Strides::bshd(SHAPE)] {
            assert_eq!(strides.extent(SHAPE), SHAPE.elements());
            assert!(strides.is_disjoint(SHAPE));
        }
        assert_eq!(Strides::bhsd(SHAPE), Strides { batch: 105, head: 35, row: 7 });
        assert_eq!(Strides::bshd(SHAPE), Strides { batch: 105, head: 7, row: 21 });
    }

    #[test]
    fn packed_rows_hold_query_key_and_value() {
        let mut problem = Problem::new(2, 4, 5, 8, DType::F16);
        problem.key_heads = 2;
        problem.value_dim = 16;
        problem.layout = Layout::PackedQkv;
        let row = 4 * 8 + 2 * 8 + 2 * 16;
        let strides = problem.strides();
        assert_eq!(strides.query, Strides { batch: 5 * row, head: 8, row });
        assert_eq!(strides.value, Strides { batch: 5 * row, head: 16, row });
        assert_eq!(strides.output, Strides { batch: 5 * 4 * 16, head: 16, row: 64 });
    }

    #[test]
    fn interleaved_rows_may_have_their_own_places() {
        // 0, 2, 4 and 3, 5, 7.
        let shape = Shape { batch: 1, heads: 2, rows: 3, columns: 1 };
        assert!(Strides { batch: 0, head: 3, row: 2 }.is_disjoint(shape));
        // 0, 2, 4 and 2, 4, 6.
        assert!(!Strides { batch: 0, head: 2, row: 2 }.is_disjoint(shape));
        // Too many to try: refused, and quickly.
        let many = Shape { batch: 1 << 20, heads: 1 << 21, rows: 2, columns: 1 };
        assert!(!Strides { batch: 3, head: 2, row: 1 << 50 }.is_disjoint(many));
    }

    #[test]
    fn overlap_is_what_counting_places_says() {
        let mut checked = [0, 0];
        for number in 0..6_usize.pow(3) * 3_usize.pow(3) * 3 {
            let mut rest = number;
            let mut take = |count: usize| {
                let taken = rest % count;
                rest /= count;
                taken
            };
            let strides = Strides { batch: take(6), head: take(6), row: take(6) };
            let shape = Shape { batch: 1 + take(3), heads: 1 + take(3), rows: 1 + take(3), columns: 1 + take(3) };
            let mut places = std::collections::HashSet::new();
            let disjoint = shape.each_row().all(|(batch, head, row)| {
                let start = strides.row_start(batch, head, row);
                (start..start + shape.columns).all(|place| places.insert(place))
            });
            assert_eq!(strides.is_disjoint(shape), disjoint, "{strides:?} {shape:?}");
            checked[usize::from(disjoint)] += 1;
        }
        assert!(checked[0] > 1000 && checked[1] > 1000, "{checked:?}");
    }

    #[test]
    fn empty_shapes_have_no_rows_however_many_batches_they_have() {
        let shape = Shape { batch: usize::MAX, heads: usize::MAX, rows: 0, columns: 7 };
        assert_eq!(shape.each_row().next(), None);
        assert_eq!(Shape { batch: 2, heads: 1, rows: 2, columns: 7 }.each_row().count(), 4);
    }

    #[test]
    fn places_beyond_the_address_space_saturate() {
        let strides = Strides { batch: usize::MAX, head: 2, row: 1 };
        assert_eq!((strides.row_start(1, 1, 1), strides.row_start(0, 3, 1)), (usize::MAX, 7));
        let strides = crate::BiasStrides { batch: usize::MAX, head: 2, row: 1, key: 5 };
        assert_eq!((strides.index(2, 1, 1, 1), strides.index(0, 3, 1, 2)), (usize::MAX, 17));
    }

    #[test]
    fn overlap_and_overflow_are_seen() {
        let cases = [
            (Strides { batch: 105, head: 35, row: 6 }, false),
            (Strides { batch: 104, head: 35, row: 7 }, false),
            (Strides { batch: 0, head: 35, row: 7 }, false),
            (Strides { batch: 300, head: 100, row: 9 }, true),
            (Strides { batch: 7, head: 70, row: 14 }, true),
        ];
        for (strides, disjoint) in cases {
            assert_eq!(strides.is_disjoint(SHAPE), disjoint, "{strides:?}");
        }
        assert_eq!(Strides { batch: usize::MAX, head: 35, row: 7 }.extent(SHAPE), None);
        assert_eq!(Strides { batch: usize::MAX, head: 35, row: 7 }.extent(Shape { rows: 0, ..SHAPE }), Some(0));
    }
}
