//! Wrong arguments: each has its status and words that name it, and nothing is written.

use std::ffi::c_void;
use std::ptr;

use crate::abi::header::{Header, Struct, Tensors};
use crate::abi::library::{Library, Plan, text};
use crate::fuzz::element::Element;
use crate::simple::Simple;

fn status(name: &str) -> i32 {
    Header::get().constant(name)
}

/// A problem that is refused: its field, its value, and what the words must have.
fn refuse_problem(change: &dyn Fn(&mut Struct), named: &str) {
    let mut problem = Library::get().problem(1, 4, 8, 16, Element::F32.code());
    change(&mut problem);
    match Library::get().create(&problem) {
        Ok(_) => panic!("taken, though {named} is wrong"),
        Err((found, words)) => {
            assert!(found == status("INVALID_ARGUMENT") || found == status("UNSUPPORTED"), "{named}: {found} {words}");
            assert!(words.contains(named), "{named}: {words}");
        }
    }
}

#[test]
fn fields_of_a_problem() {
    let mut count = 0;
    let mut refuse = |field: &str, value: i128| {
        refuse_problem(
            &|problem| {
                problem.set(field, value);
            },
            field,
        );
        count += 1;
    };
    let wide = [u64::MAX as i128, i128::from(i64::MAX) + 1];
    for field in ["query_heads", "key_heads", "head_dim", "value_dim", "dtype"] {
        refuse(field, 0);
    }
    for (field, first) in [("dtype", 7), ("mask", 4), ("alignment", 4), ("layout", 4), ("lse_base", 2)] {
        for value in [-1, first, 99, i128::from(i32::MIN), i128::from(i32::MAX)] {
            refuse(field, value);
        }
    }
    refuse("dtype", i128::from(status("DTYPE_E5M2"))); // no query has it
    for field in ["alibi", "sinks", "bias", "seqused_k", "lse", "lse_without_sink", "cu_seqlens_q", "page_table"] {
        for value in [-1, 2, i128::from(i32::MAX), i128::from(i32::MIN)] {
            refuse(field, value);
        }
    }
    for value in [0, 1, 8, 100, 4104, i128::from(u32::MAX)] {
        refuse("base.struct_size", value);
    }
    for value in [0, -1, 6, i128::from(i32::MAX)] {
        refuse("base.operation", value);
    }
    // A size that belongs to a switch which is off would be ignored.
    for field in ["total_q", "total_k", "kv_batch", "page_size", "num_pages", "table_width", "table_stride"] {
        refuse(field, 4);
    }
    for value in wide {
        refuse("query_length", value);
        refuse("key_length", value);
        refuse("head_dim", value);
        refuse("value_dim", value);
    }
    // Sizes that are no field's fault: a tensor does not fit.
    for (field, tensor) in [("batch", "query"), ("query_heads", "query")] {
        for value in [u64::MAX as i128 - 3, 1 << 62] {
            refuse_problem(
                &|problem| {
                    problem.set(field, value);
                },
                tensor,
            );
            count += 1;
        }
    }
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refuse_problem(
            &|problem| {
                problem.set_real("scale", value);
            },
            "scale",
        );
        count += 1;
    }
    for value in [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refuse_problem(
            &|problem| {
                problem.set_real("softcap", value);
            },
            "softcap",
        );
        count += 1;
    }
    for field in ["window_left", "window_right"] {
        for value in [-2, i128::from(i64::MIN)] {
            refuse_problem(
                &|problem| {
                    problem.set("mask", status("MASK_WINDOW").into()).set(field, value);
                },
                field,
            );
            count += 1;
        }
    }
    refuse_problem(
        &|problem| {
            problem.set("mask", status("MASK_WINDOW").into());
        },
        "window",
    );
    refuse_problem(
        &|problem| {
            problem.set("key_heads", 3);
        },
        "key_heads",
    );
    refuse_problem(
        &|problem| {
            problem.set("layout", status("LAYOUT_PACKED_QKV").into()).set("key_length", 9);
        },
        "packed",
    );
    count += 3;
    assert!(count >= 106, "{count}");
}

