//! The fingerprint file: every default config times a covering set of specializations, each kernel as a hash of its
//! program (names left out) beside its instruction counts by class.
//!
//! A refactoring leaves `fingerprint.txt` untouched. A change of the generated code changes it, and its diff is the
//! review: `FLASHCORE_UPDATE_FINGERPRINT=1 cargo test -p flashcore-kernels --test fingerprint` writes it anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use flashcore_ir::operation::Class;
use flashcore_ir::{Arch, Block, Instruction, Kernel, Op, Space, Statement, VerifiedKernel};
use flashcore_kernels::{Accuracy, Config, KernelLaunch, KernelSpec, LaunchPlan, Stage};
use flashcore_problem::{
    Alignment, DType, KvCacheProblem, Layout, Mask, MaskMod, PagedKv, Problem, Rotary, RotaryStyle, ScoreMod,
};

const FILE: &str = "tests/fingerprint.txt";
const UPDATE: &str = "FLASHCORE_UPDATE_FINGERPRINT";

/// The covering set: each feature at least once, both element types, head dimensions from 32 to 256. Configs that no
/// problem gets by default are there with the first [`FOR_EVERY_CONFIG`].
fn problems() -> Vec<(&'static str, Problem)> {
    let problem = |head_dim, dtype, change: fn(&mut Problem)| {
        let mut problem = Problem::new(2, 4, 1000, head_dim, dtype);
        change(&mut problem);
        problem
    };
    vec![
        ("d64 f16 full", problem(64, DType::F16, |_| {})),
        (
            "d128 bf16 causal lse",
            problem(128, DType::Bf16, |problem| {
                (problem.mask, problem.lse) = (Mask::Causal(Alignment::BottomRight), true);
            }),
        ),
        ("d32 f16 gqa decode", {
            problem(32, DType::F16, |problem| (problem.query_length, problem.key_heads) = (1, 1))
        }),
        ("d256 bf16 full", problem(256, DType::Bf16, |_| {})),
        (
            "d96x64 f16 window",
            problem(96, DType::F16, |problem| {
                problem.value_dim = 64;
                problem.mask = Mask::Window { left: Some(300), right: Some(7), alignment: Alignment::TopLeft };
            }),
        ),
        (
            "d64 bf16 causal lengths",
            problem(64, DType::Bf16, |problem| {
                (problem.mask, problem.seqused_k) = (Mask::Causal(Alignment::BottomRight), true);
            }),
        ),
        (
            "d64 f16 softcap alibi lse",
            problem(64, DType::F16, |problem| {
                (problem.softcap, problem.alibi, problem.lse) = (Some(30.0), true, true);
            }),
        ),
        ("d64 bf16 bias sinks", problem(64, DType::Bf16, |problem| (problem.bias, problem.sinks) = (true, true))),
        (
            "d64 f16 score_mod negative scale",
            problem(64, DType::F16, |problem| {
                let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key));
                (problem.score_mod, problem.aux_f32, problem.scale) = (Some(relative), 64, -0.125);
            }),
        ),
        (
            "d128 bf16 mask_mod documents",
            problem(128, DType::Bf16, |problem| {
                let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
                (problem.mask_mod, problem.aux_i32) = (Some(documents), 1000);
            }),
        ),
        (
            "d64 f16 mask_mod by head, causal lengths",
            problem(64, DType::F16, |problem| {
                let slanted = MaskMod::new("slanted", |at| (at.query - at.key).less(at.head * 100 + 50));
                (problem.mask, problem.seqused_k) = (Mask::Causal(Alignment::TopLeft), true);
                problem.mask_mod = Some(slanted);
            }),
        ),
        (
            "d64 f16 strides of 4 bytes",
            problem(64, DType::F16, |problem| {
                let mut strides = problem.strides();
                strides.key.row += 2;
                problem.layout = Layout::Strided(strides);
            }),
        ),
        (
            "d128 f16 kv e4m3 scales lse",
            problem(128, DType::F16, |problem| {
                (problem.kv_dtype, problem.lse) = (Some(DType::E4m3), true);
                (problem.k_scale, problem.v_scale) = (true, true);
            }),
        ),
        (
            "d64 bf16 kv e5m2 causal gqa decode pages",
            problem(64, DType::Bf16, |problem| {
                (problem.query_length, problem.key_heads, problem.kv_dtype) = (1, 1, Some(DType::E5m2));
                (problem.paged, problem.seqused_k) = (Some(PagedKv::new(16, 200, 63)), true);
                (problem.mask, problem.k_scale) = (Mask::Causal(Alignment::BottomRight), true);
            }),
        ),
        ("d40 f32 causal", { problem(40, DType::F32, |problem| problem.mask = Mask::Causal(Alignment::BottomRight)) }),
    ]
}

