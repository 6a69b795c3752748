//! The arguments of a launch in the form in which the driver reads them, without an allocation.

use core::ffi::c_void;

use flashcore_ir::{Parameter, Type};
use flashcore_kernels::Argument;

use crate::error::CudaError;

/// Arguments that a launch has room for.
pub const MOST_ARGUMENTS: usize = 64;
/// Bytes of each argument's place: the largest argument there is.
const PLACE_BYTES: usize = 8;

/// The arguments of one launch, each at the start of a place of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(8))]
pub(crate) struct Arguments {
    places: [[u8; PLACE_BYTES]; MOST_ARGUMENTS],
}

impl Arguments {
    /// The arguments, if they are what the parameters of the kernel ask for.
    pub(crate) fn new(kernel: &str, parameters: &[Parameter], arguments: &[Argument]) -> Result<Self, CudaError> {
        if arguments.len() != parameters.len() {
            let (expected, found) = (parameters.len(), arguments.len());
            return Err(CudaError::ArgumentCount { kernel: kernel.to_owned(), expected, found });
        }
        if parameters.len() > MOST_ARGUMENTS {
            let parameters = parameters.len();
            return Err(CudaError::TooManyParameters { kernel: kernel.to_owned(), parameters });
        }
        let mut packed = Self { places: [[0; PLACE_BYTES]; MOST_ARGUMENTS] };
        for (index, (parameter, &argument)) in parameters.iter().zip(arguments).enumerate() {
            packed.set(kernel, parameter, index, argument)?;
        }
        Ok(packed)
    }

    /// Replaces one argument.
    pub(crate) fn set(
        &mut self,
        kernel: &str,
        parameter: &Parameter,
        index: usize,
        argument: Argument,
    ) -> Result<(), CudaError> {
        if !fits(parameter.ty, argument) {
            return Err(CudaError::ArgumentType {
                kernel: kernel.to_owned(),
                index,
                parameter: parameter.name.clone(),
                expected: parameter.ty,
                found: argument,
            });
        }
        let place = &mut self.places[index];
        match argument {
            Argument::U32(value) => place[..4].copy_from_slice(&value.to_ne_bytes()),
            Argument::S32(value) => place[..4].copy_from_slice(&value.to_ne_bytes()),
            Argument::F32(value) => place[..4].copy_from_slice(&value.to_ne_bytes()),
            Argument::U64(value) => place.copy_from_slice(&value.to_ne_bytes()),
            Argument::S64(value) => place.copy_from_slice(&value.to_ne_bytes()),
        }
        Ok(())
    }

    /// The address of each, as `cuLaunchKernelEx` wants them. Valid as long as the borrow; the driver only reads.
    pub(crate) fn pointers(&self) -> [*mut c_void; MOST_ARGUMENTS] {
        core::array::from_fn(|index| self.places[index].as_ptr().cast_mut().cast())
    }
}

const fn fits(ty: Type, argument: Argument) -> bool {
    match argument {
        Argument::U32(_) => matches!(ty, Type::U32),
        Argument::S32(_) => matches!(ty, Type::S32),
        Argument::F32(_) => matches!(ty, Type::F32),
        Argument::U64(_) => matches!(ty, Type::U64),
        Argument::S64(_) => matches!(ty, Type::S64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(types: &[Type]) -> Vec<Parameter> {
        types.iter().map(|&ty| Parameter { name: format!("p_{}", ty.name()), ty }).collect()
    }

    #[test]
    fn each_argument_is_where_its_pointer_points() {
        let values = [
            Argument::U64(0x1122_3344_5566_7788),
            Argument::U32(7),
            Argument::S32(-3),
            Argument::F32(-0.0),
            Argument::U64(u64::MAX),
        ];
        let types = parameters(&[Type::U64, Type::U32, Type::S32, Type::F32, Type::U64]);
        let packed = Arguments::new("k", &types, &values).unwrap();
        let pointers = packed.pointers();
        assert!(pointers.iter().all(|pointer| pointer.addr() % 8 == 0));
        // SAFETY: each pointer is to the first byte of a place of eight in `packed`.
        let read = |index: usize| unsafe { *pointers[index].cast::<u64>() };
        let expected = [0x1122_3344_5566_7788, 7, u64::from(-3i32 as u32), u64::from((-0.0f32).to_bits()), u64::MAX];
        assert_eq!([read(0), read(1), read(2), read(3), read(4)], expected);
    }

    #[test]
    fn wrong_arguments_are_named() {
        let types = parameters(&[Type::U64, Type::U32]);
        let name = || "k".to_owned();
        assert_eq!(
            Arguments::new("k", &types, &[Argument::U64(0)]),
            Err(CudaError::ArgumentCount { kernel: name(), expected: 2, found: 1 })
        );
        let error = Arguments::new("k", &types, &[Argument::U64(0), Argument::S32(-1)]).unwrap_err();
        let expected = CudaError::ArgumentType {
            kernel: name(),
            index: 1,
            parameter: "p_u32".to_owned(),
            expected: Type::U32,
            found: Argument::S32(-1),
        };
        assert_eq!(error, expected);
        assert_eq!(error.to_string(), "argument 1 of kernel `k`, `p_u32`, is a u32, not S32(-1)");
        let (types, values) = (parameters(&[Type::U32; MOST_ARGUMENTS + 1]), [Argument::U32(0); MOST_ARGUMENTS + 1]);
        assert_eq!(
            Arguments::new("k", &types, &values),
            Err(CudaError::TooManyParameters { kernel: name(), parameters: MOST_ARGUMENTS + 1 })
        );
    }
}
