//! Random problems.

use std::fmt;

use super::element::Element;
use crate::abi::header::{Header, Struct};
use crate::abi::library::Library;
use crate::abi::random::Random;

/// Size of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// A few rows, keys and heads.
    Small,
    /// 500 to 4,099 rows or keys.
    Large,
    /// Dimensions to 5,003, 129 query heads to a key head, 300 batches, 100 key heads.
    Odd,
}

/// Kind of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    /// N(0, 1).
    Normal,
    /// Around a mean.
    Mean,
    /// One number everywhere.
    Constant,
    /// N(0, 1), and one in a thousand N(0, 100).
    Outliers,
    /// N(0, 1) times a power of two, so that nothing overflows.
    Large,
    /// Subnormal, or as small.
    Subnormal,
    /// Zeros, of both signs.
    Zeros,
    /// Up to the largest number there is: sums may overflow.
    Huge,
}

impl Range {
    /// Errors of sums are as random as the numbers.
    pub(crate) fn is_random(self) -> bool {
        matches!(self, Self::Normal | Self::Outliers)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mask {
    None,
    Causal,
    /// Keys before and after the row's own position; `None` is no limit.
    Window(Option<usize>, Option<usize>),
}

/// Elements between neighbours of batch, head and row.
pub(crate) type Strides = [usize; 3];

/// A problem, and how its tensors are filled and placed.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one independent part is there")]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) element: Element,
    pub(crate) batch: usize,
    pub(crate) query_heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) query_length: usize,
    pub(crate) key_length: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) scale: f64,
    pub(crate) mask: Mask,
    pub(crate) is_top_left: bool,
    pub(crate) softcap: Option<f32>,
    pub(crate) has_alibi: bool,
    pub(crate) has_sinks: bool,
    /// Strides of the bias: batch, head, row, key.
    pub(crate) bias: Option<[usize; 4]>,
    /// Of each batch, where they differ.
    pub(crate) seqused_k: Option<Vec<u32>>,
    pub(crate) has_lse: bool,
    pub(crate) layout: &'static str,
    pub(crate) query_strides: Strides,
    pub(crate) key_strides: Strides,
    pub(crate) value_strides: Strides,
    pub(crate) output_strides: Strides,
    pub(crate) query_range: Range,
    pub(crate) key_range: Range,
    pub(crate) value_range: Range,
    /// The bias has minus infinity here and there.
    pub(crate) bias_masks: bool,
    /// One attended key has a NaN: in a value (`Some(true)`) or in the key (`Some(false)`).
    pub(crate) leak: Option<bool>,
}

const DIMS: [usize; 22] = [1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 72, 96, 100, 127, 128];

fn dimension(random: &mut Random, most: usize) -> usize {
    if random.once_in(3) { random.within(1, most) } else { random.pick(&DIMS).min(most) }
}

fn range(random: &mut Random, with_huge: bool) -> Range {
    match random.below(24) {
        0..=11 => Range::Normal,
        12 | 13 => Range::Mean,
        14 | 15 => Range::Constant,
        16 | 17 => Range::Outliers,
        18 | 19 => Range::Large,
        20 | 21 => Range::Subnormal,
        22 if with_huge => Range::Huge,
        _ => Range::Zeros,
    }
}

