//! The workbench: verify, mutants, resources and measurements as a library.
