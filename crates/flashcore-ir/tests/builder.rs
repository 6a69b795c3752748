//! The output of the builder: structures, guards, sections, origins, shared memory.

use std::collections::BTreeSet;

use flashcore_ir::builder::{
    Adds, CachePolicy, CopyBytes, LeftMatrix, LoadOptions, MatrixLayout, SharedMatrix, TensorCopyOptions,
};
use flashcore_ir::types::{Bf16, Bf16x2, F16, F16x2, F32, Pred, S32, S64, U16, U32, U64};
use flashcore_ir::{
    Arch, Block, Builder, Compare, FenceScope, Fp8, GlobalAddress, Guard, Kernel, L2Prefetch, Major, MmaShape, Op,
    Operand, ReduceOp, Reg, RegisterId, Rounding, SectionId, SharedAddress, ShuffleMode, SpecialRegister, Statement,
    StoreCache, Swizzle, TABLE, VoteMode,
};

/// A kernel as lines: the text of each statement with its guard, the arms of structures indented under it.
fn outline(kernel: &Kernel) -> String {
    let mut lines = Vec::new();
    write_block(&kernel.body, 0, &mut lines);
    lines.join("\n")
}

fn write_block(block: &Block, depth: usize, lines: &mut Vec<String>) {
    let indent = "  ".repeat(depth);
    for statement in &block.statements {
        match statement {
            Statement::Instruction(instruction) => {
                let guard = instruction.guard.map_or_else(String::new, |Guard { predicate, negated }| {
                    format!("@{}{predicate} ", if negated { "!" } else { "" })
                });
                lines.push(format!("{indent}{guard}{}", instruction.op));
            }
            Statement::If(choice) => {
                lines.push(format!("{indent}if {} uniform={}", choice.condition, choice.uniform));
                write_block(&choice.then, depth + 1, lines);
                lines.push(format!("{indent}else"));
                write_block(&choice.otherwise, depth + 1, lines);
            }
            Statement::Loop(repetition) => {
                lines.push(format!("{indent}loop uniform={}", repetition.uniform));
                write_block(&repetition.header, depth + 1, lines);
                lines.push(format!("{indent}while {}", repetition.condition));
                write_block(&repetition.body, depth + 1, lines);
            }
        }
    }
}

fn check(write: impl FnOnce(&mut Builder, Reg<Pred>, Reg<Pred>), expected: &str) {
    let mut k = Builder::new("kernel", 32);
    let (p, q) = (k.register::<Pred>(), k.register::<Pred>());
    write(&mut k, p, q);
    assert_eq!(outline(&k.finish()), expected.trim_start());
}

#[test]
fn choices() {
    check(
        |k, p, q| {
            k.if_then(p, |k| k.warp_sync());
            k.if_uniform(q, |k| k.exit());
            k.if_else(p, |k| k.exit(), |k| k.if_else_uniform(q, |_| {}, |k| k.warp_sync()));
            k.copy_async_commit();
        },
        "
if %0 uniform=false
  WarpSync
else
if %1 uniform=true
  Exit
else
if %0 uniform=false
  Exit
else
  if %1 uniform=true
  else
    WarpSync
CopyAsyncCommit",
    );
}

#[test]
fn loops() {
    check(
        |k, p, q| {
            k.while_lanes(
                |k| {
                    k.warp_sync();
                    p
                },
                |k| k.copy_async_commit(),
            );
            k.while_uniform(|_| q, |k| k.while_lanes(|_| p, |_| {}));
        },
        "
loop uniform=false
  WarpSync
while %0
  CopyAsyncCommit
loop uniform=true
while %1
  loop uniform=false
  while %0",
    );
}

#[test]
fn counted_loops() {
    check(
        |k, _, _| {
            k.for_uniform(-4, 4, 2, |k, index: Reg<S32>| {
                k.neg(index);
            });
            let end = k.lane();
            k.for_lanes(0u32, end, |_, _| {});
        },
        "
Mov ty=S32 d=%2, a=0xfffffffc
loop uniform=true
  SetPredicate compare=Lt ty=S32 d=%3, a=%2, b=0x4
while %3
  Neg ty=S32 d=%4, a=%2
  Add ty=S32 d=%2, a=%2, b=0x2
Special register=Lane d=%5
Mov ty=U32 d=%6, a=0x0
loop uniform=false
  SetPredicate compare=Lt ty=U32 d=%7, a=%6, b=%5
while %7
  Add ty=U32 d=%6, a=%6, b=0x1",
    );
}