#[test]
fn strides_that_overlap_or_overflow() {
    let refuse = |changes: &[(&str, i128)], named: &str| {
        let change = |problem: &mut Struct| {
            problem.set("layout", status("LAYOUT_STRIDED").into());
            for tensor in ["query", "key", "value", "output"] {
                for (dimension, stride) in [("batch", 512), ("head", 128), ("row", 16)] {
                    problem.set(&format!("{tensor}_strides.{dimension}"), stride);
                }
            }
            for (field, value) in changes {
                problem.set(field, *value);
            }
        };
        refuse_problem(&change, named);
    };
    for tensor in ["query", "key", "value"] {
        refuse(&[(&format!("{tensor}_strides.row"), 15)], &format!("row stride of {tensor} is 15"));
        refuse(&[(&format!("{tensor}_strides.head"), 1)], &format!("head stride of {tensor} is 1"));
        refuse(&[(&format!("{tensor}_strides.row"), i128::from(i64::MAX))], tensor);
        refuse(&[(&format!("{tensor}_strides.head"), u64::MAX as i128)], tensor);
    }
    refuse(&[("output_strides.row", 0)], "overlap");
    refuse(&[("output_strides.head", 0)], "overlap");
    refuse(&[("output_strides.head", 16)], "overlap");
    refuse(&[("batch", 2), ("output_strides.batch", 0)], "overlap");
    refuse(&[("output_strides.row", i128::from(i64::MAX))], "output");
}

#[test]
fn versions_of_header_and_library() {
    let [major, minor, patch] = ["MAJOR", "MINOR", "PATCH"].map(|part| status(&format!("VERSION_{part}")));
    assert_eq!(Library::get().version(), format!("{major}.{minor}.{patch}"));
}

#[test]
fn pointers_devices_and_configs() {
    let library = Library::get();
    let problem = library.problem(1, 1, 4, 16, Element::F32.code());
    let invalid = status("INVALID_ARGUMENT");
    let cpu = status("DEVICE_CPU");
    let mut plan: Plan = ptr::dangling_mut();
    let create = |problem: *const u64, kind: i32, ordinal: i32, plan: *mut Plan| {
        // SAFETY: every pointer is null, misaligned, which is looked at first, or what it says.
        let found = unsafe { (library.plan_create)(problem, kind, ordinal, ptr::null(), plan) };
        (found, library.last_error())
    };
    let misaligned = |address: *const u64| address.wrapping_byte_add(1);
    let (good, target) = (problem.address(), &raw mut plan);
    assert_eq!(create(ptr::null(), cpu, 0, target), (invalid, "problem is null; it must not be".to_owned()));
    assert!(plan.is_null());
    assert_eq!(create(good, cpu, 0, ptr::null_mut()), (invalid, "plan is null; it must not be".to_owned()));
    assert_eq!(create(misaligned(good), cpu, 0, target).0, invalid);
    assert_eq!(create(good, cpu, 0, target.wrapping_byte_add(4)).0, invalid);
    for kind in [-1, 3, 99, i32::MIN, i32::MAX] {
        let words = format!("device_kind is {kind}; it must be one of FLASHCORE_DEVICE_*");
        assert_eq!(create(good, kind, 0, target), (invalid, words));
    }
    for ordinal in [-1, i32::MIN] {
        let words = format!("ordinal is {ordinal}; GPUs are numbered from 0");
        assert_eq!(create(good, status("DEVICE_CUDA"), ordinal, target), (invalid, words));
    }
    assert_eq!(create(good, status("DEVICE_CUDA"), i32::MAX, target).0, status("NO_DEVICE"));
    for config in [c"", c"amper", c"ampere-64x64-", c"\xC3\x28", c"ampere\n"] {
        // SAFETY: the pointers are to what they say.
        let found = unsafe { (library.plan_create)(good, cpu, 0, config.as_ptr(), target) };
        assert_eq!(found, invalid, "{config:?}: {}", library.last_error());
        assert!(plan.is_null());
    }
    // SAFETY: null is looked at.
    assert_eq!(unsafe { (library.attention_problem_init)(ptr::null_mut(), 1, 1, 1, 1, 0) }, invalid);
    for dtype in [-1, 0, 7, i32::MAX, i32::MIN] {
        let mut room = Struct::zeroed("flashcore_attention_problem_t");
        // SAFETY: room for a problem.
        assert_eq!(unsafe { (library.attention_problem_init)(room.address_mut(), 1, 1, 1, 1, dtype) }, invalid);
        assert_eq!(room.get("batch"), 0, "nothing was written");
    }
}

