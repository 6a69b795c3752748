//! Registers are numbered within their section and type, so that an edit elsewhere leaves their names alone.

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Class, Kernel, Since, Type};

/// A kernel of three sections, one within another, with `extra` instructions in the middle one.
fn kernel(extra: u32) -> Kernel {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    k.section("scores", |k| {
        let one = k.copy(1.0f32);
        k.section("mask", |k| {
            k.add(lane, 1u32);
            for _ in 0..extra {
                k.add(lane, 2u32);
                k.mul(one, 2.0f32);
            }
        });
        k.add(lane, 3u32);
        k.mul(one, one);
    });
    k.section("output", |k| k.copy(2.0f32));
    k.add(lane, lane);
    k.finish()
}

/// The registers as names are made of them: section, type, number.
fn names(kernel: &Kernel) -> Vec<(String, Type, u32)> {
    let name = |register: &flashcore_ir::Register| {
        (kernel.section(register.section).to_string(), register.ty, register.number)
    };
    kernel.registers.iter().map(name).collect()
}

fn named(names: &[(&str, Type, u32)]) -> Vec<(String, Type, u32)> {
    names.iter().map(|(section, ty, number)| ((*section).to_owned(), *ty, *number)).collect()
}

#[test]
fn numbers_follow_within_a_section_and_a_type() {
    assert_eq!(
        names(&kernel(0)),
        named(&[
            ("prologue", Type::U32, 0),
            ("scores", Type::F32, 0),
            ("scores / mask", Type::U32, 0),
            ("scores", Type::U32, 0),
            ("scores", Type::F32, 1),
            ("output", Type::F32, 0),
            ("prologue", Type::U32, 1),
        ])
    );
}

#[test]
fn an_instruction_more_leaves_the_other_numbers_alone() {
    let before = names(&kernel(0));
    let after = names(&kernel(2));
    let added: Vec<_> = after.iter().filter(|name| !before.contains(name)).cloned().collect();
    assert_eq!(
        added,
        named(&[
            ("scores / mask", Type::U32, 1),
            ("scores / mask", Type::F32, 0),
            ("scores / mask", Type::U32, 2),
            ("scores / mask", Type::F32, 1),
        ])
    );
    let kept: Vec<_> = after.into_iter().filter(|name| before.contains(name)).collect();
    assert_eq!(kept, before);
}

/// A section that is entered again goes on where it was left.
#[test]
fn sections_are_known_by_their_paths() {
    let mut k = Builder::new("kernel", 32);
    for _ in 0..2 {
        k.section("rows", |k| {
            k.register::<U32>();
            k.section("rows", Builder::register::<F32>);
        });
    }
    let kernel = k.finish();
    assert_eq!(
        names(&kernel),
        named(&[
            ("rows", Type::U32, 0),
            ("rows / rows", Type::F32, 0),
            ("rows", Type::U32, 1),
            ("rows / rows", Type::F32, 1),
        ])
    );
    let paths: Vec<String> = kernel.sections.iter().map(ToString::to_string).collect();
    assert_eq!(paths, ["prologue", "rows", "rows / rows"]);
}

/// Requirements and instruction counts of a kernel, structures included.
#[test]
fn kernels_add_up() {
    let mut k = Builder::new("kernel", 32);
    assert_eq!(Builder::new("kernel", 32).finish().since(), flashcore_ir::target::AMPERE);
    let (p, one) = (k.compare(flashcore_ir::Compare::Eq, 0u32, 0u32), k.copy(1.0f32));
    k.if_else(
        p,
        |k| {
            let pair = k.pair::<flashcore_ir::types::Bf16x2>(one, one);
            k.add(pair, pair);
        },
        |k| k.while_lanes(|_| p, |k| k.warp_sync()),
    );
    let kernel = k.finish();
    assert_eq!(kernel.since(), Since::new((7, 8), 90));
    assert_eq!(
        kernel.instruction_counts(),
        [
            (Class::Integer, 1),
            (Class::Float, 2),
            (Class::Convert, 1),
            (Class::SpecialFunction, 0),
            (Class::Warp, 0),
            (Class::Memory, 0),
            (Class::Asynchronous, 0),
            (Class::Tensor, 0),
            (Class::Barrier, 1),
            (Class::Control, 0),
        ]
    );
}