/// Query, key and value of 8 bits.
fn fp8_query_problems() -> Vec<(&'static str, Problem)> {
    let problem = |head_dim, change: fn(&mut Problem)| {
        let mut problem = Problem::new(2, 4, 1000, head_dim, DType::E4m3);
        change(&mut problem);
        problem
    };
    vec![
        ("d128 e4m3 full", problem(128, |problem| problem.out_dtype = Some(DType::Bf16))),
        (
            "d64 e4m3 causal scales lse",
            problem(64, |problem| {
                (problem.out_dtype, problem.lse) = (Some(DType::F16), true);
                problem.mask = Mask::Causal(Alignment::BottomRight);
                (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
            }),
        ),
        (
            "d96 e4m3 by e5m2 window softcap lengths",
            problem(96, |problem| {
                (problem.kv_dtype, problem.out_dtype) = (Some(DType::E5m2), Some(DType::Bf16));
                (problem.softcap, problem.seqused_k, problem.k_scale) = (Some(30.0), true, true);
                problem.mask = Mask::Window { left: Some(300), right: Some(7), alignment: Alignment::TopLeft };
            }),
        ),
        ("d256 e4m3 full", problem(256, |problem| problem.out_dtype = Some(DType::Bf16))),
        (
            "d192x208 e4m3 causal scales",
            problem(192, |problem| {
                (problem.value_dim, problem.out_dtype) = (208, Some(DType::F16));
                problem.mask = Mask::Causal(Alignment::BottomRight);
                (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
            }),
        ),
        (
            "d128 e4m3 causal gqa scales pages",
            problem(128, |problem| {
                (problem.key_heads, problem.out_dtype) = (1, Some(DType::Bf16));
                (problem.paged, problem.seqused_k) = (Some(PagedKv::new(16, 200, 63)), true);
                problem.mask = Mask::Causal(Alignment::BottomRight);
                (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
            }),
        ),
    ]
}

/// The same where only kernels with `mma.sync` take it.
fn fp8_mma_problems() -> Vec<(&'static str, Problem)> {
    let mut paged = Problem::new(2, 4, 3, 256, DType::E4m3).with_layout(Layout::Bshd);
    (paged.key_heads, paged.key_length, paged.out_dtype) = (2, 1000, Some(DType::Bf16));
    (paged.paged, paged.seqused_k) = (Some(PagedKv::new(16, 200, 63)), true);
    (paged.mask, paged.q_scale, paged.v_scale) = (Mask::Causal(Alignment::BottomRight), true, true);
    vec![("d256 e4m3 causal gqa pages", paged)]
}

const FOR_EVERY_CONFIG: usize = 2;

/// Attention that appends new keys itself.
fn growing() -> Vec<(&'static str, KvCacheProblem, Config)> {
    let config = |name: &str| name.parse().expect("a config");
    let mut attention = Problem::new(2, 4, 1, 128, DType::Bf16).with_layout(Layout::Bshd).with_lse(true);
    (attention.key_heads, attention.key_length) = (1, 1000);
    attention.mask = Mask::Causal(Alignment::BottomRight);
    let mut paged = attention.clone().with_kv_batch(Some(3)).with_total_q(Some(2));
    (paged.paged, paged.leftpad_k) = (Some(PagedKv::new(16, 200, 63)), true);
    let neox = Rotary::new(RotaryStyle::Neox, 128, 1000);
    let gpt_j = Rotary { table_dtype: Some(DType::F32), ..Rotary::new(RotaryStyle::GptJ, 64, 1000) };
    vec![
        (
            "d128 bf16 neox, packed chunks",
            KvCacheProblem::new(paged, 4).with_total_new(Some(7)).with_rotary(neox).with_rotary_seqlens(true),
            config("ampere-16x64-3stage-swizzled-4kvwarps-packgqa-7persistent-256chunk"),
        ),
        (
            "d128 bf16 gpt-j, splits",
            KvCacheProblem::new(attention.clone(), 2).with_rotary(gpt_j),
            config("ampere-32x32-2stage-swizzled-3splits"),
        ),
        ("d128 bf16", KvCacheProblem::new(attention, 1), Config::ampere()),
    ]
}

/// Sequences whose tiles come from a counter, or whose chunks are counted from lengths, in launches that overlap (PDL) and
/// that do not.
fn sequences() -> Vec<(&'static str, Problem, Config)> {
    let config = |name: &str| name.parse().expect("a config");
    let packed = |dtype, head_dim| {
        let mut problem = Problem::new(3, 4, 1000, head_dim, dtype).with_total_q(Some(1500)).with_total_k(Some(2000));
        (problem.key_heads, problem.lse) = (2, true);
        problem.mask = Mask::Causal(Alignment::BottomRight);
        problem
    };
    let mut bytes = packed(DType::E4m3, 128).with_lse(false);
    bytes.out_dtype = Some(DType::Bf16);
    vec![
        (
            "d128 bf16 packed, counter",
            packed(DType::Bf16, 128),
            config("hopper-128x128-2stage-overlap-persistent-dynamic"),
        ),
        (
            "d64 f16 packed, counter, pdl",
            packed(DType::F16, 64),
            config("hopper-192x64-2stage-overlap-pingpong-pdl-persistent-dynamic"),
        ),
        ("d128 e4m3 packed, chunks, pdl", bytes, config("hopper-64x64-2stage-pdl-128chunk")),
        ("d64 f16 packed, chunks, pdl", packed(DType::F16, 64), config("hopper-128x64-2stage-pdl-192chunk")),
        (
            "d64 f16 packed, chunks of ampere, pdl",
            packed(DType::F16, 64),
            config("ampere-64x64-2stage-swizzled-pdl-7persistent-128chunk"),
        ),
    ]
}

fn arch(config: Config) -> Arch {
    if config.family() == "hopper" { Arch::Sm90a } else { Arch::Sm80 }
}

/// One kernel: its hash, what it takes, and its instructions by class.
fn line(label: &str, kernel: &VerifiedKernel) -> String {
    let counts = kernel.instruction_counts();
    let total: usize = counts.iter().map(|(_, count)| count).sum();
    let mut line = format!(
        "{label:<52} {:016x} {:>7} {:>6} {:>4} {total:>6}",
        kernel.fingerprint(),
        kernel.threads,
        kernel.shared_bytes,
        kernel.parameters.len()
    );
    for (_, count) in counts {
        let _ = write!(line, " {count:>5}");
    }
    line
}

/// Every kernel of the covering set, with its label. Those beside an attention kernel may come several times.
fn each_kernel(visit: &mut impl FnMut(String, &KernelLaunch)) {
    let problems = [problems(), fp8_query_problems()].concat();
    let defaults = Config::defaults();
    let others = Config::all().into_iter().filter(|config| !defaults.contains(config));
    let mut numbers = BTreeMap::new();
    let mut visit_plan = |plan: &LaunchPlan, label: &str| {
        for launch in &plan.launches {
            match launch.stage() {
                Stage::Attention => visit(label.to_owned(), launch),
                _ => visit(BESIDE.to_owned(), launch),
            }
        }
    };
    for config in defaults.iter().copied().chain(others) {
        let covered = if defaults.contains(&config) { problems.len() } else { FOR_EVERY_CONFIG };
        let is_fp8 = Config::fp8().contains(&config);
        let family = match config.accuracy() {
            Accuracy::Exact if is_fp8 => "hopper fp8",
            Accuracy::Exact => config.family(),
            Accuracy::NearF32 | Accuracy::Tf32 => "ampere f32",
        };
        let number = numbers.entry(family).and_modify(|number| *number += 1).or_insert(0);
        let tile = config.tile_n().map(|keys| format!(" {}x{keys}", config.tile_m())).unwrap_or_default();
        for (name, problem) in &problems[..covered] {
            if problem.dtype.is_float8() != is_fp8 {
                continue;
            }
            let Ok(plan) = LaunchPlan::new(problem, config, arch(config)) else { continue };
            visit_plan(&plan, &format!("{family} {number}{tile}, {name}"));
        }
    }
    // Where tensor cores multiply 8-bit floats, and where they are converted.
    for arch in [Arch::Sm89, Arch::Sm90] {
        for (number, config) in Config::fp8_mma().into_iter().enumerate() {
            let tile = config.tile_n().map(|keys| format!(" {}x{keys}", config.tile_m())).unwrap_or_default();
            for (name, problem) in fp8_query_problems().into_iter().chain(fp8_mma_problems()) {
                let Ok(plan) = LaunchPlan::new(&problem, config, arch) else { continue };
                visit_plan(&plan, &format!("{arch} fp8 {number}{tile}, {name}"));
            }
        }
    }
    for (name, problem, config) in sequences() {
        let arch = if config.family() == "hopper" { Arch::Sm90a } else { Arch::Sm90 };
        let plan = LaunchPlan::new(&problem, config, arch).unwrap_or_else(|reasons| panic!("{name}: {}", reasons[0]));
        visit_plan(&plan, &format!("{}, {name}", config.family()));
    }
    for (name, problem, config) in growing() {
        let plan = LaunchPlan::with_append(&problem, config, arch(config)).expect("a kernel that appends");
        for launch in &plan.launches {
            let label = match launch.stage() {
                Stage::Attention => format!("append {name}"),
                _ => format!("append {name}, combine"),
            };
            visit(label, launch);
        }
    }
}

/// The label of kernels beside an attention kernel.
const BESIDE: &str = "beside it";

fn fingerprint() -> String {
    let classes = Class::ALL.map(|class| format!("{class:?}").chars().take(5).collect::<String>());
    let classes = classes.map(|class| format!(" {class:>5}")).concat();
    let [hash, head] = ["hash", "kernel"];
    let mut text =
        format!("{head:<52} {hash:<16} {:>7} {:>6} {:>4} {:>6}{classes}\n", "threads", "smem", "args", "instr");
    let mut sides = BTreeSet::new();
    each_kernel(&mut |label, launch| {
        let line = line(&label, &launch.kernel());
        if label == BESIDE {
            sides.insert(line);
        } else {
            text.extend([line, "\n".to_owned()]);
        }
    });
    text.extend(sides.into_iter().flat_map(|line| [line, "\n".to_owned()]));
    text
}

#[test]
fn kernels_are_the_programs_they_were() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let actual = fingerprint();
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &actual).expect("the file can be written");
        return;
    }
    let expected = std::fs::read_to_string(&path).expect("the fingerprint file");
    let (expected, found): (BTreeSet<_>, BTreeSet<_>) = (expected.lines().collect(), actual.lines().collect());
    let gone: Vec<_> = expected.difference(&found).map(|line| format!("- {line}")).collect();
    let new: Vec<_> = found.difference(&expected).map(|line| format!("+ {line}")).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "generated kernels changed; if that is meant, set {UPDATE}=1 and say why in the commit:\n{}\n{}",
        gone.join("\n"),
        new.join("\n")
    );
}

