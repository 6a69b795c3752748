//! Types per tensor: a KV cache in FP8 under a 16-bit query, and attention of which all inputs are FP8.
//!
//! | query | key and value | output | weights (P) are rounded to |
//! |---|---|---|---|
//! | any type of [`DType::ALL`] | the same | the same | the same |
//! | `f16`, `bf16`, `f32` | `e4m3`, `e5m2` | that of the query | that of the query |
//! | `e4m3` | `e4m3`, `e5m2` | `f16`, `bf16` | `e4m3` |
//!
//! A backend may round weights less than the table says; the gate judges by the table.

use crate::{DType, Layout, Operand, Problem, ProblemError};
use std::fmt;
use std::str::FromStr;

/// The element types of the tensors of a [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DTypes {
    /// Of the query.
    pub query: DType,
    /// Of key and value.
    pub key_value: DType,
    /// Of the output.
    pub output: DType,
}

impl DTypes {
    /// True if all tensors are of one type.
    pub fn are_same(self) -> bool {
        self.query == self.key_value && self.query == self.output
    }

    /// True if backends have these types together.
    fn are_possible(self) -> bool {
        let Self { query, key_value, output } = self;
        match (query.is_float8(), key_value.is_float8()) {
            (false, false) => self.are_same(),
            (false, true) => query != DType::F64 && output == query,
            (true, true) => query == DType::E4m3 && matches!(output, DType::F16 | DType::Bf16),
            (true, false) => false,
        }
    }
}

/// One name where all are the same, else with those of key and value and of the output.
impl fmt::Display for DTypes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { query, key_value, output } = self;
        write!(formatter, "{query}")?;
        if key_value != query {
            write!(formatter, " kv {key_value}")?;
        }
        if output != query {
            write!(formatter, " out {output}")?;
        }
        Ok(())
    }
}

/// Text that does not name element types.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not the types of a problem; write one, as in f16, or several, as in f16 kv e4m3 or e4m3 out bf16")]
pub struct ParseDTypesError(String);

impl FromStr for DTypes {
    type Err = ParseDTypesError;

    fn from_str(text: &str) -> Result<Self, ParseDTypesError> {
        let error = || ParseDTypesError(text.to_owned());
        let mut words = text.split(' ');
        let query: DType = words.next().and_then(|word| word.parse().ok()).ok_or_else(error)?;
        let mut types = Self { query, key_value: query, output: query };
        while let Some(tensor) = words.next() {
            let dtype = words.next().and_then(|word| word.parse().ok()).ok_or_else(error)?;
            match tensor {
                "kv" => types.key_value = dtype,
                "out" => types.output = dtype,
                _ => return Err(error()),
            }
        }
        Ok(types)
    }
}

impl Problem {
    /// The problem with other element types.
    #[must_use]
    pub fn with_dtypes(mut self, types: DTypes) -> Self {
        let other = |dtype: DType| (dtype != types.query).then_some(dtype);
        self.dtype = types.query;
        (self.kv_dtype, self.out_dtype) = (other(types.key_value), other(types.output));
        self
    }

    /// The element types of query, key and value, and output.
    pub const fn dtypes(&self) -> DTypes {
        let query = self.dtype;
        let key_value = match self.kv_dtype {
            Some(dtype) => dtype,
            None => query,
        };
        let output = match self.out_dtype {
            Some(dtype) => dtype,
            None => query,
        };
        DTypes { query, key_value, output }
    }

    pub(crate) fn validate_dtypes(&self, errors: &mut Vec<ProblemError>) {
        let types = self.dtypes();
        if !types.are_possible() {
            errors.push(ProblemError::DTypes { types });
        } else if self.layout == Layout::PackedQkv && types.query != types.key_value {
            errors.push(ProblemError::PackedDTypesDiffer { types });
        }
        let scales =
            [(Operand::QScale, types.query), (Operand::KScale, types.key_value), (Operand::VScale, types.key_value)];
        for (scale, dtype) in scales.into_iter().filter(|(scale, dtype)| scale.is_present(self) && !dtype.is_float8()) {
            errors.push(ProblemError::ScaleOfWideType { argument: scale.name(), dtype });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(dtype: DType, kv_dtype: Option<DType>, out_dtype: Option<DType>) -> Vec<ProblemError> {
        Problem::new(1, 2, 5, 8, dtype).with_kv_dtype(kv_dtype).with_out_dtype(out_dtype).errors()
    }

    #[test]
    fn types_go_together_as_the_table_says() {
        let every: Vec<DType> = DType::ALL.into_iter().chain(DType::FLOAT8).collect();
        let mut possible = Vec::new();
        for &query in &every {
            for &key_value in &every {
                for &output in &every {
                    let types = DTypes { query, key_value, output };
                    let found = errors(query, Some(key_value), Some(output));
                    assert_eq!(types.to_string().parse(), Ok(types));
                    assert_eq!(Problem::new(1, 2, 5, 8, DType::F64).with_dtypes(types).dtypes(), types);
                    if found.is_empty() {
                        possible.push(types.to_string());
                    } else {
                        assert_eq!(found, [ProblemError::DTypes { types }]);
                    }
                }
            }
        }
        let expected = [
            "f16",
            "f16 kv e4m3",
            "f16 kv e5m2",
            "bf16",
            "bf16 kv e4m3",
            "bf16 kv e5m2",
            "f32",
            "f32 kv e4m3",
            "f32 kv e5m2",
            "f64",
            "e4m3 out f16",
            "e4m3 out bf16",
            "e4m3 kv e5m2 out f16",
            "e4m3 kv e5m2 out bf16",
        ];
        assert_eq!(possible, expected);
        for wrong in ["", "f17", "f16 kv", "f16 e4m3", "f16 kv e4m3 q f16"] {
            assert_eq!(wrong.parse::<DTypes>(), Err(ParseDTypesError(wrong.to_owned())));
        }
    }

    #[test]
    fn operands_have_their_types() {
        let mut problem = Problem::new(1, 2, 5, 8, DType::Bf16);
        problem.kv_dtype = Some(DType::E5m2);
        let types = Operand::ALL[..4].iter().map(|operand| operand.dtype(&problem)).collect::<Vec<_>>();
        assert_eq!(types, [DType::Bf16, DType::E5m2, DType::E5m2, DType::Bf16].map(Some));
        assert_eq!(Operand::Key.element_bytes(&problem), 1);
        assert_eq!(Operand::KScale.element_bytes(&problem), 4);
        let text = "batch 1 heads 2/2 queries 5 keys 5 dims 8/8 bf16 kv e5m2 unmasked k_scale";
        assert_eq!(problem.clone().with_k_scale(true).to_string(), text);
        assert_eq!(problem.clone().with_v_scale(true).errors(), []);
        let error = ProblemError::ScaleOfWideType { argument: "q_scale", dtype: DType::Bf16 };
        assert_eq!(problem.clone().with_q_scale(true).errors(), [error]);
        let error = ProblemError::PackedDTypesDiffer { types: problem.dtypes() };
        assert_eq!(problem.with_layout(Layout::PackedQkv).errors(), [error]);
        // Nobody guesses the type of the output.
        let types = DTypes { query: DType::E4m3, key_value: DType::E4m3, output: DType::E4m3 };
        assert_eq!(errors(DType::E4m3, None, None), [ProblemError::DTypes { types }]);
    }
}
