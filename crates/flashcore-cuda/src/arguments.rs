//! Kernel arguments in the form in which the driver reads them, without an allocation.

use core::ffi::c_void;

use flashcore_ir::{Argument, Parameter, ParameterType, TensorMap};

use crate::error::CudaError;
use crate::tensor_map::{EncodedTensorMap, TENSOR_MAP_BYTES};

/// The most arguments of a launch.
pub const MOST_ARGUMENTS: usize = 128;
/// Bytes of each argument's slot: the size of the largest argument.
const PLACE_BYTES: usize = 8;

/// The most tensor maps of a launch.
pub(crate) const MOST_TENSOR_MAPS: usize = 8;

/// The arguments of one launch, each at the start of a slot of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(128))]
pub(crate) struct Arguments {
    tensor_maps: [EncodedTensorMap; MOST_TENSOR_MAPS],
    places: [[u8; PLACE_BYTES]; MOST_ARGUMENTS],
    /// For each argument that is a tensor map, its index among them.
    map_places: [Option<u8>; MOST_ARGUMENTS],
}

/// Encodes a tensor map for the hardware.
pub(crate) type Encode<'a> = &'a dyn Fn(&TensorMap) -> Result<EncodedTensorMap, CudaError>;

impl Arguments {
    /// The arguments, if they match the parameters of the kernel.
    pub(crate) fn new(
        kernel: &str,
        parameters: &[Parameter],
        arguments: &[Argument],
        encode: Encode<'_>,
    ) -> Result<Self, CudaError> {
        if arguments.len() != parameters.len() {
            let (expected, found) = (parameters.len(), arguments.len());
            return Err(CudaError::ArgumentCount { kernel: kernel.to_owned(), expected, found });
        }
        if parameters.len() > MOST_ARGUMENTS {
            let parameters = parameters.len();
            return Err(CudaError::TooManyParameters { kernel: kernel.to_owned(), parameters });
        }
        let maps = || parameters.iter().enumerate().filter(|(_, parameter)| parameter.ty == ParameterType::TensorMap);
        if maps().count() > MOST_TENSOR_MAPS {
            return Err(CudaError::TooManyTensorMaps { kernel: kernel.to_owned(), tensor_maps: maps().count() });
        }
        let mut packed = Self {
            tensor_maps: [[0; TENSOR_MAP_BYTES]; MOST_TENSOR_MAPS],
            places: [[0; PLACE_BYTES]; MOST_ARGUMENTS],
            map_places: [None; MOST_ARGUMENTS],
        };
        for (place, (index, _)) in (0u8..).zip(maps()) {
            packed.map_places[index] = Some(place);
        }
        for (index, (parameter, &argument)) in parameters.iter().zip(arguments).enumerate() {
            packed.set(kernel, parameter, index, argument, encode)?;
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
        encode: Encode<'_>,
    ) -> Result<(), CudaError> {
        if argument.ty() != parameter.ty {
            return Err(CudaError::ArgumentType {
                kernel: kernel.to_owned(),
                index,
                parameter: parameter.name.clone(),
                expected: parameter.ty,
                found: Box::new(argument),
            });
        }
        let place = &mut self.places[index];
        match argument {
            Argument::U32(value) => place[..4].copy_from_slice(&value.to_ne_bytes()),
            Argument::S32(value) => place[..4].copy_from_slice(&value.to_ne_bytes()),
            Argument::F32(value) => place[..4].copy_from_slice(&value.to_ne_bytes()),
            Argument::U64(value) => place.copy_from_slice(&value.to_ne_bytes()),
            Argument::S64(value) => place.copy_from_slice(&value.to_ne_bytes()),
            Argument::TensorMap(map) => {
                if let Some(place) = self.map_places[index] {
                    self.tensor_maps[usize::from(place)] = encode(&map)?;
                }
            }
        }
        Ok(())
    }

    /// Replaces arguments by words of 64 bits.
    pub(crate) fn set_words(&mut self, first: usize, words: &[u64]) {
        for (place, word) in self.places[first..][..words.len()].iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
    }

    /// The address of each, as `cuLaunchKernelEx` wants them. Valid as long as the borrow; the driver only reads.
    pub(crate) fn pointers(&self) -> [*mut c_void; MOST_ARGUMENTS] {
        core::array::from_fn(|index| match self.map_places[index] {
            Some(place) => self.tensor_maps[usize::from(place)].as_ptr().cast_mut().cast(),
            None => self.places[index].as_ptr().cast_mut().cast(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Type;

    fn parameters(types: &[Type]) -> Vec<Parameter> {
        types.iter().map(|&ty| Parameter { name: format!("p_{}", ty.name()), ty: ty.into() }).collect()
    }

    /// An encoding that holds the base address.
    #[expect(clippy::unnecessary_wraps, reason = "the form of what the driver does")]
    fn encode(map: &TensorMap) -> Result<EncodedTensorMap, CudaError> {
        let mut bytes = [7; TENSOR_MAP_BYTES];
        bytes[..8].copy_from_slice(&map.base.to_ne_bytes());
        Ok(bytes)
    }

    fn map(base: u64) -> Argument {
        Argument::TensorMap(TensorMap::new(base, flashcore_ir::TensorElement::F16, &[64], &[], &[64]))
    }

    #[test]
    fn tensor_maps_have_places_of_their_own() {
        let mut types = parameters(&[Type::U32, Type::U64]);
        let tensor_map = |name: &str| Parameter { name: name.to_owned(), ty: ParameterType::TensorMap };
        types.insert(0, tensor_map("a"));
        types.insert(2, tensor_map("b"));
        let values = [map(32), Argument::U32(5), map(64), Argument::U64(9)];
        let mut packed = Arguments::new("k", &types, &values, &encode).unwrap();
        packed.set("k", &types[2], 2, map(96), &encode).unwrap();
        let pointers = packed.pointers();
        assert!([0, 2].iter().all(|&index| pointers[index].addr().is_multiple_of(64)));
        // SAFETY: each pointer is to at least eight bytes in `packed`.
        let read = |index: usize| unsafe { *pointers[index].cast::<u64>() };
        assert_eq!([read(0), read(1), read(2), read(3)], [32, 5, 96, 9]);
        let error = packed.set("k", &types[1], 1, map(0), &encode).unwrap_err();
        assert!(matches!(error, CudaError::ArgumentType { index: 1, .. }), "{error}");
        let many = vec![tensor_map("m"); MOST_TENSOR_MAPS + 1];
        let error = Arguments::new("k", &many, &[map(0); MOST_TENSOR_MAPS + 1], &encode).unwrap_err();
        assert_eq!(error, CudaError::TooManyTensorMaps { kernel: "k".to_owned(), tensor_maps: 9 });
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
        let packed = Arguments::new("k", &types, &values, &encode).unwrap();
        let pointers = packed.pointers();
        assert!(pointers.iter().all(|pointer| pointer.addr() % 8 == 0));
        // SAFETY: each pointer is to the first byte of a slot of eight in `packed`.
        let read = |index: usize| unsafe { *pointers[index].cast::<u64>() };
        let expected = [0x1122_3344_5566_7788, 7, u64::from(-3i32 as u32), u64::from((-0.0f32).to_bits()), u64::MAX];
        assert_eq!([read(0), read(1), read(2), read(3), read(4)], expected);
    }

    #[test]
    fn wrong_arguments_are_named() {
        let types = parameters(&[Type::U64, Type::U32]);
        let name = || "k".to_owned();
        assert_eq!(
            Arguments::new("k", &types, &[Argument::U64(0)], &encode),
            Err(CudaError::ArgumentCount { kernel: name(), expected: 2, found: 1 })
        );
        let error = Arguments::new("k", &types, &[Argument::U64(0), Argument::S32(-1)], &encode).unwrap_err();
        let expected = CudaError::ArgumentType {
            kernel: name(),
            index: 1,
            parameter: "p_u32".to_owned(),
            expected: Type::U32.into(),
            found: Box::new(Argument::S32(-1)),
        };
        assert_eq!(error, expected);
        assert_eq!(error.to_string(), "argument 1 of kernel `k`, `p_u32`, is a u32, not S32(-1)");
        let (types, values) =
            (parameters(&[Type::U32; MOST_ARGUMENTS + 1]), vec![Argument::U32(0); MOST_ARGUMENTS + 1]);
        assert_eq!(
            Arguments::new("k", &types, &values, &encode),
            Err(CudaError::TooManyParameters { kernel: name(), parameters: MOST_ARGUMENTS + 1 })
        );
    }
}
