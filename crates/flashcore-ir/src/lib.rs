//! The kernel language of flashcore: typed registers, one table of operations, structured control flow, builder and verifier.
