//! Tensors that reach over more than 4 GiB, and over more than 2^31 elements, by their strides: in memory of which only the
//! rows are touched.

use crate::abi::header::Tensors;
use crate::abi::library::Library;
use crate::abi::memory::{Pages, Side};
use crate::abi::random::normal_at;
use crate::fuzz::element::Element;

const SIZES: [usize; 4] = [2, 3, 5, 16];

/// A tensor in memory as far as its strides reach.
struct Far {
    strides: [usize; 3],
    pages: Pages,
}

impl Far {
    /// Contiguous `[batch, head, row, column]`, but for one dimension.
    fn new(element: Element, far: Option<(usize, usize)>) -> Self {
        let [batch, heads, rows, columns] = SIZES;
        let mut strides = [heads * rows * columns, rows * columns, columns];
        if let Some((dimension, stride)) = far {
            strides[dimension] = stride;
        }
        let last = (batch - 1) * strides[0] + (heads - 1) * strides[1] + (rows - 1) * strides[2];
        Self { strides, pages: Pages::new((last + columns) * element.size(), Side::Back) }
    }

    fn each_row(&self, mut visit: impl FnMut(usize, usize)) {
        let [batch, heads, rows, _] = SIZES;
        for number in 0..batch * heads * rows {
            let (b, h, r) = (number / (heads * rows), number / rows % heads, number % rows);
            visit(number, b * self.strides[0] + h * self.strides[1] + r * self.strides[2]);
        }
    }

    fn fill(mut self, element: Element, seed: u64) -> Self {
        let mut starts = Vec::new();
        self.each_row(|number, start| starts.push((number, start)));
        let (size, columns) = (element.size(), SIZES[3]);
        for (number, start) in starts {
            for column in 0..columns {
                let value = normal_at(seed, (number * columns + column) as u64);
                element.write(value, &mut self.pages.bytes_mut()[(start + column) * size..][..size]);
            }
        }
        self
    }

    fn rows(&self, element: Element) -> Vec<f64> {
        let mut values = Vec::new();
        self.each_row(|_, start| {
            let bytes = &self.pages.bytes()[start * element.size()..][..SIZES[3] * element.size()];
            values.extend(bytes.chunks_exact(element.size()).map(|bytes| element.read(bytes)));
        });
        values
    }
}

/// The output with one dimension of one tensor far apart, or none.
fn attend(element: Element, far: Option<(usize, usize, usize)>, bias: Option<[usize; 4]>) -> Vec<f64> {
    let library = Library::get();
    let [batch, heads, rows, columns] = SIZES;
    let of = |tensor: usize| far.filter(|far| far.0 == tensor).map(|(_, dimension, stride)| (dimension, stride));
    let inputs: Vec<Far> = (0..3).map(|tensor| Far::new(element, of(tensor)).fill(element, tensor as u64)).collect();
    let output = Far::new(element, of(3));
    let mut problem = library.problem(batch as u64, heads as u64, rows as u64, columns as u64, element.code());
    problem.set("layout", crate::abi::header::Header::get().constant("LAYOUT_STRIDED").into());
    problem.set("bias", bias.is_some().into());
    let mut given = Tensors::default();
    for (name, tensor) in ["query", "key", "value", "output"].into_iter().zip(inputs.iter().chain([&output])) {
        for (dimension, stride) in ["batch", "head", "row"].into_iter().zip(tensor.strides) {
            problem.set(&format!("{name}_strides.{dimension}"), stride as i128);
        }
        given.push(name, element.code(), tensor.pages.range());
    }
    let _terms = bias.map(|strides| {
        let sizes = [batch, heads, rows, rows];
        let extent = 1 + (0..4).map(|at| (sizes[at] - 1) * strides[at]).sum::<usize>();
        let mut terms = Pages::new(extent * 4, Side::Back);
        for number in 0..sizes.iter().product() {
            let at =
                [number / (heads * rows * rows), number / (rows * rows) % heads, number / rows % rows, number % rows];
            let index: usize = at.iter().zip(strides).map(|(at, stride)| at * stride).sum();
            Element::F32.write(normal_at(9, number as u64), &mut terms.bytes_mut()[index * 4..][..4]);
        }
        let bias = given.push_as("bias", "F32", terms.range());
        for (index, stride) in strides.into_iter().enumerate() {
            bias.set(&format!("strides.{index}"), stride as i128);
        }
        terms
    });
    let plan = library.create(&problem).unwrap();
    // SAFETY: the memory is mapped as far as the tensors say.
    unsafe { library.try_run(plan, &given) }.unwrap();
    library.destroy(plan);
    output.rows(element)
}

/// Where a row lies does not change what it is, up to the order of sums.
fn check(element: Element, found: &[f64], expected: &[f64], what: &str) {
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let most = 8.0 * element.roundoff() * expected.abs().max(0.1);
        assert!((found - expected).abs() <= most, "{what}, element {index}: {found}, not {expected}");
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn tensors_of_many_gigabytes() {
    for element in Element::ALL {
        let expected = attend(element, None, None);
        assert!(expected.iter().any(|&value| value != 0.0));
        // The last row begins beyond 2^32 elements, and beyond 2^31 and 2^32 bytes.
        for (tensor, dimension) in
            [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
        {
            let steps = SIZES[dimension] - 1;
            let stride = ((1_usize << 32) / steps).next_multiple_of(8) + 24;
            let found = attend(element, Some((tensor, dimension, stride)), None);
            check(element, &found, &expected, &format!("{element:?}, tensor {tensor}, dimension {dimension}"));
        }
    }
}

#[test]
fn a_bias_of_many_gigabytes() {
    let [batch, heads, rows, _] = SIZES;
    let near = [heads * rows * rows, rows * rows, rows, 1];
    for element in [Element::F16, Element::F32] {
        let expected = attend(element, None, Some(near));
        for (dimension, size) in [batch, heads, rows, rows].into_iter().enumerate() {
            let mut strides = near;
            strides[dimension] = (1 << 32) / (size - 1) + 1001;
            let found = attend(element, None, Some(strides));
            check(element, &found, &expected, &format!("{element:?}, dimension {dimension} of the bias"));
        }
    }
}