#[test]
fn guards() {
    check(
        |k, p, q| {
            k.when(p, |k| {
                k.exit();
                k.copy_async_commit();
            });
            k.unless(q, |k| k.exit());
            k.exit();
        },
        "
@%0 Exit
@%0 CopyAsyncCommit
@!%1 Exit
Exit",
    );
}

/// A structure inside a guard has its own condition, and after it the guard is in force again.
#[test]
fn structures_inside_guards() {
    check(
        |k, p, q| {
            k.when(p, |k| {
                k.exit();
                k.if_else(q, |k| k.copy_async_commit(), |k| k.unless(q, |k| k.copy_async_wait_all()));
                k.while_lanes(|_| q, |k| k.copy_async_commit());
                k.exit();
            });
            k.exit();
        },
        "
@%0 Exit
if %1 uniform=false
  CopyAsyncCommit
else
  @!%1 CopyAsyncWaitAll
loop uniform=false
while %1
  CopyAsyncCommit
@%0 Exit
Exit",
    );
}

#[test]
fn guards_inside_structures() {
    check(
        |k, p, q| {
            k.if_then(p, |k| {
                k.when(q, |k| k.exit());
                k.exit();
            });
        },
        "
if %0 uniform=false
  @%1 Exit
  Exit
else",
    );
}

/// Instructions inside two guards are executed where both hold; all lanes combine them.
#[test]
fn guards_inside_guards() {
    check(
        |k, p, q| {
            k.when(p, |k| {
                k.when(q, |k| k.exit());
                k.unless(q, |k| k.exit());
                k.when(p, |k| k.exit());
                k.exit();
            });
            k.unless(p, |k| {
                k.when(q, |k| k.exit());
                k.unless(q, |k| k.exit());
            });
        },
        "
And ty=Pred d=%2, a=%0, b=%1
@%2 Exit
Not ty=Pred d=%3, a=%1
And ty=Pred d=%4, a=%0, b=%3
@%4 Exit
@%0 Exit
@%0 Exit
Not ty=Pred d=%5, a=%0
And ty=Pred d=%6, a=%5, b=%1
@%6 Exit
Or ty=Pred d=%7, a=%0, b=%1
@!%7 Exit",
    );
}

/// Sections name statements and registers, and change no guard.
#[test]
fn sections_and_guards() {
    let mut k = Builder::new("kernel", 32);
    let p = k.compare(Compare::Eq, 0u32, 0u32);
    k.section("scores", |k| {
        k.when(p, |k| {
            k.lane();
            k.section("mask", |k| k.lane());
        });
        k.if_then(p, |k| k.section("mask", |k| k.warp_sync()));
    });
    k.section("mask", |k| k.lane());
    let kernel = k.finish();
    let paths: Vec<String> = kernel.sections.iter().map(ToString::to_string).collect();
    assert_eq!(paths, ["prologue", "scores", "scores / mask", "mask"]);
    let mut placed = Vec::new();
    kernel.instructions(&mut |instruction| {
        let guard = if instruction.guard.is_some() { "@" } else { "" };
        placed.push(format!("{guard}{} {}", instruction.op.entry().name, instruction.origin.section.0));
    });
    assert_eq!(placed.join(", "), "SetPredicate 0, @Special 1, @Special 2, WarpSync 2, Special 3");
    assert_eq!(kernel.body.statements[3].origin().section, SectionId(1));
    let registers: Vec<u32> = kernel.registers.iter().map(|register| register.section.0).collect();
    assert_eq!(registers, [0, 1, 2, 3]);
}

/// The name of the instructions and the lines they say they were written on, counted from `first`.
fn origins(kernel: &Kernel, first: u32) -> Vec<(&'static str, u32)> {
    let mut origins = Vec::new();
    kernel.instructions(&mut |instruction| {
        assert_eq!(instruction.origin.file, file!());
        origins.push((instruction.op.entry().name, instruction.origin.line - first));
    });
    origins
}

/// Methods that write several instructions, and those that call others, all lead to their caller.
#[test]
fn origins_of_instructions() {
    let mut k = Builder::new("kernel", 32);
    let first = line!();
    let rows = k.parameter::<U64>("rows");
    k.warp();
    k.load_one::<F32>(rows);
    let half = k.load_one(rows);
    k.bf16_to_f32(half);
    k.cta_sync();
    let zero = k.copy(0u32);
    k.store_one(rows, zero);
    assert_eq!(
        origins(&k.finish(), first),
        [
            ("LoadParam", 1),
            ("Special", 2),
            ("Shr", 2),
            ("Load", 3),
            ("Load", 4),
            ("Convert", 5),
            ("BarrierSync", 6),
            ("Mov", 7),
            ("Store", 8),
        ]
    );
}