/// Plans that are gone, null, or made up, in every function that takes one.
#[test]
fn plans_that_are_none() {
    let library = Library::get();
    let simple = Simple::new([1, 1, 4, 16], Element::F32, 1);
    let gone = library.create(&simple.problem).unwrap();
    library.destroy(gone);
    let null = ptr::null_mut::<c_void>();
    let address = ptr::without_provenance_mut::<c_void>;
    for plan in [gone, address(0xDEAD_BEEF), address(usize::MAX), address(simple.problem.address().addr()), null] {
        // SAFETY: none of them is a plan, which is looked up and never followed.
        unsafe {
            assert_eq!(simple.run(plan).unwrap_err().0, status("INVALID_PLAN"));
            assert_eq!((library.launch)(plan, null, ptr::null(), 0), status("INVALID_PLAN"));
            assert_eq!((library.check)(plan, null, ptr::null(), 0), status("INVALID_PLAN"));
            assert_eq!((library.plan_workspace_bytes)(plan), 0);
            assert!((library.plan_describe)(plan).is_null());
            assert_ne!(library.last_error(), "");
            let destroyed = (library.plan_destroy)(plan);
            assert_eq!(destroyed, if plan.is_null() { 0 } else { status("INVALID_PLAN") });
        }
    }
}

#[test]
fn texts() {
    let library = Library::get();
    // SAFETY: functions without arguments, or with any.
    let (configs, name, unknown) =
        unsafe { ((library.configs)(), (library.status_name)(status("OUT_OF_MEMORY")), (library.status_name)(-5)) };
    assert!(text(configs).lines().any(|name| name == "ampere-64x64-2stage-swizzled"));
    assert_eq!([text(name), text(unknown)], ["FLASHCORE_OUT_OF_MEMORY", "an unknown status"]);
}

/// A launch of a plan on the CPU names what to use.
#[test]
fn launches_need_a_gpu() {
    let library = Library::get();
    let simple = Simple::new([1, 1, 4, 16], Element::F16, 1);
    let plan = library.create(&simple.problem).unwrap();
    let (words, null) = (simple.tensors.words(), ptr::null_mut());
    for (call, name) in [(library.launch, "flashcore_launch"), (library.check, "flashcore_check")] {
        // SAFETY: a plan on the CPU launches nothing.
        let found = unsafe { call(plan, null, words.as_ptr(), 5) };
        let words = library.last_error();
        assert_eq!(found, status("UNSUPPORTED"), "{words}");
        assert!(words.starts_with(&format!("{name} is for tensors on a GPU, and this plan is on ")), "{words}");
        assert!(words.ends_with("; use flashcore_run, or plan for FLASHCORE_DEVICE_CUDA"), "{words}");
    }
    // SAFETY: a plan.
    assert_eq!(unsafe { (library.plan_workspace_bytes)(plan) }, 0);
    assert_eq!(library.last_error(), "");
    library.destroy(plan);
}

/// A run that is refused: nothing is written, and the words name the argument.
fn refuse_run(features: &[&str], change: &dyn Fn(&mut Tensors), named: &str) {
    let mut simple = Simple::new([2, 2, 4, 8], Element::F32, 2);
    for feature in features {
        simple.problem.set(feature, 1);
    }
    simple.clear();
    let before = simple.result();
    let plan = Library::get().create(&simple.problem).unwrap();
    let mut tensors = simple.tensors.clone();
    change(&mut tensors);
    // SAFETY: what is wrong is refused before it is read; the rest is memory of the test.
    let Err((found, words)) = (unsafe { Library::get().try_run(plan, &tensors) }) else {
        panic!("{features:?}: taken, though {named} is wrong");
    };
    assert_eq!(found, status("INVALID_ARGUMENT"), "{words}");
    assert!(words.contains(named), "{named}: {words}");
    assert_eq!(simple.result(), before, "{named}: something was written");
    Library::get().destroy(plan);
}

