//! Tensors of a call: a list of operands by number, the same for device memory and the host's.

use std::ffi::c_void;
use std::slice;

use api::Operand;

use crate::problem::{
    FLASHCORE_DTYPE_BF16, FLASHCORE_DTYPE_E4M3, FLASHCORE_DTYPE_E5M2, FLASHCORE_DTYPE_F16, FLASHCORE_DTYPE_F32,
    FLASHCORE_DTYPE_F64, FLASHCORE_DTYPE_I32, FLASHCORE_DTYPE_I64, check_pointer,
};
use crate::status::Failure;

/// In the place of an operand: device memory that the kernels of a launch use among themselves, of
/// flashcore_plan_workspace_bytes() bytes at least, 16-byte aligned. It is used by nobody else until the launch has
/// finished, or while a graph of it is executed. Without it a launch takes the workspace of the stream, which a captured
/// launch does not have. A run takes none.
pub const FLASHCORE_WORKSPACE: i32 = -1;
/// In the place of an operand: no tensor, but the tokens of a launch, in `bytes`, at most those of the problem of an append
/// or a merge. Without it they are those of the problem.
pub const FLASHCORE_TOKENS: i32 = -2;

/// A tensor of a call: device memory for a launch, the host's for a run.
///
/// `strides` are distances in elements of the operands whose strides come with each call, and zeros of all others, whose
/// strides are in the problem. A stride of 0 repeats an element. In order:
///
/// - FLASHCORE_BIAS: from one batch to the next, query head, query row, key.
/// - FLASHCORE_Q_SCALE, FLASHCORE_K_SCALE, FLASHCORE_V_SCALE: from one sequence of the batch to the next, wherever its rows
///   lie; batch of the tensor, or page of a paged cache; row in its batch or page; KV head; query head of those that share
///   a KV head, for the query alone. All 0 is one scale of the tensor, {0, 0, 0, 1} one for each KV head.
/// - FLASHCORE_PART_OUTPUTS, FLASHCORE_PART_LSES: from one part to the next. Or each part has an entry, in their order, with
///   zeros; a launch takes no more than two.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// FLASHCORE_QUERY or another operand, FLASHCORE_WORKSPACE, or FLASHCORE_TOKENS.
    pub operand: i32,
    /// FLASHCORE_DTYPE_*: the type of the elements, which must be that of the plan.
    pub dtype: i32,
    /// The first element: 16-byte aligned for tensors of the problem's dtype on a GPU, else aligned for its type. Null with
    /// 0 bytes is no tensor.
    pub data: *mut c_void,
    /// Bytes from the first element on, those between rows included; as many as the problem's strides reach, or more.
    pub bytes: u64,
    /// Strides of some operands, else zeros.
    pub strides: [u64; 5],
}

/// Bytes of an element; `None` of what is no type.
const fn element_bytes(dtype: i32) -> Option<usize> {
    match dtype {
        FLASHCORE_DTYPE_E4M3 | FLASHCORE_DTYPE_E5M2 => Some(1),
        FLASHCORE_DTYPE_F16 | FLASHCORE_DTYPE_BF16 => Some(2),
        FLASHCORE_DTYPE_F32 | FLASHCORE_DTYPE_I32 => Some(4),
        FLASHCORE_DTYPE_F64 | FLASHCORE_DTYPE_I64 => Some(8),
        _ => None,
    }
}

const fn dtype_name(dtype: i32) -> &'static str {
    match dtype {
        FLASHCORE_DTYPE_F16 => "FLASHCORE_DTYPE_F16",
        FLASHCORE_DTYPE_BF16 => "FLASHCORE_DTYPE_BF16",
        FLASHCORE_DTYPE_F32 => "FLASHCORE_DTYPE_F32",
        FLASHCORE_DTYPE_F64 => "FLASHCORE_DTYPE_F64",
        FLASHCORE_DTYPE_E4M3 => "FLASHCORE_DTYPE_E4M3",
        FLASHCORE_DTYPE_E5M2 => "FLASHCORE_DTYPE_E5M2",
        FLASHCORE_DTYPE_I32 => "FLASHCORE_DTYPE_I32",
        FLASHCORE_DTYPE_I64 => "FLASHCORE_DTYPE_I64",
        _ => "no type",
    }
}

/// Strides that come with each call.
const fn strides_of(operand: Operand) -> usize {
    match operand {
        Operand::Bias => 4,
        Operand::QScale | Operand::KScale | Operand::VScale => 5,
        Operand::PartOutputs | Operand::PartLses => 1,
        _ => 0,
    }
}

/// True for operands of which each part has one.
const fn is_list(operand: Operand) -> bool {
    matches!(operand, Operand::PartOutputs | Operand::PartLses)
}