/// Writes with every method once, and all rows of the table.
#[expect(clippy::too_many_lines, reason = "one line per method of the builder")]
fn every_method() -> Kernel {
    let mut k = Builder::new("kernel", 32);
    let global = k.parameter::<U64>("global");
    let shared = k.shared_base();
    let word = k.special(SpecialRegister::ThreadX);
    k.lane();
    k.warp();
    let p = k.compare(Compare::Lt, word, 1u32);

    let x = k.copy(1.0f32);
    k.set(x, 2.0f32);
    k.add_to(x, 1.0f32);
    k.mul_to(x, 1.0f32);
    k.max_to(x, 1.0f32);
    k.exp2_to(x);
    k.fma_to(x, 1.0f32, 1.0f32);
    k.scale_add_to(x, 1.0f32, 1.0f32);
    k.set_where(x, p, 1.0f32);
    k.select(p, x, 1.0f32);

    k.add(x, x);
    k.sub(x, x);
    k.mul(x, x);
    k.mul_high(word, 3u32);
    k.mul_wide(word, 3u32);
    k.mad(word, 3u32, 4u32);
    k.mad_wide(word, 3u32, global);
    k.fma(x, x, x);
    k.div(x, x);
    k.rem(word, 3u32);
    k.min(x, x);
    k.max(x, x);
    k.neg(x);
    k.abs(x);
    k.and(word, 1u32);
    k.or(word, 1u32);
    k.xor(word, 1u32);
    k.not(word);
    k.shl(word, 1u32);
    k.shr(word, 1u32);
    k.lop3(0xea, word, 1u32, 2u32);
    k.bit_field_extract(word, 1u32, 2u32);
    k.bit_field_insert(word, 1u32, 2u32, 3u32);
    k.permute(word, 1u32, 2u32);
    k.pop_count(word);
    k.leading_zeros(word);
    k.exp2(x);
    k.tanh(x);
    k.log2(x);
    k.reciprocal(x);
    k.reciprocal_sqrt(x);
    k.sqrt(x);

    k.widen(word);
    k.truncate(global);
    let signed = k.to_integer::<S32>(x, Rounding::ToZero);
    let wide: Reg<S64> = k.widen_signed(signed);
    k.to_f32(signed);
    let short = k.load_one::<U16>(global);
    k.widen_half(short);
    let half: Reg<F16> = k.f32_to_f16(x);
    k.f16_to_f32(half);
    let brain: Reg<Bf16> = k.f32_to_bf16(x);
    k.bf16_to_f32(brain);
    let tensor = k.f32_to_tf32(x);
    k.reinterpret::<S64, U64>(wide);
    let pair = k.pair::<F16x2>(x, x);
    k.unpack(pair);
    let bytes = k.fp8_pair(Fp8::E4m3, x, x);
    k.widen_fp8(Fp8::E4m3, bytes);
    let joined = k.register();
    k.join_halves_to(joined, bytes, bytes);
    k.halves(word);
    k.pack::<Bf16x2>(brain, brain);

    k.shuffle(ShuffleMode::Index, word, 0u32);
    k.vote(VoteMode::All, p);
    k.ballot(p);
    k.reduce_warp(ReduceOp::Add, word);
    k.warp_sync();

    k.load::<F32>(global, 4);
    k.load_with::<F32, GlobalAddress>(global, 1, LoadOptions::default());
    k.load_shared::<F32>(shared, 2);
    k.load_into(x, global);
    k.store(global, &[x, x]);
    k.store_with::<F32, SharedAddress>(shared, &[x], StoreCache::WriteBack);
    k.store_one(global, x);
    k.store_shared(shared, &[x]);
    k.prefetch(global);
    k.atomic::<F32, GlobalAddress>(ReduceOp::Add, global, x);
    k.compare_and_swap::<U32, SharedAddress>(shared, word, word);
    k.reduce::<F32, GlobalAddress>(ReduceOp::Add, global, x);

    k.copy_async(shared, global, CopyBytes::All(16), L2Prefetch::None);
    k.copy_async_commit();
    k.copy_async_wait(1);
    k.copy_async_wait_all();
    k.bulk_store(global, shared, 16u32);
    k.bulk_commit();
    k.bulk_wait(0, true);
    k.fence_proxy_async();
    let map = k.tensor_map("map");
    let column = k.copy(0i32);
    let (multicast, policy) = (k.multicast_mask(1), k.cache_policy(CachePolicy::EvictFirst));
    k.prefetch_tensor_map(map);
    k.bulk_load(shared, global, 16u32, shared);
    let options = TensorCopyOptions { multicast: Some(multicast), policy: Some(policy) };
    k.tensor_load(shared, map, &[column, column], shared, options);
    k.tensor_store(map, &[column], shared, None);

    let a = k.load_matrix::<F16x2>(shared, 2, false);
    let accumulator = [k.copy(0.0f32), k.copy(0.0f32), k.copy(0.0f32), k.copy(0.0f32)];
    k.mma(MmaShape::M16N8K8, &accumulator, &a, &a[..1]);
    k.mma(MmaShape::M16N8K4, &accumulator, &[tensor, tensor], &[tensor]);
    k.mma_fp8([Fp8::E4m3, Fp8::E5m2], &accumulator, &[word; 4], &[word; 2]);

    let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes: 0, stride_bytes: 1024 };
    let descriptor = k.matrix_descriptor(shared, layout);
    let descriptor = k.descriptor_plus(descriptor, 32);
    let matrix = SharedMatrix { descriptor, major: Major::Depth };
    let sums = k.warpgroup_accumulator::<F32>(8);
    k.wgmma_fence();
    k.wgmma::<F16x2, F32>(8, &sums, LeftMatrix::Shared(matrix), matrix, Adds::Replace);
    k.wgmma_fp8([Fp8::E4m3, Fp8::E5m2], 8, &sums, LeftMatrix::Registers(&[word; 4]), matrix, Adds::Add);
    k.wgmma_commit();
    k.wgmma_wait(0);
    k.barrier_sync(1u32, 32u32);
    k.barrier_arrive(1u32, 32u32);
    k.cta_sync();
    k.fence(FenceScope::Cta);

    k.mbarrier_init(shared, 1u32);
    k.mbarrier_arrive(shared, 1u32);
    k.mbarrier_arrive_expect(shared, 16u32);
    k.mbarrier_expect(shared, 16u32);
    k.mbarrier_wait(shared, 0u32);
    k.mbarrier_test(shared, 0u32);
    k.mbarrier_try_wait(shared, 0u32);
    k.fence_mbarrier_init();
    k.mbarrier_invalidate(shared);
    k.cluster_rank();
    let remote = k.map_shared(shared, 0u32);
    k.mbarrier_arrive_remote(remote, 1u32);
    k.mbarrier_arrive_expect_remote(remote.plus(8), 16u32);
    let words = k.load_cluster::<U32>(remote, 2);
    k.store_cluster(remote.plus(8), &words);
    k.cluster_arrive();
    k.cluster_wait();
    k.cluster_sync();
    k.elect();
    k.store_matrix(shared, &a, false);
    k.decrease_registers(40);
    k.increase_registers(232);
    k.grid_dependency_wait();
    k.launch_dependents();
    k.exit();
    k.finish()
}

