//! Keys that no row attends, and rows that attend no key: what lies there changes neither a bit nor the time.

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{
    Alignment, DType, InputViews, Inputs, Layout, Mask, Outputs, Problem, Strides, Tensor, TensorStrides,
};
use std::time::{Duration, Instant};

/// What lies where nobody looks: numbers, numbers that products in `bf16` take as zero, huge ones, and none.
const FILLINGS: [f64; 5] = [0.5, 1e-39, 1e30, f64::INFINITY, f64::NAN];

/// Sets the rows of a contiguous tensor for which `is_chosen` says so, given batch and row.
fn fill_rows(tensor: &mut Tensor, sizes: [usize; 4], value: f64, is_chosen: impl Fn(usize, usize) -> bool) {
    let [batches, heads, rows, columns] = sizes;
    for (batch, head, row) in
        (0..batches).flat_map(|batch| (0..heads).flat_map(move |head| (0..rows).map(move |row| (batch, head, row))))
    {
        if is_chosen(batch, row) {
            let start = ((batch * heads + head) * rows + row) * columns;
            (start..start + columns).for_each(|index| tensor.set(index, value));
        }
    }
}

fn bits(level: Level, problem: &Problem, inputs: &Inputs) -> (Vec<u8>, Vec<u32>) {
    let mut outputs = Outputs::poisoned(problem);
    attend_with(level, problem, inputs, &mut outputs).unwrap();
    let lse = outputs.lse.unwrap_or_default();
    (outputs.output.data, lse.into_iter().map(f32::to_bits).collect())
}

/// Fills keys, values and query rows that take no part with one thing after the other.
fn check(problem: &Problem, seqused_k: &[u32]) {
    let mut inputs = Inputs::random(problem, 3);
    if problem.seqused_k {
        inputs.seqused_k = Some(seqused_k.to_vec());
    }
    let length = |batch: usize| inputs.seqused_k.as_ref().map_or(problem.key_length, |all| all[batch] as usize);
    let lengths: Vec<usize> = (0..problem.batch).map(length).collect();
    let attends = |batch: usize, row: usize, key: usize| problem.attends(lengths[batch], row, key);
    let is_unattended = |batch: usize, key: usize| !(0..problem.query_length).any(|row| attends(batch, row, key));
    let attends_nothing = |batch: usize, row: usize| !(0..problem.key_length).any(|key| attends(batch, row, key));
    let key_sizes = [problem.batch, problem.key_heads, problem.key_length, problem.head_dim];
    let value_sizes = [problem.batch, problem.key_heads, problem.key_length, problem.value_dim];
    let query_sizes = [problem.batch, problem.query_heads, problem.query_length, problem.head_dim];
    for level in Level::available() {
        let mut expected = None;
        for filling in FILLINGS {
            fill_rows(&mut inputs.key, key_sizes, filling, is_unattended);
            fill_rows(&mut inputs.value, value_sizes, filling, is_unattended);
            fill_rows(&mut inputs.query, query_sizes, filling, attends_nothing);
            let actual = bits(level, problem, &inputs);
            let expected = expected.get_or_insert_with(|| actual.clone());
            assert!(actual == *expected, "{problem} at level {level} with {filling} where nobody looks");
        }
    }
}

/// For a few rows and for many, one head to a key head and more, at every edge that a mask or a length can have.
fn check_rows(change: impl Fn(&mut Problem), seqused_k: &[u32]) {
    for dtype in DType::ALL {
        for (heads, queries, lse) in [((2, 2), 1, true), ((4, 1), 3, false), ((2, 2), 40, false), ((4, 2), 50, true)] {
            let mut problem = Problem::new(2, heads.0, queries, 32, dtype);
            (problem.key_heads, problem.key_length, problem.value_dim) = (heads.1, 400, 24);
            problem.lse = lse;
            change(&mut problem);
            check(&problem, seqused_k);
        }
    }
}

#[test]
fn past_the_key_length() {
    for seqused_k in [[300, 17], [0, 1], [257, 400]] {
        check_rows(|problem| problem.seqused_k = true, &seqused_k);
    }
}

#[test]
fn outside_of_causal_masks() {
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        check_rows(|problem| (problem.seqused_k, problem.mask) = (true, Mask::Causal(alignment)), &[300, 77]);
    }
}

#[test]
fn outside_of_windows() {
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        for (left, right) in [(Some(45), Some(0)), (Some(7), Some(70)), (Some(3), None)] {
            let mask = Mask::Window { left, right, alignment };
            check_rows(|problem| (problem.seqused_k, problem.mask) = (true, mask), &[400, 133]);
        }
    }
}

/// A problem of so many keys, all of which are one row of memory.
fn endless(rows: usize, dtype: DType, mask: Mask) -> Problem {
    let mut problem = Problem::new(1, 1, rows, 8, dtype);
    (problem.key_length, problem.mask) = (1 << 40, mask);
    let of_rows = Strides { batch: 8 * rows, head: 8 * rows, row: 8 };
    let of_keys = Strides { batch: 8, head: 8, row: 0 };
    problem.layout = Layout::Strided(TensorStrides { query: of_rows, key: of_keys, value: of_keys, output: of_rows });
    problem
}

