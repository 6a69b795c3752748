//! Executes flashcore IR on a CPU: values, asynchrony, faults and counters.