impl Tensor {
    fn operand(&self, index: usize) -> Result<Operand, Failure> {
        let given = self.operand;
        let known = usize::try_from(given).ok().and_then(|number| Operand::ALL.get(number.checked_sub(1)?)).copied();
        known.ok_or_else(|| {
            let count = Operand::ALL.len();
            Failure::argument(format!(
                "tensors[{index}].operand is {given}; it must be an operand, FLASHCORE_QUERY and so on, from 1 to {count}, \
                 FLASHCORE_WORKSPACE, or FLASHCORE_TOKENS"
            ))
        })
    }

    /// Checks everything but what the plan knows. False if there is no tensor.
    fn check(&self, operand: Operand) -> Result<bool, Failure> {
        let (name, data, bytes) = (operand.name(), self.data, self.bytes);
        let refuse = |words: String| Err(Failure::argument(format!("tensors.{name} {words}")));
        let Some(element) = element_bytes(self.dtype) else {
            return refuse(format!("has dtype {}; it must be one of FLASHCORE_DTYPE_*", self.dtype));
        };
        let strides = self.strides.iter().enumerate().skip(strides_of(operand));
        if let Some((index, stride)) = strides.into_iter().find(|&(_, &stride)| stride != 0) {
            return refuse(format!(
                "has strides[{index}] {stride}; it must be 0, because its strides are in the problem"
            ));
        }
        if data.is_null() {
            return if bytes == 0 {
                Ok(false)
            } else {
                refuse(format!("is null and has {bytes} bytes; it must not be null"))
            };
        }
        if !data.addr().is_multiple_of(element) {
            return refuse(format!("is {data:p}; it must be a multiple of {element}"));
        }
        let length = usize::try_from(bytes).ok().filter(|&bytes| isize::try_from(bytes).is_ok());
        if length.and_then(|bytes| data.addr().checked_add(bytes)).is_none() {
            return refuse(format!("is {data:p} and has {bytes} bytes; it must end within the address space"));
        }
        if !bytes.is_multiple_of(element as u64) {
            return refuse(format!("has {bytes} bytes; its elements have {element} each"));
        }
        Ok(true)
    }

    pub(crate) fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// The bytes that it holds, which fit the address space.
    const fn length(&self) -> usize {
        self.bytes as usize
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (start, other_start) = (self.data.addr(), other.data.addr());
        self.bytes > 0 && other.bytes > 0 && start < other_start + other.length() && other_start < start + self.length()
    }

    fn is_same(&self, other: &Self) -> bool {
        self.data == other.data && self.bytes == other.bytes
    }

    /// # Safety
    ///
    /// The memory can be read and is not written for the lifetime chosen; any bytes are a `T`, whose size divides that of
    /// the elements.
    pub(crate) unsafe fn slice<'a, T>(&self) -> &'a [T] {
        // SAFETY: not null, aligned and within the address space by `check`; the rest by the contract.
        unsafe { slice::from_raw_parts(self.data.cast_const().cast(), self.length() / size_of::<T>()) }
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the memory for the lifetime chosen; any bytes are a `T`, whose size divides that of the
    /// elements.
    pub(crate) unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        // SAFETY: not null, aligned and within the address space by `check`; the rest by the contract.
        unsafe { slice::from_raw_parts_mut(self.data.cast(), self.length() / size_of::<T>()) }
    }

    /// The strides, as sizes.
    pub(crate) fn sizes(&self, operand: Operand) -> Result<[usize; 5], Failure> {
        let mut sizes = [0; 5];
        for (index, (size, stride)) in sizes.iter_mut().zip(self.strides).enumerate() {
            *size = usize::try_from(stride).map_err(|_| {
                let (name, most) = (operand.name(), usize::MAX);
                Failure::argument(format!("tensors.{name} has strides[{index}] {stride}; it may be at most {most}"))
            })?;
        }
        Ok(sizes)
    }
}

/// Place of the value cache.
pub(crate) enum ValueCache {
    /// Apart from the key cache.
    Apart,
    /// In one memory with the key cache, `bytes` past its beginning.
    InKeyCache { memory: Tensor, bytes: usize },
}

/// The tensors of a call, checked as far as that needs no plan.
pub(crate) struct Tensors {
    entries: Vec<(Operand, Tensor)>,
    pub(crate) workspace: Option<Tensor>,
    /// Tokens of a launch.
    pub(crate) tokens: Option<usize>,
}

/// No call has more: two for each part of a merge, and some.
const MAX_TENSORS: u64 = 1024;