impl Case {
    /// The case of a number. Cases of one number are equal.
    pub(crate) fn new(seed: u64, size: Size) -> Self {
        let random = &mut Random::new(seed);
        let element = random.pick(&Element::ALL);
        let [batch, key_heads, group, query_length, key_length, head_dim, value_dim] = sizes(random, size, element);
        let mask = match random.below(5) {
            0 | 1 => Mask::None,
            2 | 3 => Mask::Causal,
            _ => {
                let limit = |random: &mut Random| match random.below(4) {
                    0 => None,
                    1 => Some(random.within(0, 3)),
                    _ => Some(random.within(0, key_length.max(query_length))),
                };
                match (limit(random), limit(random)) {
                    (None, None) => Mask::Window(Some(0), None),
                    (left, right) => Mask::Window(left, right),
                }
            }
        };
        let is_top_left = random.once_in(2);
        let usual = f64::from((1.0 / (head_dim as f64).sqrt()) as f32);
        let is_double = Header::get().layout("flashcore_attention_problem_t").is_double("scale");
        let scale = match random.below(12) {
            0 => -usual,
            1 => 0.0,
            2 => f64::from(random.pick(&[0.01_f32, 0.3, 1.0, -1.5, 4.0, 30.0])),
            3 if is_double && element == Element::F64 => 1.0 / (head_dim as f64).sqrt(),
            _ => usual,
        };
        let mut case = Self {
            seed,
            element,
            batch,
            query_heads: key_heads * group,
            key_heads,
            query_length,
            key_length,
            head_dim,
            value_dim,
            scale,
            mask,
            is_top_left,
            softcap: random.once_in(5).then(|| random.pick(&[0.5, 5.0, 20.0, 50.0, 1000.0])),
            has_alibi: random.once_in(5),
            has_sinks: random.once_in(5),
            bias: None,
            seqused_k: None,
            has_lse: random.once_in(2),
            layout: "LAYOUT_BHSD",
            query_strides: [0; 3],
            key_strides: [0; 3],
            value_strides: [0; 3],
            output_strides: [0; 3],
            query_range: range(random, false),
            key_range: range(random, false),
            value_range: range(random, true),
            bias_masks: random.once_in(3),
            leak: random.once_in(10).then(|| random.once_in(2)),
        };
        if random.once_in(4) {
            let length = |_: usize| match random.below(6) {
                0 => 0,
                1 => key_length as u32,
                _ => random.within(0, key_length) as u32,
            };
            case.seqused_k = Some((0..batch).map(length).collect());
        }
        case.place(random);
        let terms = case.batch * case.query_heads * case.query_length * case.key_length;
        if random.once_in(5) && terms <= 1 << 22 {
            case.bias = Some(bias_strides(random, &case));
        }
        case
    }

    /// Chooses a layout.
    fn place(&mut self, random: &mut Random) {
        let shapes = [
            [self.batch, self.query_heads, self.query_length, self.head_dim],
            [self.batch, self.key_heads, self.key_length, self.head_dim],
            [self.batch, self.key_heads, self.key_length, self.value_dim],
            [self.batch, self.query_heads, self.query_length, self.value_dim],
        ];
        let by_head = |[_, heads, rows, columns]: [usize; 4]| [heads * rows * columns, rows * columns, columns];
        let by_row = |[_, heads, rows, columns]: [usize; 4]| [heads * rows * columns, columns, heads * columns];
        let (layout, strides) = match random.below(8) {
            0..=2 => ("LAYOUT_BHSD", shapes.map(by_head)),
            3 | 4 => ("LAYOUT_BSHD", shapes.map(by_row)),
            5 if self.query_length == self.key_length => {
                let row = self.query_heads * self.head_dim + self.key_heads * (self.head_dim + self.value_dim);
                let packed = |[_, _, rows, columns]: [usize; 4]| [row * rows, columns, row];
                let [query, key, value, output] = shapes;
                ("LAYOUT_PACKED_QKV", [packed(query), packed(key), packed(value), by_row(output)])
            }
            _ => {
                let [query, key, value, output] = shapes;
                let strides = [
                    any_strides(random, query, true),
                    any_strides(random, key, true),
                    any_strides(random, value, true),
                    any_strides(random, output, false),
                ];
                ("LAYOUT_STRIDED", strides)
            }
        };
        self.layout = layout;
        [self.query_strides, self.key_strides, self.value_strides, self.output_strides] = strides;
    }

    /// Elements from the first to the last of a tensor.
    pub(crate) fn extent(&self, [batch, head, row]: Strides, heads: usize, rows: usize, columns: usize) -> usize {
        if self.batch * heads * rows * columns == 0 {
            return 0;
        }
        (self.batch - 1) * batch + (heads - 1) * head + (rows - 1) * row + columns
    }

