//! Memory checks: refuse what does not fit this machine before it is made.
//!
//! A request that is too large ends a process without a word, at once or when the pages are touched. So sizes that come
//! from arguments and files are held against what is there before anything is allocated.

use core::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use flashcore_problem::{DType, Problem, ProblemError, Shape, Strides};

/// More memory than there is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct TooLarge {
    /// The thing that does not fit.
    pub what: String,
    /// The bytes it needs; nothing where the number does not fit 64 bits.
    pub bytes: Option<u64>,
    /// The bytes there are; nothing where the system does not say.
    pub available: Option<u64>,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, bytes, available } = self;
        match bytes {
            Some(bytes) => write!(formatter, "{what} would take at least {bytes} bytes of memory ({})", size(*bytes))?,
            None => write!(formatter, "{what} would take more bytes of memory than 64 bits count")?,
        }
        match available {
            Some(available) => write!(formatter, ", and {} are available", size(*available))?,
            None => formatter.write_str(", and the system does not give them")?,
        }
        formatter.write_str("; a smaller problem, or a larger machine, is needed")
    }
}

/// A number of bytes in the unit that leaves few digits.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (bytes.max(1).ilog2() / 10) as usize;
    if unit == 0 {
        format!("{bytes} bytes")
    } else {
        format!("{:.1} {}", bytes as f64 / 1024f64.powi(unit as i32), UNITS[unit])
    }
}

/// Holds a number of bytes against the memory that is available; `None` is a number that overflowed.
pub fn require(what: &str, bytes: Option<u64>) -> Result<(), TooLarge> {
    require_of(what, bytes, available())
}

fn require_of(what: &str, bytes: Option<u64>, available: Option<u64>) -> Result<(), TooLarge> {
    let too_large = || TooLarge { what: what.to_owned(), bytes, available };
    let needed = bytes.ok_or_else(too_large)?;
    if available.is_some_and(|available| needed > available) {
        return Err(too_large());
    }
    // What a system does not say beforehand, it may say when it is asked for the memory.
    let length = usize::try_from(needed).map_err(|_| too_large())?;
    Vec::<u8>::new().try_reserve_exact(length).map_err(|_| TooLarge { available: None, ..too_large() })
}