/// The bytes that a config knows without its kernel are those of the kernel.
#[test]
fn configs_know_their_shared_memory() {
    let mut count = 0;
    each_kernel(&mut |label, launch| {
        if let KernelSpec::Attention(config, specialization) = launch.key.spec {
            assert_eq!(config.shared_bytes(specialization), launch.kernel().shared_bytes, "{label}");
            count += 1;
        }
    });
    assert!(count > 500, "{count}");
}

/// In a kernel that overlaps with the launch before it (PDL), every thread waits for that launch before it touches memory of
/// the device or lets the next launch start, on every path. The same kernels without their waits, or with a trigger first,
/// break that rule.
#[test]
fn kernels_wait_before_they_touch_memory() {
    let (mut overlapping, mut wrong) = (BTreeSet::new(), BTreeSet::new());
    each_kernel(&mut |label, launch| {
        let kernel = launch.kernel();
        if kernel.waits_for_previous() {
            let mut touched = Vec::new();
            waits(&kernel.body, false, &mut touched);
            wrong.extend(touched.drain(..).map(|op| format!("{label} ({}): {op}", kernel.name)));
            overlapping.insert(launch.stage() as u8);
            for plant in [drop_waits, trigger_first] {
                let mut planted = VerifiedKernel::clone(&kernel).into_kernel();
                plant(&mut planted);
                touched.clear();
                waits(&planted.body, false, &mut touched);
                assert!(!touched.is_empty(), "{label} ({}): the planted bug breaks no rule", kernel.name);
            }
        }
    });
    assert_eq!(overlapping, [Stage::ResetCounter, Stage::Attention, Stage::Combine].map(|stage| stage as u8).into());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn drop_waits(kernel: &mut Kernel) {
    let is_wait = |statement: &Statement| {
        matches!(statement, Statement::Instruction(Instruction { op: Op::GridDependencyWait {}, .. }))
    };
    kernel.blocks_mut(&mut |block| block.statements.retain(|statement| !is_wait(statement)));
}

fn trigger_first(kernel: &mut Kernel) {
    let origin = kernel.body.statements[0].origin();
    let trigger = Instruction { op: Op::LaunchDependents {}, guard: None, origin };
    kernel.body.statements.insert(0, Statement::Instruction(trigger));
}

/// Gathers what a thread does too early; true if it has waited after the block.
fn waits(block: &Block, mut waited: bool, touched: &mut Vec<String>) -> bool {
    for statement in &block.statements {
        match statement {
            Statement::Instruction(instruction) => {
                let op = &instruction.op;
                let needs_wait = matches!(
                    op,
                    Op::Load { space: Space::Global, .. }
                        | Op::Store { space: Space::Global, .. }
                        | Op::Atomic { space: Space::Global, .. }
                        | Op::CompareAndSwap { space: Space::Global, .. }
                        | Op::Reduce { space: Space::Global, .. }
                        | Op::CopyAsync { .. }
                        | Op::BulkLoad { .. }
                        | Op::BulkStore { .. }
                        | Op::TensorLoad { .. }
                        | Op::TensorStore { .. }
                        | Op::LaunchDependents {}
                );
                if needs_wait && !waited {
                    touched.push(op.to_string());
                }
                waited |= instruction.guard.is_none() && matches!(op, Op::GridDependencyWait {});
            }
            Statement::If(choice) => {
                let then = waits(&choice.then, waited, touched);
                waited = waits(&choice.otherwise, waited, touched) && then;
            }
            Statement::Loop(repetition) => {
                waited = waits(&repetition.header, waited, touched);
                waits(&repetition.body, waited, touched);
            }
        }
    }
    waited
}