    pub(crate) fn key_length_of(&self, batch: usize) -> usize {
        self.seqused_k.as_ref().map_or(self.key_length, |lengths| lengths[batch] as usize)
    }

    /// Where a row stands among the keys. Without a mask it is as if the last row stood at the last key.
    pub(crate) fn position(&self, batch: usize, row: usize) -> i64 {
        let is_top_left = self.is_top_left && self.mask != Mask::None;
        row as i64 + if is_top_left { 0 } else { self.key_length_of(batch) as i64 - self.query_length as i64 }
    }

    pub(crate) fn attends(&self, batch: usize, row: usize, key: usize) -> bool {
        let distance = key as i64 - self.position(batch, row);
        let by_mask = match self.mask {
            Mask::None => true,
            Mask::Causal => distance <= 0,
            Mask::Window(left, right) => {
                left.is_none_or(|left| distance >= -(left as i64)) && right.is_none_or(|right| distance <= right as i64)
            }
        };
        by_mask && key < self.key_length_of(batch)
    }

    /// The struct for the library.
    pub(crate) fn problem(&self, library: &Library) -> Struct {
        let constant = |name: &str| i128::from(Header::get().constant(name));
        let [batch, heads, length, dim] =
            [self.batch, self.query_heads, self.query_length, self.head_dim].map(|size| size as u64);
        let mut problem = library.problem(batch, heads, length, dim, self.element.code());
        problem.set("key_heads", self.key_heads as i128);
        problem.set("key_length", self.key_length as i128).set("value_dim", self.value_dim as i128);
        problem.set_real("scale", self.scale);
        let (mask, [left, right]) = match self.mask {
            Mask::None => ("MASK_NONE", [-1; 2]),
            Mask::Causal => ("MASK_CAUSAL", [-1; 2]),
            Mask::Window(left, right) => {
                ("MASK_WINDOW", [left, right].map(|limit| limit.map_or(-1, |keys| keys as i128)))
            }
        };
        problem.set("mask", constant(mask)).set("window_left", left).set("window_right", right);
        let alignment = if self.is_top_left { "ALIGNMENT_TOP_LEFT" } else { "ALIGNMENT_BOTTOM_RIGHT" };
        problem.set("alignment", constant(alignment));
        problem.set_real("softcap", f64::from(self.softcap.unwrap_or(0.0)));
        problem.set("alibi", self.has_alibi.into()).set("sinks", self.has_sinks.into());
        problem.set("bias", self.bias.is_some().into()).set("seqused_k", self.seqused_k.is_some().into());
        problem.set("lse", self.has_lse.into()).set("layout", constant(self.layout));
        if self.layout == "LAYOUT_STRIDED" {
            let tensors = [
                ("query", self.query_strides),
                ("key", self.key_strides),
                ("value", self.value_strides),
                ("output", self.output_strides),
            ];
            for (tensor, strides) in tensors {
                for (dimension, stride) in ["batch", "head", "row"].into_iter().zip(strides) {
                    problem.set(&format!("{tensor}_strides.{dimension}"), stride as i128);
                }
            }
        }
        problem
    }
}

