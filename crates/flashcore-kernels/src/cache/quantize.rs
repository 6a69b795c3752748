//! Quantisation of rows to an FP8 cache: the scale of a row, read or computed, and the codes.
//!
//! The arithmetic is that of [`quantize`](flashcore_problem::quantize) to the bit: divisions are rounded to nearest, and
//! `cvt.rn.satfinite` makes codes of quotients.

use flashcore_ir::target::ADA_FP8;
use flashcore_ir::types::{F32, Pred, U16, U32, U64};
use flashcore_ir::{Arch, Builder, Compare, Fp8, Reg, ShuffleMode};
use flashcore_problem::{AppendProblem, DType, Operand, ScaleSource};

use super::spec::{AppendSpec, RowShape};
use crate::bindings::Word;
use crate::parameters::ScaleParameters;
use crate::unsupported::Reason;

/// Everything of an FP8 cache that is compiled into the append kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantizeSpec {
    /// The element type of the caches.
    pub dtype: DType,
    /// Source of the scales of keys.
    pub k_scale: ScaleSource,
    /// Source of the scales of values.
    pub v_scale: ScaleSource,
}

impl QuantizeSpec {
    /// The specialization for a problem with an FP8 cache; `None` for another.
    pub(super) fn of(problem: &AppendProblem) -> Option<Self> {
        let dtype = problem.cache_dtype();
        let [k_scale, v_scale] = [Operand::KScale, Operand::VScale].map(|scale| problem.scale_source(scale));
        dtype.is_float8().then_some(Self { dtype, k_scale, v_scale })
    }

    /// The end of a kernel's name.
    pub(super) fn suffix(self) -> String {
        let source = |source| match source {
            ScaleSource::None => "",
            ScaleSource::Given => "given",
            ScaleSource::Computed => "computed",
        };
        format!("_{}_k{}_v{}", self.dtype, source(self.k_scale), source(self.v_scale))
    }
}

/// The reason why no kernel quantises to the cache of a problem.
pub(super) fn reason(problem: &AppendProblem, spec: AppendSpec, arch: Arch) -> Result<(), Vec<Reason>> {
    let cache_dtype = problem.cache_dtype();
    let refuse = |why| Err(vec![Reason::Quantize { cache_dtype, why }]);
    if spec.quantize.is_none() {
        return Ok(());
    }
    if !arch.has(ADA_FP8) {
        return refuse("needs the conversions of sm_89 and later GPUs");
    }
    if spec.key_vec.min(spec.value_vec) < 2 {
        return refuse(
            "takes an even number of columns, strides that are even, and a rotary dim that is a multiple of 4",
        );
    }
    Ok(())
}

/// The words of the scales of keys and values, which are the first arguments of a kernel that quantises.
pub(super) fn words(problem: &AppendProblem) -> impl Iterator<Item = Word> {
    let scales = [Operand::KScale, Operand::VScale].into_iter().filter(|_| problem.cache_dtype().is_float8());
    scales.flat_map(Word::scale)
}

/// Quantisation of the rows of keys and of values.
pub(super) struct Quantizers {
    pub(super) key: Option<Quantizer>,
    pub(super) value: Option<Quantizer>,
}

/// Quantisation of the rows of one tensor.
#[derive(Clone, Copy)]
pub(super) struct Quantizer {
    pub(super) dtype: DType,
    source: ScaleSource,
    scale: ScaleParameters,
}

impl Quantizers {
    /// Declares and loads the parameters of the scales, where the kernel quantises.
    pub(super) fn load(k: &mut Builder, spec: Option<QuantizeSpec>) -> Self {
        let Some(QuantizeSpec { dtype, k_scale, v_scale }) = spec else { return Self { key: None, value: None } };
        let [key, value] = [(Operand::KScale, k_scale), (Operand::VScale, v_scale)]
            .map(|(scale, source)| Some(Quantizer { dtype, source, scale: ScaleParameters::load(k, scale) }));
        Self { key, value }
    }
}

/// Place of a row in a cache: its sequence, where there are any, page (or batch) and row.
pub(super) struct CachePlace {
    pub(super) sequence: Option<Reg<U32>>,
    pub(super) page: Reg<U32>,
    pub(super) row: Reg<U32>,
}

impl Quantizer {
    /// Divides the elements of a row by its scale. Every lane of the warp takes part; `is_first` is true in one lane of a
    /// row, which writes a computed scale where the row `is_stored`.
    pub(super) fn divide(
        self,
        k: &mut Builder,
        shape: RowShape,
        (place, head): (&CachePlace, Reg<U64>),
        [is_stored, is_first]: [Reg<Pred>; 2],
        values: &mut [[Vec<Reg<F32>>; 2]],
    ) {
        let scale = match self.source {
            ScaleSource::None => return,
            ScaleSource::Given => {
                let address = self.address(k, place, head);
                let scale = k.copy(1.0f32);
                k.when(is_stored, |k| k.load_into(scale, address));
                scale
            }
            ScaleSource::Computed => {
                let scale = self.computed(k, shape, values);
                let address = self.address(k, place, head);
                let is_written = k.and(is_stored, is_first);
                k.when(is_written, |k| k.store_one(address, scale));
                scale
            }
        };
        for element in values.iter_mut().flatten().flatten() {
            *element = k.div(*element, scale);
        }
    }

    /// The scale of the largest magnitude of a row, which its lanes share. A vector that is not there is another that is,
    /// and changes no maximum.
    fn computed(self, k: &mut Builder, shape: RowShape, values: &[[Vec<Reg<F32>>; 2]]) -> Reg<F32> {
        let amax = k.copy(0.0f32);
        for &element in values.iter().flatten().flatten() {
            let magnitude = k.abs(element);
            k.max_to(amax, magnitude);
        }
        let mut distance = shape.lanes / 2;
        while distance > 0 {
            let other = k.shuffle(ShuffleMode::Butterfly, amax, distance);
            k.max_to(amax, other);
            distance /= 2;
        }
        let is_zero = k.compare(Compare::Eq, amax, 0.0f32);
        let amax = k.min(amax, f32::MAX);
        let scale = k.div(amax, self.dtype.largest() as f32);
        let scale = k.max(scale, f32::MIN_POSITIVE);
        k.select(is_zero, 1.0f32, scale)
    }

    fn address(self, k: &mut Builder, place: &CachePlace, head: Reg<U64>) -> Reg<U64> {
        let scale = self.scale;
        let (page, row) = (k.widen(place.page), k.widen(place.row));
        let address = k.mad(page, scale.batch_stride, scale.first);
        let address = k.mad(row, scale.row_stride, address);
        let address = k.mad(head, scale.key_head_stride, address);
        match place.sequence {
            Some(sequence) => {
                let sequence = k.widen(sequence);
                k.mad(sequence, scale.sequence_stride, address)
            }
            None => address,
        }
    }
}

/// The codes of pairs of `f32`, two in a register.
pub(crate) fn codes(k: &mut Builder, dtype: DType, values: &[Reg<F32>]) -> Vec<Reg<U16>> {
    let to = if dtype == DType::E4m3 { Fp8::E4m3 } else { Fp8::E5m2 };
    values.chunks_exact(2).map(|pair| k.fp8_pair(to, pair[0], pair[1])).collect()
}

/// True in the first lane of a row.
pub(super) fn is_first_lane(k: &mut Builder, lane_in_row: Reg<U32>) -> Reg<Pred> {
    k.compare(Compare::Eq, lane_in_row, 0u32)
}