/// Reason why a problem cannot be computed here.
#[derive(Debug, thiserror::Error)]
pub enum Impossible {
    /// It is no problem.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<ProblemError>),
    /// It is larger than the memory.
    #[error(transparent)]
    Memory(#[from] TooLarge),
}

fn valid(problem: &Problem) -> Result<(), Impossible> {
    let errors = problem.errors();
    if errors.is_empty() { Ok(()) } else { Err(Impossible::Invalid(errors)) }
}

/// Checks that a problem can be computed: it is valid, and twice its tensors fit the memory.
pub fn require_tensors(problem: &Problem) -> Result<(), Impossible> {
    valid(problem)?;
    let bytes = input_bytes(problem).zip(output_bytes(problem));
    let bytes = bytes.and_then(|(inputs, outputs)| inputs.checked_add(outputs)?.checked_mul(2));
    Ok(require(&format!("{problem}"), bytes)?)
}

/// Checks that the outputs of a problem can be judged as a whole: it is valid, and what the oracle and the reference compute
/// in `f64` fits the memory beside the tensors.
pub fn require_judging(problem: &Problem, repeats: usize) -> Result<(), Impossible> {
    valid(problem)?;
    Ok(require(&format!("judging {problem}"), judging_bytes(problem, repeats as u64))?)
}

/// Bytes of the outputs of a problem.
pub fn output_bytes(problem: &Problem) -> Option<u64> {
    let output = tensor_bytes(problem.dtypes().output, problem.output_shape(), problem.strides().output)?;
    let rows = if problem.lse { output_rows(problem)? } else { 0 };
    output.checked_add(rows.checked_mul(4)?)
}

fn input_bytes(problem: &Problem) -> Option<u64> {
    let strides = problem.strides();
    let types = problem.dtypes();
    let query = tensor_bytes(types.query, problem.query_shape(), strides.query)?;
    let key = tensor_bytes(types.key_value, problem.key_shape(), strides.key)?;
    let value = tensor_bytes(types.key_value, problem.value_shape(), strides.value)?;
    let bias = if problem.bias {
        let scores = (problem.query_length as u64).checked_mul(problem.key_length as u64)?;
        scores.checked_mul(problem.query_heads as u64)?.checked_mul(4)?
    } else {
        0
    };
    let tables = (problem.aux_f32 as u64).checked_add(problem.aux_i32 as u64)?.checked_mul(4)?;
    query.checked_add(key)?.checked_add(value)?.checked_add(bias)?.checked_add(tables)
}

/// At least what `Yardstick` and the runs need at a time: the tensors twice, operands and results in `f64`.
fn judging_bytes(problem: &Problem, repeats: u64) -> Option<u64> {
    const WIDE: u64 = 8;
    /// Bytes of a row's place, and of the vector of its results.
    const ROW: u64 = 24 + 40;
    let elements = |shape: Shape| Some(shape.elements()? as u64);
    let operands = elements(problem.query_shape())?
        .checked_add(elements(problem.key_shape())?)?
        .checked_add(elements(problem.value_shape())?)?
        .checked_mul(WIDE)?;
    let results = elements(problem.output_shape())?
        .checked_mul(2 * WIDE)?
        .checked_add(output_rows(problem)?.checked_mul(ROW)?)?;
    let outputs = output_bytes(problem)?.checked_mul(repeats.checked_add(1)?)?;
    input_bytes(problem)?.checked_mul(2)?.checked_add(operands)?.checked_add(results)?.checked_add(outputs)
}

fn output_rows(problem: &Problem) -> Option<u64> {
    Some(Shape { columns: 1, ..problem.output_shape() }.elements()? as u64)
}

fn tensor_bytes(dtype: DType, shape: Shape, strides: Strides) -> Option<u64> {
    (strides.extent(shape)? as u64).checked_mul(dtype.size_bytes() as u64)
}

/// Reads a file, if it fits the memory.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let too_large = |error: TooLarge| io::Error::new(io::ErrorKind::OutOfMemory, error);
    require("the file", Some(length)).map_err(too_large)?;
    // A pipe or a device has no length; what it gives ends with the memory.
    let most = available().unwrap_or(u64::MAX);
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize)?;
    let read = file.take(most).read_to_end(&mut bytes)?;
    if read as u64 == most {
        return Err(too_large(TooLarge { what: "the file".to_owned(), bytes: Some(most), available: Some(most) }));
    }
    Ok(bytes)
}

/// Bytes that can be had without taking them from others: of the machine, of the limits of the process and of its group.
fn available() -> Option<u64> {
    let read = |file: &str| fs::read_to_string(file).ok();
    let limits = [
        read("/proc/meminfo").and_then(|text| of_machine(&text)),
        read("/proc/self/limits")
            .zip(read("/proc/self/status"))
            .and_then(|(limits, status)| of_process(&limits, &status)),
        read("/sys/fs/cgroup/memory.max")
            .zip(read("/sys/fs/cgroup/memory.current"))
            .zip(read("/sys/fs/cgroup/memory.stat"))
            .and_then(|((most, used), stat)| of_group(&most, &used, &stat)),
    ];
    limits.into_iter().flatten().min()
}

/// The number of a line such as `MemAvailable:    1234 kB`, in bytes.
fn kilobytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn of_machine(meminfo: &str) -> Option<u64> {
    kilobytes(meminfo, "MemAvailable")?.checked_add(kilobytes(meminfo, "SwapFree").unwrap_or(0))
}

/// The bytes that `ulimit -v` and `ulimit -d` leave.
fn of_process(limits: &str, status: &str) -> Option<u64> {
    let left = |limit: &str, used: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let most: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(most.saturating_sub(kilobytes(status, used)?))
    };
    [left("Max address space", "VmSize"), left("Max data size", "VmData")].into_iter().flatten().min()
}

