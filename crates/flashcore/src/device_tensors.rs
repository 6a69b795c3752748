//! Tensors that lie on a GPU, by their addresses.

use flashcore_problem::{Problem, Shape, Strides};

use crate::Error;

/// What addresses of query, key, value and output must be a multiple of: kernels read and write 16 bytes at a time.
pub const TENSOR_ALIGNMENT: u64 = 16;
/// What the address of the log-sum-exp must be a multiple of.
const LOG_SUM_EXP_ALIGNMENT: u64 = 4;

/// Device addresses of the tensors of a problem: `CUdeviceptr` of the driver, `device_ptr()` of `cudarc`, `data_ptr()`
/// of `PyTorch`.
///
/// Each address is that of the first element; the others lie where the problem's [strides](Problem::strides) say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// ask for it.
    pub log_sum_exp: u64,
}

impl DeviceTensors {
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
        if !problem.log_sum_exp {
            let (argument, address) = ("log_sum_exp", self.log_sum_exp);
            return if address == 0 { Ok(()) } else { Err(Error::Unexpected { argument, address }) };
        }
        // No more rows than elements of the output, of which there are at most `isize::MAX`.
        let rows = (problem.batch * problem.query_heads * problem.query_length) as u64;
        let bytes = rows.checked_mul(4).ok_or(Error::AddressOverflow {
            argument: "log_sum_exp",
            address: self.log_sum_exp,
            bytes: u64::MAX,
        })?;
        check_address("log_sum_exp", self.log_sum_exp, bytes, LOG_SUM_EXP_ALIGNMENT)?;
        tensors.into_iter().try_for_each(|tensor| check_apart(("log_sum_exp", self.log_sum_exp, bytes), tensor))
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

    const GOOD: DeviceTensors =
        DeviceTensors { query: 0x1000, key: 0x2000, value: 0x3000, output: 0x4000, log_sum_exp: 0x5004 };

    fn check(change: impl FnOnce(&mut Problem, &mut DeviceTensors), expected: &Result<(), Error>) {
        let mut problem = Problem::new(1, 2, 5, 8, DType::F16);
        problem.log_sum_exp = true;
        let mut tensors = GOOD;
        change(&mut problem, &mut tensors);
        assert_eq!(&tensors.validate(&problem), expected, "{tensors:x?}");
    }

    #[test]
    fn addresses_are_checked() {
        check(|_, _| {}, &Ok(()));
        check(|_, tensors| tensors.key = 0, &Err(Error::Null { argument: "key" }));
        check(|_, tensors| tensors.log_sum_exp = 0, &Err(Error::Null { argument: "log_sum_exp" }));
        check(
            |_, tensors| tensors.output = 0x4008,
            &Err(Error::Misaligned { argument: "output", address: 0x4008, multiple: 16 }),
        );
        check(
            |_, tensors| tensors.log_sum_exp = 0x5002,
            &Err(Error::Misaligned { argument: "log_sum_exp", address: 0x5002, multiple: 4 }),
        );
        check(
            |_, tensors| tensors.value = u64::MAX - 15,
            &Err(Error::AddressOverflow { argument: "value", address: u64::MAX - 15, bytes: 160 }),
        );
        check(
            |problem, _| problem.log_sum_exp = false,
            &Err(Error::Unexpected { argument: "log_sum_exp", address: 0x5004 }),
        );
    }

    #[test]
    fn what_is_written_has_its_own_place() {
        check(|_, tensors| tensors.key = tensors.value, &Ok(()));
        check(
            |_, tensors| tensors.output = tensors.query,
            &Err(Error::Aliased { written: "output", other: "query", address: 0x1000 }),
        );
        check(
            |_, tensors| tensors.log_sum_exp = tensors.output,
            &Err(Error::Aliased { written: "log_sum_exp", other: "output", address: 0x4000 }),
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
                *tensors = DeviceTensors { query: 0, key: 0, value: 0, output: 0, log_sum_exp: 0 };
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
