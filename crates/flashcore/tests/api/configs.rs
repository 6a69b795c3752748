//! Every config can be written down with what this crate exports, field by field.

use flashcore::{
    Accumulation, AmpereConfig, Config, Exponential, Fp8Widening, HopperConfig, L2Window, LadderConfig, Product,
    QueryPlace, Rescale, ScalarConfig, SharedLayout, WarpScheduler,
};

/// A config is what its name says.
fn check(config: Config, name: &str) {
    assert_eq!((config.to_string().as_str(), name.parse()), (name, Ok(config)));
}

#[test]
fn configs_are_written_field_by_field() {
    check(Config::from(ScalarConfig { threads: 64 }), &Config::scalar().to_string());
    let ampere = AmpereConfig {
        fp8: Fp8Widening::Integer,
        warps: 4,
        rows_per_warp: 16,
        tile_n: 64,
        kv_split_warps: 1,
        stages: 2,
        layout: SharedLayout::Swizzled,
        query: QueryPlace::Registers,
        rescale: Rescale::IfChanged,
        load_bytes: 16,
        accumulation: Accumulation::F32,
        exponential: Exponential::Unit,
        producers: 0,
        persistent: 0,
        num_splits: 2,
        cluster: false,
        pack_gqa: false,
        l2: L2Window::Default,
        chunk_keys: 0,
        pdl: false,
        tf32: None,
    };
    check(Config::from(ampere), &Config::from(ampere).to_string());
    let other = AmpereConfig {
        query: QueryPlace::Shared,
        pack_gqa: true,
        l2: L2Window::Key,
        accumulation: Accumulation::F16,
        ..ampere
    };
    assert_ne!(Config::from(other).to_string(), Config::from(ampere).to_string());
    let hopper = HopperConfig {
        warpgroups: 2,
        kv_split_warpgroups: 1,
        cluster: 1,
        tile_n: 128,
        stages: 2,
        rescale: Rescale::Threshold,
        overlap_rescale: false,
        exponential: Exponential::Unit,
        warp_scheduler: WarpScheduler::PingPong,
        pdl: false,
        persistent: true,
        dynamic: false,
        chunk_keys: 0,
        pack_gqa: false,
        one_level: false,
    };
    check(Config::from(hopper), &Config::from(hopper).to_string());
    let steps = LadderConfig {
        tile_n: 64,
        stages: 1,
        layout: SharedLayout::Plain,
        load_bytes: 4,
        scores: Product::Scalar,
        output: Product::Tensor,
    };
    check(Config::from(steps), &Config::from(steps).to_string());
}
