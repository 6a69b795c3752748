//! The layout of prints, and the extent of a diff after an edit.

use std::collections::BTreeMap;

use flashcore_ir::builder::{CopyBytes, LoadOptions};
use flashcore_ir::types::{Bf16x2, F16, F16x2, F32, S32, S64, U32, U64};
use flashcore_ir::{
    Arch, Builder, Compare, FenceScope, GlobalAddress, Kernel, L2Prefetch, LoadCache, MmaShape, ReduceOp,
    SharedAddress, ShuffleMode, SpecialRegister, StoreCache, VerifiedKernel,
};
use flashcore_ptx::{PrintOptions, print, print_with};

fn verified(kernel: Kernel, arch: Arch) -> VerifiedKernel {
    kernel.verify(arch).unwrap_or_else(|errors| panic!("{}", errors[0]))
}

/// Sections inside sections, two of them of the same name; a loop, choices, guards, constants.
fn control_flow(edited: bool) -> Kernel {
    let mut k = Builder::new("control_flow", 128);
    k.set_register_budget(168);
    let x = k.parameter::<U64>("x");
    let count = k.parameter::<S32>("count");
    let scale = k.parameter::<F32>("scale");
    let thread = k.special(SpecialRegister::ThreadX);
    let x = k.mad_wide(thread, 4u32, x);
    let inside = k.compare(Compare::Lt, thread, 100u32);
    let sum = k.copy(-1.5f32);
    k.for_uniform(0i32, count, 2i32, |k, index| {
        k.section("keys", |k| {
            k.section("load", |k| {
                let value = k.copy(0.0f32);
                k.when(inside, |k| k.load_into(value, GlobalAddress::from(x).plus(-8)));
                k.unless(inside, |k| k.set(value, f32::NEG_INFINITY));
                k.fma_to(sum, value, scale);
            });
        });
        k.section("values", |k| {
            k.section("load", |k| {
                let odd = k.and(index, 1i32);
                let odd = k.compare(Compare::Ne, odd, 0i32);
                k.if_else_uniform(
                    odd,
                    |k| k.add_to(sum, 1.0f32),
                    |k| {
                        let is_nan = k.compare(Compare::Ne, sum, sum);
                        k.if_then(is_nan, |k| k.set(sum, f32::NAN));
                    },
                );
                if edited {
                    k.if_then(inside, |k| {
                        let twice = k.mul(sum, 2.0f32);
                        k.set(sum, twice);
                    });
                }
            });
        });
    });
    k.section("reduce across lanes", |k| {
        let other = k.shuffle(ShuffleMode::Butterfly, sum, 16u32);
        k.add_to(sum, other);
    });
    k.section("epilogue", |k| {
        let far = k.add(x, 0x1_0000_0000u64);
        k.while_lanes(|k| k.compare(Compare::Gt, sum, 100.0f32), |k| k.mul_to(sum, 0.5f32));
        k.store_one(far, sum);
    });
    k.finish()
}