#[test]
fn tensors_of_a_run() {
    let of = |name: &'static str, field: &'static str, value: fn(i128) -> i128| {
        move |tensors: &mut Tensors| {
            let tensor = tensors.get(name).unwrap();
            tensor.set(field, value(tensor.get(field)));
        }
    };
    for name in ["query", "key", "value", "output", "lse"] {
        refuse_run(&[], &of(name, "data", |_| 0), name);
        refuse_run(&[], &of(name, "data", |data| data + 1), name);
        refuse_run(&[], &of(name, "data", |data| data + 2), name);
        refuse_run(&[], &of(name, "bytes", |_| 0), name);
        refuse_run(&[], &of(name, "bytes", |bytes| bytes - 1), name);
        refuse_run(&[], &of(name, "bytes", |bytes| bytes - 4), name);
        refuse_run(&[], &of(name, "bytes", |_| u64::MAX as i128 - 3), name);
        refuse_run(&[], &of(name, "data", |_| i128::from(u64::MAX) - 63), name);
        refuse_run(&[], &of(name, "dtype", |_| 0), name);
        refuse_run(&[], &of(name, "dtype", |_| status("DTYPE_I32").into()), name);
        refuse_run(&[], &of(name, "dtype", |_| 99), name);
        refuse_run(&[], &of(name, "strides.4", |_| 1), &format!("tensors.{name} has strides[4] 1; it must be 0"));
        refuse_run(&[], &|tensors| *tensors = tensors.clone().without(name), name);
    }
    for (feature, tensor, dtype) in [
        ("alibi", "alibi_slopes", "F32"),
        ("sinks", "sinks", "F32"),
        ("bias", "bias", "F32"),
        ("seqused_k", "seqused_k", "I32"),
    ] {
        let floats = [0_u32; 64];
        let data = floats.as_ptr().cast::<u8>();
        let given = |data: *const u8, bytes: usize| {
            move |tensors: &mut Tensors| {
                let made = tensors.push_as(tensor, dtype, (data, bytes));
                if tensor == "bias" {
                    made.set("strides.3", 1);
                }
            }
        };
        refuse_run(&[feature], &|_| {}, tensor);
        refuse_run(&[], &given(data, 8), tensor);
        refuse_run(&[feature], &given(data, 7), tensor);
        refuse_run(&[feature], &given(data, 4), tensor);
        if tensor != "bias" {
            refuse_run(&[feature], &given(data, 12), tensor);
        }
        refuse_run(&[feature], &given(data.wrapping_add(2), 8), tensor);
    }
    let too_long = [4_u32, 5];
    refuse_run(
        &["seqused_k"],
        &|tensors| *tensors = tensors.clone().with("seqused_k", &too_long, &[]),
        "the key length of batch 1 is 5; it may be at most key_length, which is 4",
    );
    let one = [0.0_f32; 4];
    for dimension in 0..4 {
        let mut strides = [0; 4];
        strides[dimension] = u64::MAX;
        refuse_run(&["bias"], &|tensors| *tensors = tensors.clone().with("bias", &one, &strides), "bias");
    }
}

/// Entries of the list that are no operand, or not of this operation, or of a launch alone.
#[test]
fn operands_of_a_run() {
    let one = [0.0_f32; 4];
    for number in [0, -3, 99, i128::from(i32::MIN), i128::from(i32::MAX)] {
        let change = |tensors: &mut Tensors| {
            tensors.get("key").unwrap().set("operand", number);
        };
        refuse_run(&[], &change, &format!("tensors[1].operand is {number}; it must be an operand"));
    }
    let with = |operand: &'static str| {
        move |tensors: &mut Tensors| {
            *tensors = tensors.clone().with(operand, &one, &[]);
        }
    };
    refuse_run(&[], &with("key"), "tensors[5] is a second key");
    for operand in ["new_key", "slot_mapping", "part_lses", "cos"] {
        refuse_run(&[], &with(operand), operand);
    }
    refuse_run(&[], &with("workspace"), "FLASHCORE_WORKSPACE");
    refuse_run(&[], &with("tokens"), "FLASHCORE_TOKENS");
    let library = Library::get();
    let simple = Simple::new([1, 1, 4, 8], Element::F32, 3);
    let plan = library.create(&simple.problem).unwrap();
    let words = simple.tensors.words();
    for (tensors, count) in [(ptr::null(), 5), (words.as_ptr().wrapping_byte_add(4), 5), (words.as_ptr(), 0)] {
        // SAFETY: null and misaligned addresses are looked at and not followed.
        assert_eq!(unsafe { (library.run)(plan, tensors, count) }, status("INVALID_ARGUMENT"));
    }
    for count in [1025, u64::MAX] {
        // SAFETY: so many are refused unseen.
        assert_eq!(unsafe { (library.run)(plan, words.as_ptr(), count) }, status("INVALID_ARGUMENT"));
        assert_eq!(library.last_error(), format!("count is {count}; a call has at most 1024 tensors"));
    }
    library.destroy(plan);
}

/// Outputs may overlap nothing else, not by a single byte.
#[test]
fn outputs_that_overlap() {
    for input in ["query", "key", "value"] {
        for shift in [-124_i128, -4, 0, 4, 508] {
            let over = |tensors: &mut Tensors| {
                let data = tensors.get("output").unwrap().get("data") + shift;
                tensors.get(input).unwrap().set("data", data);
            };
            refuse_run(&[], &over, "tensors.output overlaps tensors.");
        }
        let over_rows = |tensors: &mut Tensors| {
            let data = tensors.get(input).unwrap().get("data");
            tensors.get("lse").unwrap().set("data", data + 16);
        };
        refuse_run(&[], &over_rows, "tensors.lse overlaps tensors.");
    }
    let over_each_other = |tensors: &mut Tensors| {
        let data = tensors.get("output").unwrap().get("data");
        tensors.get("lse").unwrap().set("data", data + 508);
    };
    refuse_run(&[], &over_each_other, "tensors.output overlaps tensors.lse");
}