/// Time follows the keys that are attended, not those that there are.
#[test]
fn a_trillion_keys_of_which_few_are_attended() {
    let top_left = Mask::Causal(Alignment::TopLeft);
    let window = Mask::Window { left: Some(9), right: Some(0), alignment: Alignment::BottomRight };
    for level in Level::available() {
        for dtype in DType::ALL {
            for (rows, mask) in [(1, top_left), (1, window), (40, top_left), (40, window)] {
                let problem = endless(rows, dtype, mask);
                let query = Tensor::from_values(dtype, &vec![0.25; 8 * rows]);
                let key = Tensor::from_values(dtype, &[0.5; 8]);
                let value = Tensor::from_values(dtype, &[3.0; 8]);
                let inputs = InputViews::new(&query, &key, &value);
                let mut outputs = Outputs::poisoned(&problem);
                let start = Instant::now();
                attend_with(level, &problem, inputs, &mut outputs).unwrap();
                assert!(start.elapsed() < Duration::from_secs(10), "{:?} for {problem}", start.elapsed());
                // All values are the same.
                let is_three = |output: f64| (output - 3.0).abs() <= 6.0 * dtype.unit_roundoff();
                assert!((0..8 * rows).all(|index| is_three(outputs.output.get(index))), "{problem} at level {level}");
            }
        }
    }
}

#[cfg(unix)]
mod memory {
    #![expect(unsafe_code, reason = "memory that cannot be touched is made by functions of C")]

    use super::*;
    use flashcore_problem::TensorView;
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        fn mmap(
            address: *mut c_void,
            bytes: usize,
            access: c_int,
            flags: c_int,
            file: c_int,
            offset: i64,
        ) -> *mut c_void;
        fn mprotect(address: *mut c_void, bytes: usize, access: c_int) -> c_int;
        fn munmap(address: *mut c_void, bytes: usize) -> c_int;
    }

    const NO_ACCESS: c_int = 0;
    const READ_AND_WRITE: c_int = 3;
    /// Private and of no file, as Linux and macOS number it.
    const ANONYMOUS: c_int = if cfg!(target_os = "macos") { 0x1002 } else { 0x22 };

    /// Memory of which only some bytes can be touched.
    struct Fenced {
        first: *mut u8,
        bytes: usize,
    }

    impl Fenced {
        /// So many bytes, of which those of `open` hold these; both ends of it are ends of pages.
        fn new(bytes: usize, open: usize, content: &[u8]) -> Self {
            // SAFETY: new memory is asked for, of which the part that is made accessible is written.
            unsafe {
                let first = mmap(std::ptr::null_mut(), bytes, NO_ACCESS, ANONYMOUS, -1, 0).cast::<u8>();
                assert!(first.addr() != usize::MAX, "no memory");
                assert_eq!(mprotect(first.add(open).cast(), content.len(), READ_AND_WRITE), 0);
                first.add(open).copy_from(content.as_ptr(), content.len());
                Self { first, bytes }
            }
        }

        fn view(&self, dtype: DType) -> TensorView<'_> {
            // SAFETY: the memory is there as long as `self`, and whoever touches what is fenced off ends the test.
            TensorView { dtype, data: unsafe { std::slice::from_raw_parts(self.first, self.bytes) } }
        }
    }

    impl Drop for Fenced {
        fn drop(&mut self) {
            // SAFETY: nobody has a view of it any more.
            unsafe { munmap(self.first.cast(), self.bytes) };
        }
    }

    /// A cache of 2^16 keys, of which 1024 are attended: the others are not read, which would end the test.
    #[test]
    fn memory_of_unattended_keys_is_not_touched() {
        const KEYS: usize = 1 << 16;
        const USED: usize = 1024;
        let window = Mask::Window { left: Some(USED - 1), right: Some(0), alignment: Alignment::BottomRight };
        for dtype in DType::ALL {
            for (queries, mask, first) in [
                (1, Mask::None, 0),
                (40, Mask::None, 0),
                (40, Mask::Causal(Alignment::BottomRight), 0),
                (1, window, KEYS - USED),
            ] {
                let mut problem = Problem::new(1, 1, queries, 64, dtype);
                (problem.key_length, problem.mask, problem.seqused_k) = (KEYS, mask, first == 0);
                let row = 64 * dtype.size_bytes();
                let used = {
                    let mut small = Problem::new(1, 1, queries, 64, dtype);
                    small.key_length = USED;
                    Inputs::random(&small, 1)
                };
                let [key, value] =
                    [&used.key, &used.value].map(|tensor| Fenced::new(KEYS * row, first * row, &tensor.data));
                let lengths = [USED as u32];
                for level in Level::available() {
                    let mut inputs = InputViews::new(&used.query, key.view(dtype), value.view(dtype));
                    inputs.seqused_k = problem.seqused_k.then_some(&lengths[..]);
                    let mut outputs = Outputs::poisoned(&problem);
                    attend_with(level, &problem, inputs, &mut outputs).unwrap();
                    assert!(
                        (0..64 * queries).all(|index| outputs.output.get(index).is_finite()),
                        "{problem} at {level}"
                    );
                }
            }
        }
    }
}
