//! The tensors of a case, in memory between pages that cannot be touched.

use super::case::{Case, Range, Strides};
use super::element::Element;
use crate::abi::header::Tensors;
use crate::abi::memory::{Pages, Side};
use crate::abi::random::{Random, mix, normal_at, uniform_at};

/// Poison where nobody may look: between the rows of strided inputs, in keys and biases that no row attends, in query
/// rows that attend nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Poison {
    Nan,
    Infinity,
    RandomBits,
    Tiny,
    Zeros,
}

impl Poison {
    pub(crate) const ALL: [Self; 5] = [Self::Nan, Self::Infinity, Self::RandomBits, Self::Tiny, Self::Zeros];

    fn fill(self, element: Element, seed: u64, bytes: &mut [u8]) {
        for (index, place) in bytes.chunks_exact_mut(element.size()).enumerate() {
            match self {
                Self::Nan => element.write(f64::NAN, place),
                Self::Infinity => element.write(if index % 2 == 0 { f64::INFINITY } else { f64::NEG_INFINITY }, place),
                Self::RandomBits => place.copy_from_slice(&mix(seed ^ index as u64).to_ne_bytes()[..place.len()]),
                Self::Tiny => element.write(element.least() * 3.0, place),
                Self::Zeros => place.fill(0),
            }
        }
    }
}

/// A tensor: which memory it is in, and where it begins there.
#[derive(Clone, Copy, Debug)]
struct Place {
    memory: usize,
    offset: usize,
    bytes: usize,
}

/// Memory of all inputs, and what the reference needs of it.
pub(crate) struct Inputs {
    memory: Vec<Pages>,
    query: Place,
    key: Place,
    value: Place,
    slopes: Option<Pages>,
    sinks: Option<Pages>,
    bias: Option<Pages>,
    lengths: Option<Pages>,
    /// Keys of each batch that some row attends.
    attended: Vec<Vec<bool>>,
}

/// The numbers of the inputs, by place in their tensors.
pub(crate) struct Numbers {
    pub(crate) query: Vec<f64>,
    pub(crate) key: Vec<f64>,
    pub(crate) value: Vec<f64>,
    pub(crate) slopes: Vec<f64>,
    pub(crate) sinks: Vec<f64>,
    pub(crate) bias: Vec<f64>,
}

/// The number at a place of a tensor.
fn number(range: Range, element: Element, seed: u64, place: u64) -> f64 {
    let normal = || normal_at(seed, place);
    match range {
        Range::Normal => normal(),
        Range::Mean => 3.0 + 0.25 * normal(),
        Range::Constant => 0.7 + (seed % 7) as f64,
        Range::Outliers => {
            normal() + if uniform_at(!seed, place) < 0.001 { 10.0 * normal_at(!seed, place) } else { 0.0 }
        }
        Range::Large => {
            let power = if element == Element::F16 { 11 } else { 20 + (seed % 20) as i32 };
            normal() * 2_f64.powi(power)
        }
        Range::Subnormal => normal() * element.least() * 2_f64.powi((seed % 12) as i32),
        Range::Zeros => [0.0, -0.0][(place % 2) as usize],
        // Of f64 a little less, or the reference overflows too.
        Range::Huge if element == Element::F64 => element.largest() * (uniform_at(seed, place) - 0.5) * 2_f64.powi(-30),
        Range::Huge => element.largest() * (2.0 * uniform_at(seed, place) - 1.0),
    }
}

impl Inputs {
    pub(crate) fn new(case: &Case) -> Self {
        let random = &mut Random::new(case.seed ^ 0x11);
        let mut side = || if random.once_in(3) { Side::Front } else { Side::Back };
        let size = case.element.size();
        let extents = [
            case.extent(case.query_strides, case.query_heads, case.query_length, case.head_dim) * size,
            case.extent(case.key_strides, case.key_heads, case.key_length, case.head_dim) * size,
            case.extent(case.value_strides, case.key_heads, case.key_length, case.value_dim) * size,
        ];
        let mut memory = Vec::new();
        let places = if case.layout == "LAYOUT_PACKED_QKV" {
            let key = case.query_heads * case.head_dim * size;
            let value = key + case.key_heads * case.head_dim * size;
            let offsets = if extents.contains(&0) { [0; 3] } else { [0, key, value] };
            memory.push(Pages::new(offsets[2] + extents[2], side()));
            [0, 1, 2].map(|index| Place { memory: 0, offset: offsets[index], bytes: extents[index] })
        } else {
            extents.map(|bytes| {
                memory.push(Pages::new(bytes, side()));
                Place { memory: memory.len() - 1, offset: 0, bytes }
            })
        };
        let mut floats = |count: usize| Pages::new(count * 4, side());
        let [query, key, value] = places;
        let bias_extent = case.bias.map(|strides| {
            let sizes = [case.batch, case.query_heads, case.query_length, case.key_length];
            if sizes.contains(&0) { 0 } else { 1 + (0..4).map(|at| (sizes[at] - 1) * strides[at]).sum::<usize>() }
        });
        let attended = (0..case.batch)
            .map(|batch| {
                let by_any = |key| (0..case.query_length).any(|row| case.attends(batch, row, key));
                (0..case.key_length).map(by_any).collect()
            })
            .collect();
        Self {
            query,
            key,
            value,
            slopes: case.has_alibi.then(|| floats(case.query_heads)),
            sinks: case.has_sinks.then(|| floats(case.query_heads)),
            bias: bias_extent.map(&mut floats),
            lengths: case.seqused_k.as_ref().map(|_| floats(case.batch)),
            memory,
            attended,
        }
    }

