//! Attention with a growing KV cache in the simulator, with lengths and tables that are wrong.
