//! Compares the outputs of two machines for a case.

use core::fmt;

use flashcore_ir::Type;
use half::{bf16, f16};

use super::case::{ConformanceCase, Tolerance};
use super::inputs::pair_element;

/// Result of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Elements compared; each half of a pair is one.
    pub elements: usize,
    /// Elements further apart than the tolerance allows.
    pub disagreements: usize,
    /// The first of them.
    pub first: Option<Mismatch>,
    /// Largest distance of elements that agreed.
    pub worst: Worst,
}

impl Comparison {
    /// True if every element agrees.
    pub const fn agrees(&self) -> bool {
        self.disagreements == 0
    }
}

/// The greatest distances between elements that agreed.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct Worst {
    /// In units in the last place. For tensor cores, whose error follows the largest term, it can be large where terms
    /// cancel.
    pub ulps: u64,
    /// Share of what the tolerance allows; 0 where it allows nothing.
    pub share: f64,
}

/// An element on which two machines disagree.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// The case.
    pub case: String,
    /// The output.
    pub output: String,
    /// The element of the output; where a case gives each thread one element, the thread.
    pub element: usize,
    /// Which half of a pair, 0 for the lower; `None` where elements are no pairs.
    pub half: Option<usize>,
    /// The operands of the thread, by name, as bits.
    pub operands: Vec<(String, u64)>,
    /// The type of the element, or of the half.
    pub ty: Type,
    /// Bits of the first machine.
    pub expected: u64,
    /// Bits of the second machine.
    pub actual: u64,
    /// The distance in units in the last place, if both are numbers.
    pub ulps: Option<u64>,
    /// The tolerance.
    pub tolerance: Tolerance,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, output, element, ty, expected, actual, tolerance, .. } = self;
        write!(formatter, "{case}: `{output}` of element {element}")?;
        if let Some(half) = self.half {
            write!(formatter, ", {} half", if half == 0 { "lower" } else { "upper" })?;
        }
        write!(formatter, ": expected {}, got {}", shown(*ty, *expected), shown(*ty, *actual))?;
        if let Some(ulps) = self.ulps {
            write!(formatter, ", {ulps} ULP apart")?;
        }
        write!(formatter, "; allowed is {tolerance}")?;
        for (index, (name, bits)) in self.operands.iter().enumerate() {
            write!(formatter, "{}{name} = {bits:#x}", if index == 0 { "; with " } else { ", " })?;
        }
        Ok(())
    }
}

/// Bits, and the number they are.
fn shown(ty: Type, bits: u64) -> String {
    number(ty, bits).map_or_else(|| format!("{bits:#x}"), |value| format!("{bits:#x} ({value:e})"))
}

/// Compares the outputs of two machines. `expected` are those of the simulator, by whose magnitude relative tolerances
/// go.
pub fn compare(case: &ConformanceCase, inputs: &[Vec<u8>], expected: &[Vec<u8>], actual: &[Vec<u8>]) -> Comparison {
    let mut comparison = Comparison { elements: 0, disagreements: 0, first: None, worst: Worst::default() };
    let magnitudes = match case.tolerance {
        Tolerance::Sum { products, .. } => Some(products.magnitudes(inputs)),
        Tolerance::Bits | Tolerance::Exact | Tolerance::Ulps { .. } | Tolerance::Within { .. } => None,
    };
    for (index, output) in case.outputs.iter().enumerate() {
        let nothing = Vec::new();
        let [expected, actual] = [expected, actual].map(|outputs| outputs.get(index).unwrap_or(&nothing));
        for element in 0..output.count {
            let [expected, actual] = [expected, actual].map(|bytes| bits(bytes, output.ty, element));
            for half in halves(output.ty) {
                let magnitude = magnitudes.as_ref().map_or(0.0, |all| all[index][element][half.unwrap_or(0)]);
                let (ty, shift) = half
                    .map_or((output.ty, 0), |half: usize| (pair_element(output.ty).unwrap_or(output.ty), 16 * half));
                let part =
                    |bits: Option<u64>| bits.map(|bits| if half.is_some() { bits >> shift & 0xffff } else { bits });
                comparison.elements += 1;
                let (Some(expected), Some(actual)) = (part(expected), part(actual)) else {
                    comparison.disagreements += 1;
                    continue;
                };
                let verdict = judge(ty, expected, actual, case.tolerance, magnitude);
                if verdict.agrees {
                    comparison.worst.ulps = comparison.worst.ulps.max(verdict.ulps.unwrap_or(0));
                    comparison.worst.share = comparison.worst.share.max(verdict.share);
                    continue;
                }
                comparison.disagreements += 1;
                comparison.first.get_or_insert_with(|| Mismatch {
                    case: case.name.clone(),
                    output: output.name.clone(),
                    element,
                    half: *half,
                    operands: operands(case, inputs, output.count, element),
                    ty,
                    expected,
                    actual,
                    ulps: verdict.ulps,
                    tolerance: case.tolerance,
                });
            }
        }
    }
    comparison
}