/// Batch, key heads, query heads of each, rows, keys, columns of query and value.
fn sizes(random: &mut Random, size: Size, element: Element) -> [usize; 7] {
    let length = |random: &mut Random, most: usize| match random.below(16) {
        0 => 0,
        1 | 2 => 1,
        3 => random.within(1, 4 * most),
        _ => random.within(1, most),
    };
    let is_wide = element == Element::F64;
    match size {
        Size::Small => {
            let most = if is_wide { 20 } else { 44 };
            let (batch, key_heads) = (random.pick(&[1, 1, 1, 2, 2, 3, 0]), random.pick(&[1, 1, 2, 2, 3]));
            let group = random.pick(&[1, 1, 1, 2, 3, 4, 7, 8]);
            let most_dim = if random.once_in(12) { 300 } else { 130 };
            let (head_dim, value_dim) = (dimension(random, most_dim), dimension(random, most_dim));
            let mut sizes = [batch, key_heads, group, length(random, most), length(random, most), head_dim, value_dim];
            if random.once_in(2) {
                sizes[6] = sizes[5];
            }
            if random.once_in(3) {
                sizes[4] = sizes[3];
            }
            // The reference takes time for every pair of a row and a key, and of a column.
            let most_work = if is_wide { 1 << 18 } else { 1 << 21 };
            while work(sizes) > most_work {
                let largest = (0..5).max_by_key(|&index| sizes[index]).unwrap();
                sizes[largest] = sizes[largest].div_ceil(2);
            }
            sizes
        }
        Size::Large => {
            let long = |random: &mut Random| random.within(500, 4099);
            let (rows, keys) = match random.below(4) {
                0 => (random.within(1, 9), long(random)),
                1 => (long(random), random.within(1, 200)),
                2 => (random.within(10, 300), long(random)),
                _ => (long(random), long(random)),
            };
            let keys = if random.once_in(3) { rows.max(500) } else { keys };
            let (key_heads, group) = random.pick(&[(1, 1), (1, 2), (2, 1), (1, 4), (2, 3)]);
            let head_dim = dimension(random, 130);
            [random.pick(&[1, 1, 2]), key_heads, group, rows, keys, head_dim, random.pick(&[head_dim, 64, 17])]
        }
        Size::Odd => {
            let (rows, keys) = (random.within(1, 5), random.within(1, 12));
            match random.below(5) {
                0 => {
                    [1, 1, random.within(1, 3), rows, keys, random.pick(&[5003, 2048, 1025, 999]), random.within(1, 9)]
                }
                1 => {
                    [1, 1, random.within(1, 3), rows, keys, random.within(1, 9), random.pick(&[5003, 2049, 1024, 777])]
                }
                2 => [
                    1,
                    random.within(1, 2),
                    random.within(9, 129),
                    rows,
                    keys,
                    random.within(1, 20),
                    random.within(1, 20),
                ],
                3 => [
                    random.within(50, 300),
                    random.within(1, 2),
                    1,
                    rows,
                    keys,
                    random.within(1, 20),
                    random.within(1, 20),
                ],
                _ => [
                    1,
                    random.within(20, 100),
                    random.within(1, 2),
                    rows,
                    keys,
                    random.within(1, 20),
                    random.within(1, 20),
                ],
            }
        }
    }
}

fn work([batch, key_heads, group, rows, keys, head_dim, value_dim]: [usize; 7]) -> usize {
    batch * key_heads * group * rows * keys * (head_dim + value_dim)
}

/// Any order of the dimensions, with gaps; inputs may repeat one.
fn any_strides(random: &mut Random, [batch, heads, rows, columns]: [usize; 4], may_repeat: bool) -> Strides {
    let sizes = [batch, heads, rows];
    let mut order = [0, 1, 2];
    for last in (1..3).rev() {
        order.swap(last, random.below(last + 1));
    }
    let (mut strides, mut inside) = ([0; 3], columns);
    for dimension in order {
        if may_repeat && random.once_in(8) {
            continue; // stays 0
        }
        let gap = random.pick(&[0, 0, 0, 1, 2, 7, 8, 64]);
        strides[dimension] = inside + gap;
        inside = strides[dimension] * sizes[dimension].max(1);
    }
    strides
}

/// A bias for every term, or the same one along some dimensions.
fn bias_strides(random: &mut Random, case: &Case) -> [usize; 4] {
    let sizes = [case.batch, case.query_heads, case.query_length, case.key_length];
    let repeated: [bool; 4] = std::array::from_fn(|_| random.once_in(3));
    let (mut strides, mut inside) = ([0; 4], 1);
    for dimension in (0..4).rev() {
        if !repeated[dimension] {
            strides[dimension] = inside + random.pick(&[0, 0, 0, 1, 5]);
            inside = strides[dimension] * sizes[dimension].max(1);
        }
    }
    strides
}

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self:?}")
    }
}