fn memory() -> Kernel {
    let mut k = Builder::new("memory", 64);
    let global = k.parameter::<U64>("global");
    let offset = k.parameter::<S64>("offset");
    let tile = k.reserve_shared(4096, 128) as i32;
    let shared = k.shared_base();
    let at = |bytes: i32| SharedAddress::from(shared).plus(tile + bytes);
    k.section("loads", |k| {
        let one = k.load_one::<F16>(global);
        k.store_shared(at(0), &[one]);
        for (cache, prefetch) in [
            (LoadCache::All, L2Prefetch::Bytes128),
            (LoadCache::L2, L2Prefetch::None),
            (LoadCache::Streaming, L2Prefetch::Bytes64),
            (LoadCache::ReadOnly, L2Prefetch::Bytes256),
            (LoadCache::Volatile, L2Prefetch::None),
        ] {
            let four = k.load_with::<F32, GlobalAddress>(global, 4, LoadOptions { cache, prefetch });
            k.store_shared(at(16), &four);
        }
        k.prefetch(GlobalAddress::from(global).plus(-128));
    });
    k.section("stores", |k| {
        let two = k.load_shared::<U64>(at(32), 2);
        for cache in [StoreCache::WriteBack, StoreCache::L2, StoreCache::Streaming, StoreCache::WriteThrough] {
            k.store_with::<U64, GlobalAddress>(global, &two, cache);
        }
    });
    k.section("atomics", |k| {
        let one = k.copy(1u32);
        let ticket = k.atomic::<U32, GlobalAddress>(ReduceOp::Add, global, one);
        let old = k.compare_and_swap::<U32, SharedAddress>(at(64), ticket, one);
        k.reduce::<U32, GlobalAddress>(ReduceOp::Max, global, old);
        let half = k.copy(0.5f32);
        k.reduce::<F32, SharedAddress>(ReduceOp::Add, at(68), half);
        k.fence(FenceScope::Gpu);
    });
    k.section("copies", |k| {
        let bytes = k.copy(8u32);
        k.copy_async(at(128), global, CopyBytes::All(16), L2Prefetch::Bytes128);
        k.copy_async(at(144), global, CopyBytes::ZeroFill { written: 16, read: bytes }, L2Prefetch::None);
        k.copy_async(at(160), global, CopyBytes::All(4), L2Prefetch::None);
        k.copy_async_commit();
        k.copy_async_wait(1);
        k.copy_async_wait_all();
        k.cta_sync();
    });
    k.section("matrices", |k| {
        let a = k.load_matrix::<Bf16x2>(at(0), 4, false);
        let b = k.load_matrix::<Bf16x2>(at(512), 2, true);
        let sums: Vec<_> = (0..4).map(|_| k.copy(0.0f32)).collect();
        k.mma(MmaShape::M16N8K16, &sums, &a, &b);
        let low = k.pair::<F16x2>(sums[0], sums[1]);
        let high = k.pair::<F16x2>(sums[2], sums[3]);
        k.store_shared(at(1024), &[low, high]);
    });
    k.section("bulk", |k| {
        k.fence_proxy_async();
        k.warp_sync();
        let target = k.reinterpret::<S64, U64>(offset);
        k.bulk_store(target, at(1024), 256u32);
        k.bulk_commit();
        k.bulk_wait(0, true);
    });
    k.exit();
    k.finish()
}

#[test]
fn control_flow_as_labels() {
    insta::assert_snapshot!(print(&verified(control_flow(false), Arch::Sm80)));
}

#[test]
fn memory_operations() {
    insta::assert_snapshot!(print(&verified(memory(), Arch::Sm90)));
}

#[test]
fn an_edit_changes_the_text_of_its_section_alone() {
    let [before, after] = [false, true].map(|edited| by_section(&print(&verified(control_flow(edited), Arch::Sm80))));
    let changed: Vec<&String> = after.keys().filter(|section| before.get(*section) != after.get(*section)).collect();
    assert_eq!(changed, ["declarations of values_load", "values / load  (print.rs)"]);
}

/// The lines of a print, by the section that the comment above them names; of the declarations, by their registers.
fn by_section(text: &str) -> BTreeMap<String, Vec<String>> {
    let mut sections = BTreeMap::<String, Vec<String>>::new();
    let mut section = "header".to_owned();
    for line in text.lines() {
        if let Some(name) = line.trim().strip_prefix("// ") {
            name.clone_into(&mut section);
        } else if let Some((_, register)) = line.split_once(".reg ") {
            let slug = register.split_once('%').unwrap().1.rsplit_once('_').unwrap().0;
            sections.entry(format!("declarations of {slug}")).or_default().push(line.to_owned());
            continue;
        }
        sections.entry(section.clone()).or_default().push(line.to_owned());
    }
    sections
}

