//! Tensors that lie on a GPU, by their addresses.

use flashcore_problem::{BiasStrides, Problem, Shape, Strides};

use crate::Error;

/// What addresses of query, key, value and output must be a multiple of: kernels read and write 16 bytes at a time.
pub const TENSOR_ALIGNMENT: u64 = 16;
/// What the addresses of the other tensors must be a multiple of.
const NUMBER_ALIGNMENT: u64 = 4;

/// Device addresses of the tensors of a problem: `CUdeviceptr` of the driver, `device_ptr()` of `cudarc`, `data_ptr()`
/// of `PyTorch`.
///
/// Each address is that of the first element; the others lie where the problem's [strides](Problem::strides) say.
///
/// ```
/// # use flashcore::DeviceTensors;
/// # let (query, key, value, output, rows) = (0x1000, 0x2000, 0x3000, 0x4000, 0x5000);
/// let tensors = DeviceTensors::new(query, key, value, output).with_lse(rows);
/// # assert_eq!(tensors.lse, rows);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceTensors {
    /// Of the query.
    pub query: u64,
    /// Of the key.
    pub key: u64,
    /// Of the value.
    pub value: u64,
    /// Of the output.
    pub output: u64,
    /// Of the log-sum-exp, an `f32` per row, contiguous `[batch, query head, query row]`; 0 where the problem does not
    /// ask for it, like the others below.
    pub lse: u64,
    /// Of the key lengths, a `u32` per batch. One that is larger than the problem's key length counts as that.
    pub seqused_k: u64,
    /// Of the slopes, an `f32` per query head.
    pub alibi_slopes: u64,
    /// Of the sinks, an `f32` per query head.
    pub sinks: u64,
    /// Of the bias, `f32`.
    pub bias: u64,
    /// Where the terms of the bias lie.
    pub bias_strides: BiasStrides,
    /// Of the table of numbers that expressions read, `f32`.
    pub aux_f32: u64,
    /// Of the table of integers that expressions read, `i32`.
    pub aux_i32: u64,
    /// Of [`Plan::workspace_bytes`](crate::Plan::workspace_bytes) bytes that nobody else uses until the launch has
    /// finished; 0 for the workspace that the plan has for the stream.
    pub workspace: u64,
}

impl DeviceTensors {
    /// Query, key, value and output, and nothing else.
    pub const fn new(query: u64, key: u64, value: u64, output: u64) -> Self {
        let bias_strides = BiasStrides { batch: 0, head: 0, row: 0, key: 0 };
        Self {
            query,
            key,
            value,
            output,
            lse: 0,
            seqused_k: 0,
            alibi_slopes: 0,
            sinks: 0,
            bias: 0,
            bias_strides,
            aux_f32: 0,
            aux_i32: 0,
            workspace: 0,
        }
    }

    /// Adds the log-sum-exp.
    #[must_use]
    pub const fn with_lse(mut self, address: u64) -> Self {
        self.lse = address;
        self
    }

    /// Adds the key lengths.
    #[must_use]
    pub const fn with_seqused_k(mut self, address: u64) -> Self {
        self.seqused_k = address;
        self
    }

    /// Adds the slopes.
    #[must_use]
    pub const fn with_alibi_slopes(mut self, address: u64) -> Self {
        self.alibi_slopes = address;
        self
    }

    /// Adds the sinks.
    #[must_use]
    pub const fn with_sinks(mut self, address: u64) -> Self {
        self.sinks = address;
        self
    }

    /// Adds the bias, and where its terms lie.
    #[must_use]
    pub const fn with_bias(mut self, address: u64, strides: BiasStrides) -> Self {
        (self.bias, self.bias_strides) = (address, strides);
        self
    }

    /// Adds the table of numbers that expressions read.
    #[must_use]
    pub const fn with_aux_f32(mut self, address: u64) -> Self {
        self.aux_f32 = address;
        self
    }

    /// Adds the table of integers that expressions read.
    #[must_use]
    pub const fn with_aux_i32(mut self, address: u64) -> Self {
        self.aux_i32 = address;
        self
    }