/// The bytes that the limit of a container leaves; cached files make way.
fn of_group(most: &str, used: &str, stat: &str) -> Option<u64> {
    let (most, used): (u64, u64) = (most.trim().parse().ok()?, used.trim().parse().ok()?);
    let cached = stat.lines().find_map(|line| line.strip_prefix("file ")?.trim().parse().ok()).unwrap_or(0);
    Some(most.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_read_from_the_system() {
        let meminfo = "MemTotal:  100 kB\nMemFree:  5 kB\nMemAvailable:     10 kB\nSwapFree: 2 kB\n";
        assert_eq!(of_machine(meminfo), Some(12 << 10));
        assert_eq!(of_machine("MemTotal: 100 kB\n"), None);
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         1048576              unlimited            bytes     \n";
        assert_eq!(of_process(limits, "VmSize:\t   24 kB\nVmData:\t 8 kB\n"), Some(1000 << 10));
        assert_eq!(of_process(limits, "VmSize:\t 2000 kB\n"), Some(0));
        assert_eq!(of_process("", "VmSize:\t 24 kB\n"), None);
        assert_eq!(of_group("1000\n", "900\n", "anon 300\nfile 600\n"), Some(700));
        assert_eq!(of_group("max\n", "900\n", ""), None);
    }

    #[test]
    fn more_than_there_is_is_refused_with_the_numbers() {
        let check = |bytes, available, expected: Option<&str>| {
            let said = require_of("it", bytes, available).err().map(|error| error.to_string());
            assert_eq!(said.as_deref(), expected);
        };
        let wanted = "; a smaller problem, or a larger machine, is needed";
        check(Some(1 << 20), Some(1 << 20), None);
        check(
            Some(1 << 40),
            Some(3 << 29),
            Some(&format!(
                "it would take at least 1099511627776 bytes of memory (1.0 TiB), and 1.5 GiB are available{wanted}"
            )),
        );
        check(
            Some(1025),
            Some(1000),
            Some(&format!(
                "it would take at least 1025 bytes of memory (1.0 KiB), and 1000 bytes are available{wanted}"
            )),
        );
        check(
            None,
            Some(1),
            Some(&format!("it would take more bytes of memory than 64 bits count, and 1 bytes are available{wanted}")),
        );
        check(
            Some(1 << 62),
            None,
            Some(&format!(
                "it would take at least 4611686018427387904 bytes of memory (4.0 EiB), and the system does not give them{wanted}"
            )),
        );
    }

    #[test]
    fn problems_are_counted() {
        let mut problem = Problem::new(2, 4, 100, 64, DType::F16);
        (problem.key_heads, problem.key_length, problem.value_dim) = (2, 300, 32);
        let (query, key, value) = (2 * 4 * 100 * 64, 2 * 2 * 300 * 64, 2 * 2 * 300 * 32);
        assert_eq!(input_bytes(&problem), Some(2 * (query + key + value)));
        assert_eq!(output_bytes(&problem), Some(2 * 2 * 4 * 100 * 32));
        problem.lse = true;
        assert_eq!(output_bytes(&problem), Some(2 * 2 * 4 * 100 * 32 + 4 * 2 * 4 * 100));
        assert!(require_tensors(&problem).is_ok() && require_judging(&problem, 1).is_ok());
        problem.key_heads = 3;
        assert_eq!(
            require_tensors(&problem).expect_err("no problem").to_string(),
            "query_heads is 4 and key_heads is 3; query_heads must be a multiple of key_heads"
        );
        let large = Problem::new(1, 1, 1_000_000_000_000, 64, DType::F16);
        let Err(Impossible::Memory(tensors)) = require_tensors(&large) else { panic!("it does not fit") };
        assert_eq!(tensors.bytes, Some(2 * 4 * 128_000_000_000_000));
        let Err(Impossible::Memory(judging)) = require_judging(&large, 1) else { panic!("it does not fit") };
        assert_eq!(judging.bytes, Some(1_000_000_000_000 * (2 * 3 * 128 + 3 * 512 + 1024 + 64 + 2 * 128)));
        let larger = Problem::new(1, 1, 1 << 55, 64, DType::F16);
        let Err(Impossible::Memory(judging)) = require_judging(&larger, 1) else { panic!("it does not fit") };
        assert_eq!(judging.bytes, None);
    }
}
