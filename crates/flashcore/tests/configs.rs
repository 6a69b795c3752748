//! Every config can be written down with what this crate exports, field by field.

use flashcore::{
    Accumulation, AmpereConfig, Config, Exponential, HopperConfig, InTurn, L2Window, Packing, Product, QueryPlace,
    Rescale, ScalarConfig, SharedLayout, StepsConfig,
};

/// A config is what its name says.
fn check(config: Config, name: &str) {
    assert_eq!((config.to_string().as_str(), name.parse()), (name, Ok(config)));
}

#[test]
fn configs_are_written_field_by_field() {
    check(Config::Scalar(ScalarConfig { threads: 64 }), &Config::scalar().to_string());
    let ampere = AmpereConfig {
        warps: 4,
        rows_per_warp: 16,
        key_rows: 64,
        key_warps: 1,
        stages: 2,
        layout: SharedLayout::Swizzled,
        query: QueryPlace::Registers,
        rescale: Rescale::WhenRaised,
        load_bytes: 16,
        accumulation: Accumulation::F32,
        exponential: Exponential::Unit,
        producers: 0,
        persistent: 0,
        parts: 2,
        packing: Packing::OneHead,
        l2: L2Window::Default,
    };
    check(Config::Ampere(ampere), &Config::Ampere(ampere).to_string());
    let other = AmpereConfig {
        query: QueryPlace::Shared,
        packing: Packing::KeyHead,
        l2: L2Window::Key,
        accumulation: Accumulation::F16,
        ..ampere
    };
    assert_ne!(Config::Ampere(other).to_string(), Config::Ampere(ampere).to_string());
    let hopper = HopperConfig {
        warpgroups: 2,
        key_groups: 1,
        cluster: 1,
        key_rows: 128,
        stages: 2,
        rescale: Rescale::WhenFar,
        hidden_rescale: false,
        exponential: Exponential::Unit,
        in_turn: InTurn::Products,
        dependent: false,
        persistent: true,
    };
    check(Config::Hopper(hopper), &Config::Hopper(hopper).to_string());
    let steps = StepsConfig {
        key_rows: 64,
        stages: 1,
        layout: SharedLayout::Plain,
        load_bytes: 4,
        scores: Product::Scalar,
        output: Product::Tensor,
    };
    check(Config::Steps(steps), &Config::Steps(steps).to_string());
}