#[test]
fn source_lines_on_request() {
    let mut k = Builder::new("located", 32);
    let line = line!() + 1;
    k.warp_sync();
    let kernel = verified(k.finish(), Arch::Sm90a);
    assert_eq!(
        print_with(&kernel, PrintOptions { source_lines: true }),
        format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n\n.visible .entry located(\n)\n.maxntid 32, 1, 1\n.maxnreg 255\n{{\n    \
             // prologue  (print.rs)\n    bar.warp.sync 0xffffffff;  // print.rs:{line}\n    ret;\n}}\n"
        )
    );
}

/// ptxas uses as many registers as `.maxnreg` allows, even where such a CTA could not be launched.
#[test]
fn the_register_limit_lets_the_cta_launch() {
    let limit = |threads, budget| {
        let mut k = Builder::new("limited", threads);
        k.set_register_budget(budget);
        let text = print(&verified(k.finish(), Arch::Sm80));
        text.lines().find_map(|line| line.strip_prefix(".maxnreg ")?.parse::<u32>().ok())
    };
    assert_eq!(limit(32, 255), Some(255));
    assert_eq!(limit(256, 255), Some(255));
    assert_eq!(limit(288, 255), Some(168), "three of nine warps share a partition");
    assert_eq!(limit(384, 255), Some(168));
    assert_eq!(limit(512, 255), Some(128));
    assert_eq!(limit(512, 96), Some(96));
    assert_eq!(limit(1024, 255), Some(64));
}

/// Tensor maps among the parameters, clusters, swizzled shared memory, and waits as loops in a scope of their own, which
/// lanes that a guard excludes do not enter.
#[test]
fn what_hopper_needs_around_its_instructions() {
    use flashcore_ir::builder::TensorCopyOptions;
    let mut k = Builder::new("kernel", 128);
    k.set_cluster([2, 1, 1]);
    let map = k.tensor_map("map");
    let shared = k.shared_base();
    let column = k.copy(0i32);
    k.reserve_shared(2048, 1024);
    let first = k.compare::<U32>(Compare::Eq, shared, 0u32);
    k.when(first, |k| {
        k.tensor_load(shared, map, &[column, column], shared, TensorCopyOptions::default());
        k.mbarrier_wait(shared, 1u32);
    });
    k.unless(first, |k| k.mbarrier_wait(shared, 0u32));
    k.mbarrier_wait(shared, 0u32);
    let kernel = k.finish().verify(Arch::Sm90a).unwrap();
    let text = print(&kernel);
    let expected = "\
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared_memory[];

.visible .entry kernel(
    .param .align 64 .b8 map[128]
)
.maxntid 128, 1, 1
.reqnctapercluster 2, 1, 1
.maxnreg 255
{
    .reg .pred %prologue_p<1>;
    .reg .b32 %prologue_r<1>;
    .reg .b32 %prologue_i<1>;
    .reg .b64 %prologue_rd<1>;
    // prologue  (print.rs)
    cvta.param.u64 %prologue_rd0, map;
    mov.u32 %prologue_r0, shared_memory;
    mov.s32 %prologue_i0, 0;
    setp.eq.u32 %prologue_p0, %prologue_r0, 0;
    @%prologue_p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%prologue_r0], [%prologue_rd0, {%prologue_i0, %prologue_i0}], [%prologue_r0];
    {
        .reg .pred complete;
        @!%prologue_p0 bra done;
        wait:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%prologue_r0], 1;
        @!complete bra wait;
        done:
    }
    {
        .reg .pred complete;
        @%prologue_p0 bra done;
        wait:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%prologue_r0], 0;
        @!complete bra wait;
        done:
    }
    {
        .reg .pred complete;
        wait:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%prologue_r0], 0;
        @!complete bra wait;
    }
    ret;
}
";
    assert_eq!(text, expected);
    if flashcore_ptx::ptxas::find().is_ok()
        && let Err(error) = flashcore_ptx::assemble(&text, Arch::Sm90a)
    {
        panic!("{error}");
    }
}