    /// Brings a workspace for this launch.
    #[must_use]
    pub const fn with_workspace(mut self, address: u64) -> Self {
        self.workspace = address;
        self
    }

    /// Checks what can be known without the GPU: nothing is null that is needed, everything is aligned and ends within
    /// the address space, and what is written does not begin where something else does.
    ///
    /// Tensors without elements may be anywhere. Of a problem that does not [validate](Problem::validate) nothing is
    /// said but that.
    pub fn validate(&self, problem: &Problem) -> Result<(), Error> {
        problem.validate().map_err(flashcore_problem::Invalid::from)?;
        self.check(problem)
    }

    /// [`validate`](Self::validate) for a problem that is valid. Allocates nothing.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), Error> {
        let strides = problem.strides();
        let size = problem.dtype.size_bytes() as u64;
        // A valid problem's tensors have at most `isize::MAX` bytes.
        let bytes = |strides: Strides, shape: Shape| strides.extent(shape).unwrap_or(usize::MAX) as u64 * size;
        let tensors = [
            ("query", self.query, bytes(strides.query, problem.query_shape())),
            ("key", self.key, bytes(strides.key, problem.key_shape())),
            ("value", self.value, bytes(strides.value, problem.value_shape())),
            ("output", self.output, bytes(strides.output, problem.output_shape())),
        ];
        for (argument, address, bytes) in tensors {
            check_address(argument, address, bytes, TENSOR_ALIGNMENT)?;
        }
        let written = tensors[3];
        for (other, address, bytes) in &tensors[..3] {
            check_apart(written, (*other, *address, *bytes))?;
        }
        if !self.workspace.is_multiple_of(TENSOR_ALIGNMENT) {
            let (argument, address, multiple) = ("workspace", self.workspace, TENSOR_ALIGNMENT);
            return Err(Error::Misaligned { argument, address, multiple });
        }
        for (argument, address, elements) in self.numbers(problem) {
            let Some(elements) = elements else {
                if address != 0 {
                    return Err(Error::Unexpected { argument, address });
                }
                continue;
            };
            let overflow = Error::AddressOverflow { argument, address, bytes: u64::MAX };
            let bytes = elements.checked_mul(4).ok_or(overflow)?;
            check_address(argument, address, bytes, NUMBER_ALIGNMENT)?;
            if argument == "lse" {
                tensors.into_iter().try_for_each(|tensor| check_apart((argument, address, bytes), tensor))?;
            } else {
                check_apart(written, (argument, address, bytes))?;
            }
        }
        Ok(())
    }

    /// The tensors of 4-byte numbers: their addresses, and how many numbers they reach over where the problem has them.
    fn numbers(&self, problem: &Problem) -> [(&'static str, u64, Option<u64>); 7] {
        // No more rows than elements of the output, of which there are at most `isize::MAX`.
        let rows = (problem.batch * problem.query_heads * problem.query_length) as u64;
        let (heads, batches) = (problem.query_heads as u64, problem.batch as u64);
        let entries = |table: usize| (table > 0).then_some(table as u64);
        let terms = self.bias_strides.extent(problem).unwrap_or(usize::MAX) as u64;
        [
            ("lse", self.lse, problem.lse.then_some(rows)),
            ("seqused_k", self.seqused_k, problem.seqused_k.then_some(batches)),
            ("alibi_slopes", self.alibi_slopes, problem.alibi.then_some(heads)),
            ("sinks", self.sinks, problem.sinks.then_some(heads)),
            ("bias", self.bias, problem.bias.then_some(terms)),
            ("aux_f32", self.aux_f32, entries(problem.aux_f32)),
            ("aux_i32", self.aux_i32, entries(problem.aux_i32)),
        ]
    }
}

fn check_address(argument: &'static str, address: u64, bytes: u64, multiple: u64) -> Result<(), Error> {
    if bytes == 0 {
        return Ok(());
    }
    if address == 0 {
        return Err(Error::Null { argument });
    }
    if !address.is_multiple_of(multiple) {
        return Err(Error::Misaligned { argument, address, multiple });
    }
    match address.checked_add(bytes) {
        Some(_) => Ok(()),
        None => Err(Error::AddressOverflow { argument, address, bytes }),
    }
}