/// No method reports a line of the builder instead of its caller's.
#[test]
fn every_method_leads_to_its_caller() {
    let kernel = every_method();
    assert!(origins(&kernel, 0).is_sorted_by_key(|(_, line)| *line));
}

#[test]
fn the_builder_writes_every_row_of_the_table() {
    let kernel = every_method();
    let mut written = BTreeSet::new();
    kernel.instructions(&mut |instruction| {
        written.insert(instruction.op.entry().name);
    });
    assert_eq!(written, TABLE.iter().map(|entry| entry.name).collect());
    assert_eq!(kernel.verify(Arch::Sm90a).map(|_| ()), Ok(()));
}

/// The instructions of a loop itself lead to the loop, those of its body to the body.
#[test]
fn origins_of_structures() {
    let mut k = Builder::new("kernel", 32);
    let first = line!();
    k.for_uniform(0u32, 4u32, 1u32, |k, _| {
        k.warp_sync();
    });
    k.for_lanes(0u32, 4u32, |k, _| {
        k.copy_async_commit();
    });
    let p = k.compare(Compare::Eq, 0u32, 0u32);
    k.when(p, |k| {
        k.unless(p, |k| {
            k.exit();
        });
    });
    k.unless(p, |k| {
        k.when(p, |k| {
            k.exit();
        });
    });
    k.if_uniform(p, |k| {
        k.while_uniform(
            |_| p,
            |k| {
                k.exit();
            },
        );
    });
    let kernel = k.finish();
    assert_eq!(
        origins(&kernel, first),
        [
            ("Mov", 1),
            ("SetPredicate", 1),
            ("WarpSync", 2),
            ("Add", 1),
            ("Mov", 4),
            ("SetPredicate", 4),
            ("CopyAsyncCommit", 5),
            ("Add", 4),
            ("SetPredicate", 7),
            ("Not", 9),
            ("And", 9),
            ("Exit", 10),
            ("Not", 14),
            ("And", 14),
            ("Exit", 15),
            ("Exit", 22),
        ]
    );
    let lines: Vec<u32> = kernel.body.statements.iter().map(|statement| statement.origin().line - first).collect();
    assert_eq!(lines, [1, 1, 4, 4, 7, 9, 9, 10, 14, 14, 15, 18]);
    let Some(Statement::If(choice)) = kernel.body.statements.last() else { panic!("the choice is the last statement") };
    assert_eq!(choice.then.statements[0].origin().line - first, 19);
}

