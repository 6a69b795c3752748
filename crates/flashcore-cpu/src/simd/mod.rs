//! SIMD: the vector trait, its implementation for each instruction set, and the levels to choose from.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called after the detection of their processor")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called after the detection of their processor")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called after the detection of their processor")]
mod avx512_fused;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
pub(crate) mod exp2;
pub(crate) mod level;
#[cfg(target_arch = "aarch64")]
#[expect(unsafe_code, reason = "vector instructions are called after the detection of their processor")]
pub(crate) mod neon;
#[cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(unsafe_code, reason = "vector instructions are called after the detection of their processor")
)]
pub(crate) mod peak;
#[expect(unsafe_code, reason = "it implements the trait of vectors")]
pub(crate) mod portable;
pub(crate) mod real;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
#[expect(unsafe_code, reason = "vector instructions may not be called everywhere")]
pub(crate) mod tanh;
#[expect(unsafe_code, reason = "vector instructions may not be called everywhere")]
pub(crate) mod vector;
