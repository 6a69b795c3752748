//! Attention kernels written in tiles on top of flashcore IR.
