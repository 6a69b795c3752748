//! The public API, from outside. None of these tests needs a process of its own.

#[cfg(all(feature = "cpu", feature = "cuda"))]
mod arguments;
#[cfg(feature = "cpu")]
mod attention;
mod backends;
#[cfg(feature = "cuda")]
mod configs;
#[cfg(feature = "cpu")]
mod continuation;
#[cfg(feature = "cpu")]
mod conventions;
#[cfg(all(feature = "cpu", feature = "cuda"))]
mod errors;
#[cfg(feature = "cpu")]
mod host_tensors;