impl Tensors {
    /// # Safety
    ///
    /// `tensors` must be null, which is an error unless `count` is 0, or point to as many tensors.
    pub(crate) unsafe fn read(tensors: *const Tensor, count: u64) -> Result<Self, Failure> {
        let mut read =
            Self { entries: Vec::with_capacity(count.min(MAX_TENSORS) as usize), workspace: None, tokens: None };
        if count == 0 {
            return Ok(read);
        }
        if count > MAX_TENSORS {
            return Err(Failure::argument(format!("count is {count}; a call has at most {MAX_TENSORS} tensors")));
        }
        check_pointer("tensors", tensors)?;
        // SAFETY: not null and aligned, and the caller promises as many.
        let given = unsafe { slice::from_raw_parts(tensors, count as usize) };
        let mut seen = 0_u64;
        for (index, tensor) in given.iter().enumerate() {
            match tensor.operand {
                FLASHCORE_WORKSPACE => read.workspace = Some(*tensor).filter(|tensor| !tensor.data.is_null()),
                FLASHCORE_TOKENS => read.tokens = Some(usize::try_from(tensor.bytes).unwrap_or(usize::MAX)),
                _ => {
                    let operand = tensor.operand(index)?;
                    if !is_list(operand) && seen & 1 << operand as u32 != 0 {
                        let name = operand.name();
                        return Err(Failure::argument(format!(
                            "tensors[{index}] is a second {name}; there may be one"
                        )));
                    }
                    seen |= 1 << operand as u32;
                    if tensor.check(operand)? {
                        read.entries.push((operand, *tensor));
                    }
                }
            }
        }
        Ok(read)
    }

    pub(crate) fn get(&self, operand: Operand) -> Option<&Tensor> {
        self.all(operand).next()
    }

    /// Every tensor of an operand: of those of which each part has one.
    pub(crate) fn all(&self, operand: Operand) -> impl Iterator<Item = &Tensor> {
        self.entries.iter().filter(move |entry| entry.0 == operand).map(|(_, tensor)| tensor)
    }

    /// The address of an operand; 0 without it.
    pub(crate) fn address(&self, operand: Operand) -> u64 {
        self.get(operand).map_or(0, Tensor::address)
    }

    /// Checks element types against those of a plan, and that the plan has the operands.
    pub(crate) fn check_types(&self, expected: impl Fn(Operand) -> Option<i32>) -> Result<(), Failure> {
        for (operand, tensor) in &self.entries {
            let name = operand.name();
            let Some(expected) = expected(*operand) else {
                return Err(Failure::argument(format!("{name} was given; the problem has it switched off")));
            };
            if expected != tensor.dtype {
                let (given, expected) = (dtype_name(tensor.dtype), dtype_name(expected));
                return Err(Failure::argument(format!("tensors.{name} has dtype {given}; the plan needs {expected}")));
            }
        }
        Ok(())
    }

    /// Checks the memory of a run: what is written is apart from everything else. A query output may be the query, and one
    /// cache may lie among the rows of the other.
    pub(crate) fn check_run(&self, is_written: impl Fn(Operand) -> bool) -> Result<(), Failure> {
        if self.workspace.is_some() {
            return Err(Failure::argument("tensors has FLASHCORE_WORKSPACE; it is for a launch, and a run takes none"));
        }
        if let Some(tokens) = self.tokens {
            let message =
                format!("FLASHCORE_TOKENS is {tokens}; it is for a launch, and a run has those of the problem");
            return Err(Failure::argument(message));
        }
        for (index, (operand, tensor)) in self.entries.iter().enumerate().filter(|(_, entry)| is_written(entry.0)) {
            for (other_index, (other, other_tensor)) in self.entries.iter().enumerate() {
                let is_allowed = match (*operand, *other) {
                    (Operand::QueryOutput, Operand::Query) => tensor.is_same(other_tensor),
                    (Operand::KeyCache, Operand::ValueCache) | (Operand::ValueCache, Operand::KeyCache) => true,
                    _ => index == other_index,
                };
                if !is_allowed && tensor.overlaps(other_tensor) {
                    let (operand, other) = (operand.name(), other.name());
                    return Err(Failure::argument(format!(
                        "tensors.{operand} overlaps tensors.{other}; what is written must be apart"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The query, unless it is the query output.
    pub(crate) fn query_apart(&self) -> Option<&Tensor> {
        let output = self.get(Operand::QueryOutput);
        self.get(Operand::Query).filter(|query| !output.is_some_and(|output| output.is_same(query)))
    }

    /// The place of the value cache.
    pub(crate) fn caches(&self) -> Result<ValueCache, Failure> {
        let (Some(key), Some(value)) = (self.get(Operand::KeyCache), self.get(Operand::ValueCache)) else {
            return Ok(ValueCache::Apart);
        };
        if !key.overlaps(value) {
            return Ok(ValueCache::Apart);
        }
        let Some(bytes) = value.data.addr().checked_sub(key.data.addr()) else {
            return Err(Failure::argument(
                "tensors.value_cache begins before tensors.key_cache, which it overlaps; of caches in one memory, keys come \
                 first",
            ));
        };
        let end = key.bytes.max(bytes as u64 + value.bytes);
        Ok(ValueCache::InKeyCache { memory: Tensor { bytes: end, ..*key }, bytes })
    }
}