/// The halves of a type: both of a pair, or the whole.
fn halves(ty: Type) -> &'static [Option<usize>] {
    if pair_element(ty).is_some() { &[Some(0), Some(1)] } else { &[None] }
}

/// The bits of an element; `None` past the end of the bytes.
fn bits(bytes: &[u8], ty: Type, element: usize) -> Option<u64> {
    let width = ty.bytes() as usize;
    let bytes = bytes.get(element * width..)?.get(..width)?;
    let mut all = [0; 8];
    all[..width].copy_from_slice(bytes);
    Some(u64::from_le_bytes(all))
}

/// The operands of a thread: elements of the inputs that have as many as the output.
fn operands(case: &ConformanceCase, inputs: &[Vec<u8>], count: usize, element: usize) -> Vec<(String, u64)> {
    let inputs = case.inputs.iter().zip(inputs).filter(|(input, _)| input.count == count);
    inputs.filter_map(|(input, bytes)| Some((input.name.clone(), bits(bytes, input.ty, element)?))).collect()
}

/// The number that bits are; `None` for types that are no floats.
pub(super) fn number(ty: Type, bits: u64) -> Option<f64> {
    match ty {
        Type::F32 | Type::Tf32 => Some(f32::from_bits(bits as u32).into()),
        Type::F16 => Some(f16::from_bits(bits as u16).to_f32_const().into()),
        Type::Bf16 => Some(bf16::from_bits(bits as u16).to_f32_const().into()),
        Type::Pred | Type::U16 | Type::U32 | Type::S32 | Type::U64 | Type::S64 | Type::F16x2 | Type::Bf16x2 => None,
    }
}

struct Verdict {
    agrees: bool,
    ulps: Option<u64>,
    share: f64,
}

fn judge(ty: Type, expected: u64, actual: u64, tolerance: Tolerance, magnitude: f64) -> Verdict {
    let exactly = |agrees: bool| Verdict { agrees, ulps: None, share: 0.0 };
    let (Some(e), Some(a)) = (number(ty, expected), number(ty, actual)) else {
        return exactly(expected == actual);
    };
    if tolerance == Tolerance::Bits {
        return exactly(expected == actual);
    }
    if e.is_nan() || a.is_nan() {
        return exactly(e.is_nan() && a.is_nan());
    }
    let flushed = matches!(tolerance, Tolerance::Ulps { flushed: true, .. });
    let ulps = ulps_apart(ty, expected, actual, flushed);
    let verdict = |agrees: bool, share: f64| Verdict { agrees, ulps: Some(ulps), share };
    let within = |allowed: f64| {
        // A part of infinity is infinity, which would allow anything.
        if e == a || e.is_infinite() || a.is_infinite() {
            return verdict(e == a, 0.0);
        }
        let distance = (e - a).abs();
        verdict(distance <= allowed, if allowed > 0.0 { distance / allowed } else { 0.0 })
    };
    let signs_agree = !(e == 0.0 && a == 0.0) || expected == actual;
    match tolerance {
        Tolerance::Bits | Tolerance::Exact => verdict(expected == actual, 0.0),
        _ if !signs_agree && !matches!(tolerance, Tolerance::Sum { .. }) => verdict(false, 0.0),
        Tolerance::Ulps { most, .. } => verdict(ulps <= most.into(), ulps as f64 / f64::from(most.max(1))),
        Tolerance::Within { relative, absolute } => within((relative * e.abs()).max(absolute)),
        Tolerance::Sum { relative, absolute, .. } => {
            // An infinite sum of magnitudes would allow anything.
            let bound = if magnitude.is_finite() { relative * magnitude } else { 0.0 };
            within(bound.max(absolute))
        }
    }
}

/// The number of steps from one float to another, through zero if their signs differ. Where subnormals are flushed, the
/// least normal number is the neighbour of zero.
pub(super) fn ulps_apart(ty: Type, one: u64, other: u64, flushed: bool) -> u64 {
    let mantissa = match ty {
        Type::F16 => 10,
        Type::Bf16 => 7,
        _ => 23,
    };
    let sign = 1u64 << (ty.bits() - 1);
    let position = |bits: u64| {
        let magnitude = (bits & (sign - 1)) as i64;
        let least_normal = 1i64 << mantissa;
        let magnitude = match (flushed, magnitude < least_normal) {
            (false, _) => magnitude,
            (true, true) => 0,
            (true, false) => magnitude - least_normal + 1,
        };
        if bits & sign == 0 { magnitude } else { -magnitude }
    };
    position(one).abs_diff(position(other))
}