/// A structure with nothing in it leads to its caller as well.
#[test]
fn origins_of_empty_structures() {
    let mut k = Builder::new("kernel", 32);
    let p = k.register::<Pred>();
    let first = line!();
    k.if_then(p, |_| {});
    k.if_else(p, |_| {}, |_| {});
    k.if_uniform(p, |_| {});
    k.if_else_uniform(p, |_| {}, |_| {});
    k.while_lanes(|_| p, |_| {});
    k.while_uniform(|_| p, |_| {});
    let origins = k.finish().body.statements.iter().map(Statement::origin).collect::<Vec<_>>();
    assert_eq!(origins.iter().map(|origin| origin.line - first).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    assert!(origins.iter().all(|origin| origin.file == file!()));
}

#[test]
fn shared_memory_is_aligned() {
    let mut k = Builder::new("kernel", 32);
    let offsets = [(10, 4), (2, 2), (1, 128), (0, 16), (16, 16), (1, 1)];
    assert_eq!(offsets.map(|(bytes, alignment)| k.reserve_shared(bytes, alignment)), [0, 10, 128, 144, 144, 160]);
    assert_eq!(k.finish().shared_bytes, 161);
}

/// A barrier of all threads waits for warps, the last of which may be partial.
#[test]
fn cta_barriers_count_whole_warps() {
    for (threads, waited_for) in [(1, 32), (32, 32), (48, 64), (128, 128), (1024, 1024)] {
        let mut k = Builder::new("kernel", threads);
        k.cta_sync();
        let kernel = k.finish();
        let mut ops = Vec::new();
        kernel.instructions(&mut |instruction| ops.push(instruction.op.clone()));
        let operands = (Operand::Constant(0), Operand::Constant(waited_for));
        assert_eq!(ops, [Op::BarrierSync { barrier: operands.0, threads: operands.1 }]);
        assert!(kernel.verify(Arch::Sm80).is_ok(), "{threads} threads");
    }
}

/// An operation that accumulates reads and writes the same register.
#[test]
fn accumulating_operations() {
    check(
        |k, p, _| {
            let x = k.register::<F32>();
            k.add_to(x, 1.0f32);
            k.mul_to(x, 2.0f32);
            k.max_to(x, 0.0f32);
            k.exp2_to(x);
            k.fma_to(x, 1.0f32, 2.0f32);
            k.scale_add_to(x, 1.0f32, 2.0f32);
            k.set_where(x, p, 0.0f32);
            assert_eq!(x.id(), RegisterId(2));
            let word = k.register::<U32>();
            k.add_to(word, word);
        },
        "
Add ty=F32 d=%2, a=%2, b=0x3f800000
Mul ty=F32 d=%2, a=%2, b=0x40000000
Max ty=F32 d=%2, a=%2, b=0x0
Exp2 ty=F32 d=%2, a=%2
Fma ty=F32 d=%2, a=0x3f800000, b=0x40000000, c=%2
Fma ty=F32 d=%2, a=0x3f800000, b=%2, c=0x40000000
Select ty=F32 d=%2, a=0x0, b=%2, condition=%0
Add ty=U32 d=%3, a=%3, b=%3",
    );
}
