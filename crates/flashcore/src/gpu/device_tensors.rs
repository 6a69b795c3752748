//! Operands on a GPU, by their addresses.

use flashcore_kernels::LaunchValues;
use flashcore_problem::{BiasStrides, CallStrides, Invalid, Operand, ProblemError, ScaleStrides, operands};

use crate::operation::Use;
use crate::{Error, Operation};

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

/// Type of the field for a kind of operand.
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
        /// Each address is that of the first element; the others lie where the problem's [strides](flashcore_problem::Problem::strides) say.
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
            /// Bytes from a part of a merge to the next, of outputs and of LSEs. The second of two parts may lie before
            /// the first: they count modulo 2^64.
            pub part_strides: [u64; 2],
            /// Tokens of this launch, at most those of the plan; `None` for as many. In a captured graph it is fixed: skip
            /// tokens of an append by their slots there.
            pub tokens: Option<usize>,
            /// [`Plan::workspace_bytes`](crate::Plan::workspace_bytes) bytes that nobody else uses until the launch has
            /// finished, or while a graph of it is executed; 0 for the workspace of the stream, which no graph has.
            pub workspace: u64,
        }

        impl DeviceTensors {
            /// No operand.
            pub const NONE: Self = Self {
                $($name: none!($($in)? $($out)?),)*
                part_strides: [0; 2],
                tokens: None,
                workspace: 0,
            };

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

    /// Sets two parts of a merge, which lie anywhere.
    #[must_use]
    pub const fn with_two_parts(mut self, outputs: [u64; 2], lses: [u64; 2]) -> Self {
        (self.part_outputs, self.part_lses) = (outputs[0], lses[0]);
        self.part_strides = [outputs[1].wrapping_sub(outputs[0]), lses[1].wrapping_sub(lses[0])];
        self
    }

    /// Sets parts of a merge at equal distances, in bytes.
    #[must_use]
    pub const fn with_stacked_parts(mut self, outputs: (u64, u64), lses: (u64, u64)) -> Self {
        (self.part_outputs, self.part_lses) = (outputs.0, lses.0);
        self.part_strides = [outputs.1, lses.1];
        self
    }

    /// Sets the tokens of this launch.
    #[must_use]
    pub const fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// The values that change from launch to launch.
    pub(crate) fn values(&self) -> LaunchValues {
        LaunchValues {
            operands: self.addresses(),
            strides: self.call_strides(),
            part_strides: self.part_strides,
            tokens: self.tokens.map(|tokens| tokens as u32),
            workspace: self.workspace,
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
    /// Tensors without elements may be anywhere. Of an operation that does not validate nothing is said but that.
    pub fn validate(&self, operation: impl Into<Operation>) -> Result<(), Error> {
        let operation = operation.into();
        let errors = operation.errors();
        if !errors.is_empty() {
            return Err(Error::Invalid(errors.into()));
        }
        let is_wide = |operand| matches!(operand, Operand::Query | Operand::Key | Operand::Value | Operand::Output);
        self.check(&operation, |operand| if is_wide(operand) { TENSOR_ALIGNMENT } else { 1 })
    }

    /// [`validate`](Self::validate) for an operation that is valid, with alignments of its kernels. Allocates nothing.
    pub(crate) fn check(&self, operation: &Operation, alignment: impl Fn(Operand) -> u64) -> Result<(), Error> {
        let most = operation.tokens().unwrap_or(0);
        if let Some(tokens) = self.tokens.filter(|&tokens| tokens > most) {
            let (argument, value) = ("tokens", tokens.to_string());
            let allowed = format!("at most {most}, the tokens of the plan");
            let error = ProblemError::OutOfRange { argument, value, allowed };
            return Err(Error::Invalid(Invalid::from(vec![error])));
        }
        if !self.workspace.is_multiple_of(TENSOR_ALIGNMENT) {
            let (argument, address, multiple) = ("workspace", self.workspace, TENSOR_ALIGNMENT);
            return Err(Error::Misaligned { argument, address, multiple });
        }
        let (addresses, strides) = (self.addresses(), self.call_strides());
        let uses = operation.uses(strides, self.tokens);
        let each = || Operand::ALL.iter().zip(addresses).zip(&uses);
        for ((&operand, address), of) in each() {
            let argument = operand.name();
            match of {
                Some(of) => {
                    let multiple = alignment(operand).max(of.element_bytes as u64);
                    let ranges = self.ranges(operation, operand, address, of, multiple)?;
                    for (address, bytes) in ranges.into_iter().flatten() {
                        check_address(argument, address, bytes, multiple)?;
                    }
                }
                None if address != 0 => return Err(Error::Unexpected { argument, address }),
                None => {}
            }
        }
        if let Some(error) = operation.scale_stride_error(strides) {
            return Err(Error::Invalid(vec![error].into()));
        }
        // Tensors may be interleaved, so that ranges overlap and elements do not; two that begin at one place overlap.
        let is_there = |of: &Option<Use>| of.is_some_and(|of| of.elements > 0);
        for ((&written, address), _) in each().filter(|(_, of)| is_there(of) && of.is_some_and(|of| of.is_written)) {
            let same = |&((&other, begin), of): &((&Operand, u64), &Option<Use>)| {
                other != written && begin == address && is_there(of) && !operation.is_in_place(written, other)
            };
            if let Some(((other, _), _)) = each().find(same) {
                return Err(Error::Aliased { written: written.name(), other: other.name(), address });
            }
        }
        Ok(())
    }

    /// Address and bytes of an operand, or of each of two parts; of more parts, from the first to the last.
    fn ranges(
        &self,
        operation: &Operation,
        operand: Operand,
        address: u64,
        of: &Use,
        multiple: u64,
    ) -> Result<[Option<(u64, u64)>; 2], Error> {
        let bytes = of.bytes();
        let (Operation::Merge(problem), Operand::PartOutputs | Operand::PartLses) = (operation, operand) else {
            return Ok([Some((address, bytes)), None]);
        };
        let stride = self.part_strides[usize::from(operand == Operand::PartLses)];
        if bytes > 0 && !stride.is_multiple_of(multiple) {
            let argument = "the distance in bytes between parts";
            return Err(Error::Misaligned { argument, address: stride, multiple });
        }
        let last = problem.num_parts as u64 - 1;
        Ok(match (last, bytes) {
            (_, 0) => [None, None],
            (1, bytes) => [Some((address, bytes)), Some((address.wrapping_add(stride), bytes))],
            (last, bytes) => [Some((address, stride.saturating_mul(last).saturating_add(bytes))), None],
        })
    }
}

/// Checks the address of a tensor of so many bytes; one without any may be anywhere.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AppendProblem, KvCacheProblem, MergeProblem, Problem, Rotary, RotaryStyle};
    use flashcore_kernels::{LaunchPlan, Word};
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
        let words = |scale| [0, 1, 2, 3, 4].map(|index| values.word(Word::ScaleStride(scale, index), 0));
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

    #[track_caller]
    fn check_plan(operation: &Operation, plan: &LaunchPlan, tensors: &DeviceTensors, expected: &Result<(), Error>) {
        assert_eq!(&tensors.check(operation, |operand| plan.alignment(operand)), expected);
    }

    #[test]
    fn addresses_of_an_append_are_checked() {
        let check = |change: fn(&mut AppendProblem, &mut DeviceTensors), expected| {
            let mut problem = AppendProblem::new(5, 2, 64, DType::F16, 3, 4).with_query(4);
            let mut tensors = DeviceTensors::NONE.with_new_key(0x1000).with_new_value(0x2000).with_key_cache(0x3000);
            tensors = tensors.with_value_cache(0x4000).with_slot_mapping(0x5000);
            tensors = tensors.with_query(0x6000).with_query_output(0x6000);
            change(&mut problem, &mut tensors);
            let plan = LaunchPlan::append(&problem, flashcore_ir::Arch::Sm80).unwrap();
            check_plan(&(&problem).into(), &plan, &tensors, &expected);
        };
        check(|_, _| {}, Ok(()));
        check(|_, tensors| tensors.slot_mapping = 0, Err(Error::Null { argument: "slot_mapping" }));
        check(
            |_, tensors| tensors.key_cache = 0x3008,
            Err(Error::Misaligned { argument: "key_cache", address: 0x3008, multiple: 16 }),
        );
        check(|_, tensors| tensors.cos = 0x7000, Err(Error::Unexpected { argument: "cos", address: 0x7000 }));
        check(
            |_, tensors| tensors.key_cache = tensors.new_key,
            Err(Error::Aliased { written: "key_cache", other: "new_key", address: 0x1000 }),
        );
        check(
            |problem, _| problem.strides.query_output.row += 64,
            Err(Error::Aliased { written: "query_output", other: "query", address: 0x6000 }),
        );
        // Interleaved caches begin apart.
        check(|_, tensors| tensors.value_cache = tensors.key_cache + 128, Ok(()));
        check(|_, tensors| tensors.tokens = Some(5), Ok(()));
        let mut problem = AppendProblem::new(5, 2, 64, DType::F16, 3, 4);
        problem.tokens = 4;
        let tensors = DeviceTensors::NONE.with_tokens(5);
        let refused = tensors.check(&(&problem).into(), |_| 1).unwrap_err().to_string();
        assert_eq!(refused, "tokens is 5; it must be at most 4, the tokens of the plan");
    }

    #[test]
    fn addresses_of_a_growing_cache_are_checked() {
        let check = |change: fn(&mut KvCacheProblem, &mut DeviceTensors), expected| {
            let mut problem = KvCacheProblem::new(Problem::new(2, 4, 1, 64, DType::F16).with_key_length(40), 1);
            let mut tensors = DeviceTensors::new(0x1000, 0, 0, 0x4000).with_key_cache(0x2000).with_value_cache(0x3000);
            tensors = tensors.with_seqused_k(0x5000).with_new_key(0x6000).with_new_value(0x7000);
            change(&mut problem, &mut tensors);
            let config = flashcore_kernels::Config::ampere();
            let attention = LaunchPlan::new(&problem.attended(), config, flashcore_ir::Arch::Sm80).unwrap();
            let plan = LaunchPlan::kv_cache(&problem, Some(attention), flashcore_ir::Arch::Sm80).unwrap();
            check_plan(&(&problem).into(), &plan, &tensors, &expected);
        };
        check(|_, _| {}, Ok(()));
        check(|_, tensors| tensors.new_key = 0, Err(Error::Null { argument: "new_key" }));
        check(|_, tensors| tensors.seqused_k = 0, Err(Error::Null { argument: "seqused_k" }));
        check(|_, tensors| tensors.key = 0x9000, Err(Error::Unexpected { argument: "key", address: 0x9000 }));
        check(
            |_, tensors| tensors.new_value = 0x7004,
            Err(Error::Misaligned { argument: "new_value", address: 0x7004, multiple: 16 }),
        );
        check(
            |_, tensors| tensors.value_cache = 0x3008,
            Err(Error::Misaligned { argument: "value_cache", address: 0x3008, multiple: 16 }),
        );
        check(|_, tensors| tensors.cos = 0x8000, Err(Error::Unexpected { argument: "cos", address: 0x8000 }));
        check(
            |problem, _| problem.rotary = Some(Rotary::new(RotaryStyle::Neox, 64, 40)),
            Err(Error::Null { argument: "cos" }),
        );
        check(
            |_, tensors| tensors.new_key = tensors.key_cache,
            Err(Error::Aliased { written: "key_cache", other: "new_key", address: 0x2000 }),
        );
        check(
            |_, tensors| tensors.value_cache = tensors.key_cache,
            Err(Error::Aliased { written: "key_cache", other: "value_cache", address: 0x2000 }),
        );
    }

    #[test]
    fn addresses_of_parts_are_checked() {
        let check = |tensors: DeviceTensors, count, expected| {
            let problem = MergeProblem::new(count, 5, 2, 64, DType::F16);
            let plan = LaunchPlan::merge(&problem, flashcore_ir::Arch::Sm80).unwrap();
            let tensors = tensors.with_output(0x8000).with_lse(0x9000);
            check_plan(&(&problem).into(), &plan, &tensors, &expected);
        };
        let stacked = DeviceTensors::NONE.with_stacked_parts((0x1000, 1280), (0x2000, 40));
        check(stacked, 3, Ok(()));
        let two = DeviceTensors::NONE.with_two_parts([0x3000, 0x1000], [0x2004, 0x2000]);
        check(two, 2, Ok(()));
        let (argument, multiple) = ("the distance in bytes between parts", 16);
        let odd = DeviceTensors::NONE.with_stacked_parts((0x1000, 1282), (0x2000, 40));
        check(odd, 3, Err(Error::Misaligned { argument, address: 1282, multiple }));
        // Only of two parts may the second lie before the first.
        let far = check_address("part_outputs", 0x3000, u64::MAX, multiple);
        check(two, 3, far);
    }

    /// Distances between parts count modulo 2^64.
    #[test]
    fn two_parts_lie_anywhere() {
        let values = DeviceTensors::NONE.with_two_parts([0x3000, 0x1000], [0x2000, 0x5000]).values();
        let part = |list| values.address(list).wrapping_add(values.word(Word::PartStride(list), 0));
        assert_eq!((part(Operand::PartOutputs), part(Operand::PartLses)), (0x1000, 0x5000));
    }
}