/// The bytes of an output with one NaN for all, so that equal values have equal bytes.
pub(super) fn canonical(ty: Type, bytes: &[u8], tolerance: Tolerance) -> Vec<u8> {
    let element = pair_element(ty).unwrap_or(ty);
    let width = element.bytes() as usize;
    let mut bytes = bytes.to_vec();
    if tolerance == Tolerance::Bits {
        return bytes;
    }
    for chunk in bytes.chunks_exact_mut(width) {
        let mut all = [0; 8];
        all[..width].copy_from_slice(chunk);
        if number(element, u64::from_le_bytes(all)).is_some_and(f64::is_nan) {
            chunk.fill(0xff);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_in_the_last_place() {
        let f32s = |one: f32, other: f32, flushed| {
            ulps_apart(Type::F32, one.to_bits().into(), other.to_bits().into(), flushed)
        };
        assert_eq!(f32s(1.0, 1.0f32.next_up().next_up(), false), 2);
        assert_eq!(f32s(1.0, 1.0f32.next_down(), false), 1);
        assert_eq!(f32s(0.0, -0.0, false), 0);
        let least = f32::from_bits(1);
        assert_eq!(f32s(-least, least, false), 2);
        assert_eq!(f32s(0.0, f32::MIN_POSITIVE, false), 1 << 23);
        assert_eq!(f32s(0.0, f32::MIN_POSITIVE, true), 1);
        assert_eq!(f32s(-f32::MIN_POSITIVE, f32::MIN_POSITIVE.next_up(), true), 3);
        assert_eq!(ulps_apart(Type::F16, 0x3c00, 0x3c03, false), 3);
        assert_eq!(ulps_apart(Type::Bf16, 0x8001, 0x0001, false), 2);
    }

    fn agrees(ty: Type, expected: u64, actual: u64, tolerance: Tolerance) -> bool {
        judge(ty, expected, actual, tolerance, 1.0).agrees
    }

    #[test]
    fn nans_zeros_and_infinities() {
        let (nan, other_nan, infinity, most) = (0x7fc0_0000, 0xffff_ffff, 0x7f80_0000, 0x7f7f_ffff);
        let ulps = Tolerance::Ulps { most: 2, flushed: false };
        let within = Tolerance::Within { relative: 1.0, absolute: 1.0 };
        for tolerance in [Tolerance::Exact, ulps, within] {
            assert!(agrees(Type::F32, nan, other_nan, tolerance));
            assert!(!agrees(Type::F32, nan, infinity, tolerance));
            assert!(!agrees(Type::F32, 0, nan, tolerance));
            assert!(agrees(Type::F32, infinity, infinity, tolerance));
            assert!(!agrees(Type::F32, infinity, infinity | 1 << 31, tolerance));
            assert!(!agrees(Type::F32, 0, 1 << 31, tolerance), "the sign of zero");
        }
        assert!(!agrees(Type::F32, nan, other_nan, Tolerance::Bits));
        assert!(!agrees(Type::F32, infinity, most, within));
        assert!(agrees(Type::U32, nan, nan, Tolerance::Exact));
        assert!(!agrees(Type::U32, nan, other_nan, Tolerance::Exact), "words are no NaNs");
    }

    #[test]
    fn bounds_are_bounds() {
        let one = u64::from(1f32.to_bits());
        let ulps = Tolerance::Ulps { most: 2, flushed: false };
        assert!(agrees(Type::F32, one, one + 2, ulps));
        assert!(!agrees(Type::F32, one, one + 3, ulps));
        let within = Tolerance::Within { relative: f64::from(f32::EPSILON) * 1.5, absolute: 0.0 };
        assert!(agrees(Type::F32, one, one + 1, within));
        assert!(!agrees(Type::F32, one, one + 2, within));
    }

    #[test]
    fn canonical_bytes_forget_which_nan() {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let (one, other) = (words(&[0x7fc0_0000, 7]), words(&[0xffff_ffff, 7]));
        assert_eq!(canonical(Type::F32, &one, Tolerance::Exact), other);
        assert_eq!(canonical(Type::F32, &one, Tolerance::Bits), one);
        // The upper half alone is a NaN.
        assert_eq!(canonical(Type::F16x2, &words(&[0x7c01_3c00]), Tolerance::Exact), words(&[0xffff_3c00]));
        assert_eq!(canonical(Type::U32, &one, Tolerance::Exact), one);
    }
}