/// Tensors may be interleaved, so that ranges overlap and elements do not; two that begin at one place overlap surely.
fn check_apart(written: (&'static str, u64, u64), other: (&'static str, u64, u64)) -> Result<(), Error> {
    let (written, address, bytes) = written;
    let (other, other_address, other_bytes) = other;
    if address == other_address && bytes > 0 && other_bytes > 0 {
        return Err(Error::Aliased { written, other, address });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::DType;

    const GOOD: DeviceTensors = DeviceTensors { lse: 0x5004, ..DeviceTensors::new(0x1000, 0x2000, 0x3000, 0x4000) };

    fn check(change: impl FnOnce(&mut Problem, &mut DeviceTensors), expected: &Result<(), Error>) {
        let mut problem = Problem::new(1, 2, 5, 8, DType::F16);
        problem.lse = true;
        let mut tensors = GOOD;
        change(&mut problem, &mut tensors);
        assert_eq!(&tensors.validate(&problem), expected, "{tensors:x?}");
    }

    #[test]
    fn every_setter_sets_its_field() {
        let strides = BiasStrides { batch: 1, head: 2, row: 3, key: 4 };
        let expected = DeviceTensors {
            query: 1,
            key: 2,
            value: 3,
            output: 4,
            lse: 5,
            seqused_k: 6,
            alibi_slopes: 7,
            sinks: 8,
            bias: 9,
            bias_strides: strides,
            aux_f32: 10,
            aux_i32: 11,
            workspace: 12,
        };
        let set = DeviceTensors::new(1, 2, 3, 4)
            .with_lse(5)
            .with_seqused_k(6)
            .with_alibi_slopes(7)
            .with_sinks(8)
            .with_bias(9, strides)
            .with_aux_f32(10)
            .with_aux_i32(11)
            .with_workspace(12);
        assert_eq!(set, expected);
    }

    #[test]
    fn addresses_are_checked() {
        check(|_, _| {}, &Ok(()));
        check(|_, tensors| tensors.key = 0, &Err(Error::Null { argument: "key" }));
        check(|_, tensors| tensors.lse = 0, &Err(Error::Null { argument: "lse" }));
        check(
            |_, tensors| tensors.output = 0x4008,
            &Err(Error::Misaligned { argument: "output", address: 0x4008, multiple: 16 }),
        );
        check(
            |_, tensors| tensors.lse = 0x5002,
            &Err(Error::Misaligned { argument: "lse", address: 0x5002, multiple: 4 }),
        );
        check(
            |_, tensors| tensors.workspace = 0x6008,
            &Err(Error::Misaligned { argument: "workspace", address: 0x6008, multiple: 16 }),
        );
        check(
            |_, tensors| tensors.value = u64::MAX - 15,
            &Err(Error::AddressOverflow { argument: "value", address: u64::MAX - 15, bytes: 160 }),
        );
        check(|problem, _| problem.lse = false, &Err(Error::Unexpected { argument: "lse", address: 0x5004 }));
    }

    #[test]
    fn what_is_written_has_its_own_place() {
        check(|_, tensors| tensors.key = tensors.value, &Ok(()));
        check(
            |_, tensors| tensors.output = tensors.query,
            &Err(Error::Aliased { written: "output", other: "query", address: 0x1000 }),
        );
        check(
            |_, tensors| tensors.lse = tensors.output,
            &Err(Error::Aliased { written: "lse", other: "output", address: 0x4000 }),
        );
    }

    #[test]
    fn tensors_without_elements_may_be_anywhere() {
        check(
            |problem, tensors| {
                problem.key_length = 0;
                (tensors.key, tensors.value) = (0, 7);
            },
            &Ok(()),
        );
        check(
            |problem, tensors| {
                problem.batch = 0;
                *tensors = DeviceTensors::new(0, 0, 0, 0);
            },
            &Ok(()),
        );
    }

    #[test]
    fn impossible_problems_are_errors() {
        let mut problem = Problem::new(1, 2, 5, 8, DType::F16);
        problem.batch = usize::MAX;
        assert!(matches!(GOOD.validate(&problem), Err(Error::Invalid(_))));
    }
}
