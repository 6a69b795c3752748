//! Operands on a GPU, by their addresses.

use flashcore_kernels::LaunchValues;
use flashcore_kernels::cache::FusedValues;
use flashcore_problem::{Access, BiasStrides, CallStrides, Operand, Problem, ScaleStrides, operands};

use crate::Error;

/// Alignment in bytes of the addresses of query, key, value and output: kernels read and write 16 bytes at a time.
pub const TENSOR_ALIGNMENT: u64 = 16;

/// A scale of an 8-bit tensor on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceScale {
    /// The address of the first; 0 where the problem has none.
    pub address: u64,
    /// Strides in elements.
    pub strides: ScaleStrides,
}

/// The bias on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBias {
    /// The address of the first; 0 where the problem has none.
    pub address: u64,
    /// Strides in elements.
    pub strides: BiasStrides,
}

impl DeviceBias {
    /// No bias.
    pub const NONE: Self = Self { address: 0, strides: BiasStrides { batch: 0, head: 0, row: 0, key: 0 } };
}

impl DeviceScale {
    /// No scale.
    pub const NONE: Self = Self { address: 0, strides: ScaleStrides::TENSOR };
}

/// Device type of a kind of operand.
macro_rules! device {
    (Bias) => {
        DeviceBias
    };
    (Scale) => {
        DeviceScale
    };
    ($kind:ident) => {
        u64
    };
}

macro_rules! none {
    (Bias) => {
        DeviceBias::NONE
    };
    (Scale) => {
        DeviceScale::NONE
    };
    ($kind:ident) => {
        0
    };
}

macro_rules! address {
    (Bias $operand:expr) => {
        $operand.address
    };
    (Scale $operand:expr) => {
        $operand.address
    };
    ($kind:ident $operand:expr) => {
        $operand
    };
}

/// The setter of an operand: with strides where they come with each call.
macro_rules! setter {
    (Bias $name:ident $with:ident) => {
        /// Sets the bias and its strides.
        #[must_use]
        pub const fn $with(mut self, address: u64, strides: BiasStrides) -> Self {
            self.$name = DeviceBias { address, strides };
            self
        }
    };
    (Scale $name:ident $with:ident) => {
        #[doc = concat!("Sets [`", stringify!($name), "`](Self::", stringify!($name), ") and its strides.")]
        #[must_use]
        pub const fn $with(mut self, address: u64, strides: ScaleStrides) -> Self {
            self.$name = DeviceScale { address, strides };
            self
        }
    };
    ($kind:ident $name:ident $with:ident) => {
        #[doc = concat!("Sets [`", stringify!($name), "`](Self::", stringify!($name), ").")]
        #[must_use]
        pub const fn $with(mut self, address: u64) -> Self {
            self.$name = address;
            self
        }
    };
}