    /// Writes everything anew, with `poison` where nobody may look.
    pub(crate) fn fill(&mut self, case: &Case, poison: Poison) {
        self.each(Pages::allow_writing);
        for memory in &mut self.memory {
            poison.fill(case.element, case.seed, memory.bytes_mut());
        }
        let attends = |batch: usize, row: usize| (0..case.key_length).any(|key| case.attends(batch, row, key));
        let rows: Vec<(usize, usize)> =
            pairs(case.batch, case.query_length).filter(|&(b, row)| attends(b, row)).collect();
        let keys: Vec<(usize, usize)> =
            pairs(case.batch, case.key_length).filter(|&(batch, key)| self.attended[batch][key]).collect();
        let query = Filled { strides: case.query_strides, heads: case.query_heads, columns: case.head_dim };
        self.write(case, self.query, &query, &rows, case.query_range, 1);
        let key = Filled { strides: case.key_strides, heads: case.key_heads, columns: case.head_dim };
        self.write(case, self.key, &key, &keys, case.key_range, 2);
        let value = Filled { strides: case.value_strides, heads: case.key_heads, columns: case.value_dim };
        self.write(case, self.value, &value, &keys, case.value_range, 3);
        if let (Some(is_value), Some(&(batch, key))) = (case.leak, keys.get(keys.len() / 2)) {
            let (place, strides) =
                if is_value { (self.value, case.value_strides) } else { (self.key, case.key_strides) };
            let index = batch * strides[0] + key * strides[2];
            let start = place.offset + index * case.element.size();
            case.element.write(f64::NAN, &mut self.memory[place.memory].bytes_mut()[start..][..case.element.size()]);
        }
        self.fill_floats(case, poison);
        self.each(Pages::forbid_writing);
    }

    fn fill_floats(&mut self, case: &Case, poison: Poison) {
        let float = Element::F32;
        if let Some(slopes) = &mut self.slopes {
            for (head, place) in slopes.bytes_mut().chunks_exact_mut(4).enumerate() {
                float.write(2_f64.powf(-8.0 * uniform_at(case.seed ^ 4, head as u64)), place);
            }
        }
        if let Some(sinks) = &mut self.sinks {
            for (head, place) in sinks.bytes_mut().chunks_exact_mut(4).enumerate() {
                let spread = [1.0, 5.0, 60.0][(case.seed % 3) as usize];
                float.write(spread * normal_at(case.seed ^ 5, head as u64), place);
            }
        }
        if let (Some(lengths), Some(values)) = (&mut self.lengths, &case.seqused_k) {
            for (place, length) in lengths.bytes_mut().chunks_exact_mut(4).zip(values) {
                place.copy_from_slice(&length.to_ne_bytes());
            }
        }
        if let (Some(bias), Some(strides)) = (&mut self.bias, case.bias) {
            poison.fill(float, case.seed ^ 6, bias.bytes_mut());
            for (batch, row) in pairs(case.batch, case.query_length) {
                for key in (0..case.key_length).filter(|&key| case.attends(batch, row, key)) {
                    for head in 0..case.query_heads {
                        let index = batch * strides[0] + head * strides[1] + row * strides[2] + key * strides[3];
                        let is_masked = case.bias_masks && uniform_at(case.seed ^ 7, index as u64) < 0.2;
                        let value =
                            if is_masked { f64::NEG_INFINITY } else { 2.0 * normal_at(case.seed ^ 8, index as u64) };
                        float.write(value, &mut bias.bytes_mut()[index * 4..][..4]);
                    }
                }
            }
        }
    }

    fn write(&mut self, case: &Case, place: Place, filled: &Filled, rows: &[(usize, usize)], range: Range, salt: u64) {
        let (size, seed) = (case.element.size(), mix(case.seed ^ salt << 32));
        let bytes = &mut self.memory[place.memory].bytes_mut()[place.offset..];
        for &(batch, row) in rows {
            for head in 0..filled.heads {
                let start = batch * filled.strides[0] + head * filled.strides[1] + row * filled.strides[2];
                for index in start..start + filled.columns {
                    let value = number(range, case.element, seed, index as u64);
                    case.element.write(value, &mut bytes[index * size..][..size]);
                }
            }
        }
    }

