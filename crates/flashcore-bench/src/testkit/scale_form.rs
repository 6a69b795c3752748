//! Forms of the scales of 8-bit tensors, as shapes name them: `+scales=head`.
//!
//! A problem says which tensors have scales; what one scale belongs to is a matter of the strides that come with each call.
//! Without a form, the seed of the inputs draws one.

use core::fmt;
use core::str::FromStr;

use flashcore_problem::{Inputs, Operand, Problem, Scale, ScaleStrides, SplitMix64};

/// Form of a scale: the elements that share one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleForm {
    /// One scale of the tensor.
    Tensor,
    /// One per KV head; of the query, for the heads that share it.
    KeyHead,
    /// One per sequence and KV head, as in `FlashAttention-3`.
    Sequence,
    /// One per token and head.
    Token,
}

impl ScaleForm {
    /// Every form.
    pub const ALL: [Self; 4] = [Self::Tensor, Self::KeyHead, Self::Sequence, Self::Token];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::KeyHead => "head",
            Self::Sequence => "sequence",
            Self::Token => "token",
        }
    }

    fn strides(self, scale: Operand, problem: &Problem) -> ScaleStrides {
        match self {
            Self::Tensor => ScaleStrides::TENSOR,
            Self::KeyHead => ScaleStrides::KEY_HEAD,
            Self::Sequence => ScaleStrides::per_sequence(problem),
            Self::Token => ScaleStrides::per_token(scale, problem),
        }
    }

    /// Gives inputs scales of this form: from 1/4 to 2 where a row takes part, NaN elsewhere.
    pub fn draw(self, problem: &Problem, inputs: &mut Inputs, seed: u64) {
        /// Keeps scales apart from the other inputs of a seed.
        const STREAM: u64 = 0x5c_a1e5;
        let present = |scale: &&Operand| scale.is_present(problem);
        for (index, &scale) in Operand::SCALES.iter().enumerate().filter(|(_, scale)| present(scale)) {
            let mut random = SplitMix64::stream(seed, STREAM + index as u64);
            let strides = self.strides(scale, problem);
            let mut data = vec![f32::NAN; strides.extent(scale, problem).unwrap_or(0)];
            for place in used(scale, strides, problem, inputs) {
                if data[place].is_nan() {
                    data[place] = (random.uniform() * 3.0 - 2.0).exp2() as f32;
                }
            }
            let drawn = Some(Scale { data, strides });
            match scale {
                Operand::QScale => inputs.q_scale = drawn,
                Operand::KScale => inputs.k_scale = drawn,
                _ => inputs.v_scale = drawn,
            }
        }
    }
}

/// Indices of the scales of rows that take part.
fn used(scale: Operand, strides: ScaleStrides, problem: &Problem, inputs: &Inputs) -> Vec<usize> {
    let group = problem.query_heads.checked_div(problem.key_heads).unwrap_or(1).max(1);
    let mut places = Vec::new();
    for sequence in inputs.views().sequences(problem) {
        if scale == Operand::QScale {
            for row in 0..sequence.query_length {
                let place = sequence.query_row(row);
                let of_head = |head| strides.query_index(sequence.index, place, head, group);
                places.extend((0..problem.query_heads).map(of_head));
            }
        } else {
            for key in sequence.attended_range(problem) {
                let place = sequence.key_row(key);
                places.extend((0..problem.key_heads).map(|head| strides.key_index(sequence.index, place, head)));
            }
        }
    }
    places
}

impl fmt::Display for ScaleForm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for ScaleForm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|form| form.name() == text).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Workload, parse_workload};

    /// Scales of every form are those that the oracle takes, as many as the form has, and the same for the same seed.
    #[test]
    fn every_form_is_drawn() {
        let counts = |form: &str| {
            let text = format!("3x8/2x5,40x64+seqused_k+pages=24x4+scales={form}");
            let Workload { problem, scales } =
                parse_workload(&text, "e4m3 out bf16".parse().expect("types")).expect("a shape");
            let form = scales.expect("a form");
            let mut inputs = Inputs::random(&problem, 3);
            form.draw(&problem, &mut inputs, 3);
            assert_eq!(inputs.validate(&problem), Ok(()), "{text}");
            let mut again = Inputs::random(&problem, 3);
            form.draw(&problem, &mut again, 3);
            let bits = |inputs: &Inputs| -> Vec<Vec<u32>> {
                let scales = [&inputs.q_scale, &inputs.k_scale, &inputs.v_scale];
                scales.map(|scale| scale.as_ref().expect("a scale").data.iter().map(|it| it.to_bits()).collect()).into()
            };
            assert_eq!(bits(&inputs), bits(&again));
            bits(&inputs).iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(counts("tensor"), [1, 1, 1]);
        assert_eq!(counts("head"), [2, 2, 2]);
        assert_eq!(counts("sequence"), [6, 6, 6]);
        assert_eq!(counts("token"), [3 * 5 * 8, 24 * 4 * 2, 24 * 4 * 2]);
    }
}
