//! Structs that begin with their own size, so that callers and library may have different versions of them.
//!
//! A struct grows at its end alone, and a field of zeros is a feature that is off. An older caller's struct is shorter:
//! the fields it lacks are zeros. A newer caller's is longer: what this library does not know must be zeros, because a
//! feature that is on and not computed would be silently wrong.

use std::mem::{MaybeUninit, size_of};

use crate::status::Failure;

/// No struct grows beyond this: a size above it is a field that was never set, and nothing is read by it.
const MOST_BYTES: usize = 4096;

/// A struct of the ABI that begins with `struct_size`.
///
/// # Safety
///
/// The struct is `repr(C)`, its first field is the `u64` of its size, it has no padding that matters, and any bytes,
/// zeros too, are one.
pub(crate) unsafe trait SizedStruct: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// The bytes that no caller may leave out: up to the first field whose zeros mean that something is off.
    const LEAST_BYTES: usize;
}

/// Reads a struct of whatever size the caller says.
///
/// # Safety
///
/// `pointer` must be null, which is an error, or point to a struct that can be read for as many bytes as its first field
/// says.
pub(crate) unsafe fn read<T: SizedStruct>(argument: &str, pointer: *const T) -> Result<T, Failure> {
    check_pointer(argument, pointer)?;
    // SAFETY: not null and aligned, and the caller vouches for the first field.
    let given = unsafe { pointer.cast::<u64>().read() };
    let known = size_of::<T>();
    let size = possible_size::<T>(&format!("{argument}."), given)?;
    for index in known..size {
        // SAFETY: within the bytes that the caller vouches for.
        let byte = unsafe { pointer.cast::<u8>().add(index).read() };
        if byte != 0 {
            return Err(Failure::argument(format!(
                "{argument}.struct_size is {given}, and byte {index} of it is {byte}; this version of flashcore knows \
                 {known} bytes of {}: leave the fields after them 0, or use a newer library",
                T::NAME
            )));
        }
    }
    let mut whole = zeroed::<T>();
    // SAFETY: both have so many bytes, the one by the caller's word and the other by its type, and they are apart; any
    // bytes are such a struct.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut whole).cast::<u8>(), size.min(known)) };
    Ok(whole)
}

/// A size that some version of the struct has, or may have one day. `owner` names the struct in the message, with a point.
pub(crate) fn possible_size<T: SizedStruct>(owner: &str, given: u64) -> Result<usize, Failure> {
    let is_possible =
        |size: usize| (T::LEAST_BYTES..=MOST_BYTES).contains(&size) && size.is_multiple_of(align_of::<T>());
    usize::try_from(given).ok().filter(|&size| is_possible(size)).ok_or_else(|| {
        let (name, known) = (T::NAME, size_of::<T>());
        Failure::argument(format!("{owner}struct_size is {given}; it must be sizeof({name}), which is {known}"))
    })
}

/// Writes as much of a struct as the caller has room for, which is `bytes`, and zeros after it.
///
/// # Safety
///
/// So many bytes can be written at `target`.
pub(crate) unsafe fn write<T: SizedStruct>(target: *mut T, bytes: usize, value: &T) {
    let (known, target) = (bytes.min(size_of::<T>()), target.cast::<u8>());
    // SAFETY: the contract of this function; the struct has as many bytes as are copied.
    unsafe {
        target.copy_from_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), known);
        target.add(known).write_bytes(0, bytes - known);
    }
}

/// A struct of zeros that says its own size.
pub(crate) fn zeroed<T: SizedStruct>() -> T {
    let mut zeroed = MaybeUninit::<T>::zeroed();
    // SAFETY: the first field is the `u64` of its size, and any bytes are such a struct.
    unsafe {
        zeroed.as_mut_ptr().cast::<u64>().write(size_of::<T>() as u64);
        zeroed.assume_init()
    }
}

/// Checks that a pointer is not null and is aligned.
pub(crate) fn check_pointer<T>(argument: &str, pointer: *const T) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{argument} is null; it must not be")));
    }
    if !pointer.is_aligned() {
        let alignment = align_of::<T>();
        return Err(Failure::argument(format!("{argument} is {pointer:p}; it must be a multiple of {alignment}")));
    }
    Ok(())
}