    fn each(&self, visit: impl Fn(&Pages)) {
        let others = [&self.slopes, &self.sinks, &self.bias, &self.lengths];
        self.memory.iter().chain(others.into_iter().flatten()).for_each(visit);
    }

    fn range(&self, place: Place) -> (*const u8, usize) {
        (self.memory[place.memory].address().wrapping_add(place.offset), place.bytes)
    }

    pub(crate) fn numbers(&self, case: &Case) -> Numbers {
        let read = |element: Element, bytes: &[u8]| -> Vec<f64> {
            bytes.chunks_exact(element.size()).map(|bytes| element.read(bytes)).collect()
        };
        let of = |place: Place| read(case.element, &self.memory[place.memory].bytes()[place.offset..][..place.bytes]);
        let floats =
            |pages: &Option<Pages>| pages.as_ref().map_or(Vec::new(), |pages| read(Element::F32, pages.bytes()));
        Numbers {
            query: of(self.query),
            key: of(self.key),
            value: of(self.value),
            slopes: floats(&self.slopes),
            sinks: floats(&self.sinks),
            bias: floats(&self.bias),
        }
    }
}

struct Filled {
    strides: Strides,
    heads: usize,
    columns: usize,
}

fn pairs(first: usize, second: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..first).flat_map(move |outer| (0..second).map(move |inner| (outer, inner)))
}

/// Memory of the outputs.
pub(crate) struct Outputs {
    output: Pages,
    lse: Option<Pages>,
}

impl Outputs {
    pub(crate) fn new(case: &Case) -> Self {
        let side = if case.seed.is_multiple_of(3) { Side::Front } else { Side::Back };
        let extent = case.extent(case.output_strides, case.query_heads, case.query_length, case.value_dim);
        let rows = case.batch * case.query_heads * case.query_length;
        Self {
            output: Pages::new(extent * case.element.size(), side),
            lse: case.has_lse.then(|| Pages::new(rows * 4, side)),
        }
    }

    fn canary(salt: u64, index: usize) -> u8 {
        mix(salt ^ (index / 8) as u64).to_ne_bytes()[index % 8]
    }

    /// Fills everything with bytes that depend on `salt`.
    pub(crate) fn fill(&mut self, salt: u64) {
        for pages in [Some(&mut self.output), self.lse.as_mut()].into_iter().flatten() {
            for (index, byte) in pages.bytes_mut().iter_mut().enumerate() {
                *byte = Self::canary(salt, index);
            }
        }
    }

    /// The rows of the output, contiguous, and the log-sum-exps, as bytes; and the first byte between rows that changed.
    pub(crate) fn take(&self, case: &Case, salt: u64) -> (Vec<u8>, Vec<u8>, Option<usize>) {
        let (size, strides) = (case.element.size(), case.output_strides);
        let bytes = self.output.bytes();
        let (mut rows, mut is_element) = (Vec::new(), vec![false; bytes.len()]);
        for batch in 0..case.batch {
            for head in 0..case.query_heads {
                for row in 0..case.query_length {
                    let start = (batch * strides[0] + head * strides[1] + row * strides[2]) * size;
                    let end = start + case.value_dim * size;
                    rows.extend_from_slice(&bytes[start..end]);
                    is_element[start..end].fill(true);
                }
            }
        }
        let changed = |&index: &usize| !is_element[index] && bytes[index] != Self::canary(salt, index);
        let lse = self.lse.as_ref().map_or(Vec::new(), |pages| pages.bytes().to_vec());
        (rows, lse, (0..bytes.len()).find(changed))
    }
}

/// The tensors of a call.
pub(crate) fn list(case: &Case, inputs: &Inputs, outputs: &Outputs) -> Tensors {
    let mut tensors = Tensors::default();
    let element = case.element.code();
    for (name, place) in [("query", inputs.query), ("key", inputs.key), ("value", inputs.value)] {
        tensors.push(name, element, inputs.range(place));
    }
    for (name, dtype, pages) in [
        ("alibi_slopes", "F32", &inputs.slopes),
        ("sinks", "F32", &inputs.sinks),
        ("seqused_k", "I32", &inputs.lengths),
        ("bias", "F32", &inputs.bias),
        ("lse", "F32", &outputs.lse),
    ] {
        if let Some(pages) = pages {
            tensors.push_as(name, dtype, pages.range());
        }
    }
    if let (Some(bias), Some(strides)) = (tensors.get("bias"), case.bias) {
        for (index, stride) in strides.into_iter().enumerate() {
            bias.set(&format!("strides.{index}"), stride as i128);
        }
    }
    tensors.push("output", element, outputs.output.range());
    tensors
}