macro_rules! define_device_tensors {
    ($($(#[$doc:meta])* $name:ident: $Name:ident, $with:ident,
        $(reads $in:ident)? $(writes $out:ident)? $(, or writes $computed:ident)?;)*) => {
        /// Device addresses of the operands of a problem: `CUdeviceptr` of the driver, `device_ptr()` of `cudarc`,
        /// `data_ptr()` of `PyTorch`.
        ///
        /// Each address is that of the first element; the others lie where the problem's [strides](Problem::strides) say.
        /// The address of an operand that the problem does not have is 0.
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
            $($(#[$doc])* pub $name: device!($($in)? $($out)?),)*
            /// [`Plan::workspace_bytes`](crate::Plan::workspace_bytes) bytes that nobody else uses until the launch has
            /// finished, or while a graph of it is executed; 0 for the workspace of the stream, which no graph has.
            pub workspace: u64,
        }

        impl DeviceTensors {
            /// No operand.
            pub const NONE: Self = Self { $($name: none!($($in)? $($out)?),)* workspace: 0 };

            $(setter!($($in)? $($out)? $name $with);)*

            /// Sets the address of an operand.
            pub const fn set(&mut self, operand: Operand, address: u64) {
                match operand {
                    $(Operand::$Name => address!($($in)? $($out)? self.$name) = address,)*
                    _ => {}
                }
            }

            /// The addresses in the order of the operands.
            const fn addresses(&self) -> [u64; Operand::COUNT] {
                [$(address!($($in)? $($out)? self.$name),)*]
            }
        }
    };
}

operands!(define_device_tensors);

impl DeviceTensors {
    /// Query, key, value and output, and nothing else.
    pub const fn new(query: u64, key: u64, value: u64, output: u64) -> Self {
        Self { query, key, value, output, ..Self::NONE }
    }

    /// The strides of bias and scales.
    pub const fn call_strides(&self) -> CallStrides {
        CallStrides {
            bias: self.bias.strides,
            scales: [self.q_scale.strides, self.k_scale.strides, self.v_scale.strides],
        }
    }

    /// Sets the strides of bias and scales.
    pub const fn set_call_strides(&mut self, strides: CallStrides) {
        self.bias.strides = strides.bias;
        [self.q_scale.strides, self.k_scale.strides, self.v_scale.strides] = strides.scales;
    }

    /// The address of an operand.
    pub const fn address(&self, operand: Operand) -> u64 {
        self.addresses()[operand as usize]
    }

    /// The values of the parameters that change from launch to launch.
    pub(crate) const fn values(&self) -> LaunchValues {
        LaunchValues {
            operands: self.addresses(),
            strides: self.call_strides(),
            workspace: self.workspace,
            append: FusedValues::NONE,
        }
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
        problem.validate()?;
        self.check(problem)
    }

    /// [`validate`](Self::validate) for a problem that is valid. Allocates nothing.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), Error> {
        let values = self.values();
        let ranges: [(u64, u64); Operand::COUNT] = std::array::from_fn(|index| {
            let operand = Operand::ALL[index];
            if !operand.is_present(problem) {
                return (values.operands[index], 0);
            }
            // A valid problem's tensors have at most `isize::MAX` bytes; bias and scales can have strides of any size.
            let elements = operand.extent(problem, values.strides).unwrap_or(usize::MAX) as u64;
            (values.operands[index], elements.saturating_mul(operand.element_bytes(problem) as u64))
        });
        if !self.workspace.is_multiple_of(TENSOR_ALIGNMENT) {
            let (argument, address, multiple) = ("workspace", self.workspace, TENSOR_ALIGNMENT);
            return Err(Error::Misaligned { argument, address, multiple });
        }
        for (&operand, (address, bytes)) in Operand::ALL.iter().zip(ranges) {
            let argument = operand.name();
            if operand.is_present(problem) {
                check_address(argument, address, bytes, operand.alignment())?;
            } else if address != 0 {
                return Err(Error::Unexpected { argument, address });
            }
        }
        // Tensors may be interleaved, so that ranges overlap and elements do not; two that begin at one place overlap.
        for (written, (address, bytes)) in Operand::ALL.iter().zip(ranges) {
            if written.access() == Access::Read || bytes == 0 {
                continue;
            }
            let same =
                |&(other, (begin, bytes)): &(&Operand, (u64, u64))| other != written && begin == address && bytes > 0;
            if let Some((other, _)) = Operand::ALL.iter().zip(ranges).find(same) {
                return Err(Error::Aliased { written: written.name(), other: other.name(), address });
            }
        }
        Ok(())
    }
}

/// Checks the address of a tensor of so many bytes; one without any may be anywhere.
pub(super) fn check_address(argument: &'static str, address: u64, bytes: u64, multiple: u64) -> Result<(), Error> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_kernels::Word;
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
            lse: 5,
            seqused_k: 6,
            alibi_slopes: 7,
            sinks: 8,
            bias: DeviceBias { address: 9, strides },
            aux_f32: 10,
            aux_i32: 11,
            workspace: 12,
            ..DeviceTensors::new(1, 2, 3, 4)
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
    fn scales_have_addresses_and_strides() {
        let strides = ScaleStrides { sequence: 2, batch: 3, row: 5, key_head: 7, query_head: 11 };
        let tensors = GOOD.with_k_scale(0x6000, strides).with_v_scale(0x7000, ScaleStrides::KEY_HEAD);
        let values = tensors.values();
        let words = |scale| [0, 1, 2, 3, 4].map(|index| values.word(Word::ScaleStride(scale, index)));
        assert_eq!(words(Operand::KScale), [8, 12, 20, 28, 44]);
        assert_eq!(words(Operand::VScale), [0, 0, 0, 4, 0]);
        assert_eq!(words(Operand::QScale), [0; 5]);
        let mut others = GOOD;
        others.set(Operand::KScale, 0x6000);
        others.set(Operand::VScale, 0x7000);
        others.set_call_strides(tensors.call_strides());
        assert_eq!(others, tensors);
        let with_scale = |change: fn(&mut DeviceTensors), expected| {
            let fp8 = |problem: &mut Problem, tensors: &mut DeviceTensors| {
                (problem.kv_dtype, problem.k_scale) = (Some(DType::E4m3), true);
                *tensors = tensors.with_k_scale(0x6000, ScaleStrides::KEY_HEAD);
                change(tensors);
            };
            check(fp8, &expected);
        };
        with_scale(|_| {}, Ok(()));
        with_scale(|tensors| tensors.k_scale.address = 0, Err(Error::Null { argument: "k_scale" }));
        let far = ScaleStrides { key_head: 3, ..ScaleStrides::TENSOR };
        let check_far = |address: u64, expected| {
            let fp8 = |problem: &mut Problem, tensors: &mut DeviceTensors| {
                (problem.kv_dtype, problem.k_scale) = (Some(DType::E4m3), true);
                *tensors = tensors.with_k_scale(address, far);
            };
            check(fp8, &expected);
        };
        let address = u64::MAX - 10;
        check_far(address, Err(Error::Misaligned { argument: "k_scale", address, multiple: 4 }));
        let address = u64::MAX - 11;
        check_far(address, Err(Error::AddressOverflow { argument: "k_scale", address, bytes: 16 }));
        check(
            |_, tensors| tensors.v_scale.address = 0x7000,
            &Err(Error::Unexpected { argument: "v_scale", address: 0x7000 }),
        );
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
            &Err(Error::Aliased { written: "output", other: "lse", address: 0x4000 }),
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
