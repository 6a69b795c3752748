//! PTX printer for flashcore IR, and the reader of ptxas's report on it.
//!
//! [`print()`] takes a kernel that the verifier has accepted, so it cannot fail; its text is what the driver of a GPU
//! compiles. It is written to be read and compared: registers and labels are named after the sections of the kernel,
//! comments lead back to the Rust source, and an edit to one section leaves the text of the others alone.
//!
//! ```
//! use flashcore_ir::{Arch, Builder, types::{F32, U64}};
//!
//! // y[i] = 2 * x[i] for one warp
//! let mut k = Builder::new("double", 32);
//! let x = k.parameter::<U64>("x");
//! let y = k.parameter::<U64>("y");
//! let lane = k.lane();
//! let (from, to) = (k.mad_wide(lane, 4u32, x), k.mad_wide(lane, 4u32, y));
//! k.section("scale", |k| {
//!     let value = k.load_one::<F32>(from);
//!     let doubled = k.mul(value, 2.0f32);
//!     k.store_one(to, doubled);
//! });
//! let kernel = k.finish().verify(Arch::Sm80).unwrap();
//!
//! let ptx = flashcore_ptx::print(&kernel);
//! let scale: Vec<&str> = ptx.lines().filter(|line| line.contains("%scale_f")).map(str::trim).collect();
//! assert_eq!(scale, [
//!     ".reg .b32 %scale_f<2>;",
//!     "ld.global.b32 %scale_f0, [%prologue_rd2];",
//!     "mul.rn.f32 %scale_f1, %scale_f0, 0f40000000;",
//!     "st.global.b32 [%prologue_rd3], %scale_f1;",
//! ]);
//! ```
//!
//! [`assemble`] runs NVIDIA's assembler on such a text, which needs no GPU, and returns the [`Resources`] that the
//! compiled kernel uses. `scripts/install-ptxas.sh` installs it.
//!
//! The `.version` of a print is the lowest that has its instructions, so that an old driver refuses nothing that it
//! could run.

mod instruction;
pub mod log;
mod names;
mod print;
pub mod ptxas;
mod resources;

pub use print::{PrintOptions, print, print_with};
pub use ptxas::PtxasError;
pub use resources::{Resources, assemble};
