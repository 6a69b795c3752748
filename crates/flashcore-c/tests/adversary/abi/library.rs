//! The shared library, opened at run time, and its functions by the types of the header.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use super::built::folder;
use super::header::{Header, Struct};

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

const RTLD_NOW: c_int = 2;

pub(crate) type Plan = *mut c_void;

/// The functions of the library.
pub(crate) struct Library {
    pub(crate) problem_init: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) plan_create: unsafe extern "C" fn(*const u64, i32, i32, *mut Plan) -> i32,
    pub(crate) plan_create_with_config: unsafe extern "C" fn(*const u64, i32, i32, *const c_char, *mut Plan) -> i32,
    pub(crate) plan_launch: unsafe extern "C" fn(
        Plan,
        *mut c_void,
        *const c_void,
        *const c_void,
        *const c_void,
        *mut c_void,
        *mut f32,
    ) -> i32,
    pub(crate) plan_launch_tensors: unsafe extern "C" fn(Plan, *mut c_void, *const u64) -> i32,
    pub(crate) plan_workspace_bytes: unsafe extern "C" fn(Plan) -> u64,
    pub(crate) plan_run_host: unsafe extern "C" fn(Plan, *const u64, *const u64) -> i32,
    pub(crate) plan_describe: unsafe extern "C" fn(Plan) -> *const c_char,
    pub(crate) plan_destroy: unsafe extern "C" fn(Plan) -> i32,
    pub(crate) problem_init_sized: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) plan_run_tensors: unsafe extern "C" fn(Plan, *const u64) -> i32,
    pub(crate) continue_create: unsafe extern "C" fn(*const u64, i32, i32, *mut Plan) -> i32,
    pub(crate) continue_run_host: unsafe extern "C" fn(Plan, *const u64, *const u64) -> i32,
    pub(crate) continue_run_tensors: unsafe extern "C" fn(Plan, *const u64) -> i32,
    pub(crate) continue_launch: unsafe extern "C" fn(Plan, *mut c_void, *const u64) -> i32,
    pub(crate) continue_destroy: unsafe extern "C" fn(Plan) -> i32,
    pub(crate) kvcache_problem_init: unsafe extern "C" fn(*mut u64, *const u64, u64) -> i32,
    pub(crate) kvcache_create: unsafe extern "C" fn(*const u64, *const u64, i32, i32, *mut Plan) -> i32,
    pub(crate) kvcache_run_host: unsafe extern "C" fn(Plan, *const u64, *const u64, *const u64, *const u64) -> i32,
    pub(crate) kvcache_run_tensors: unsafe extern "C" fn(Plan, *const u64, *const u64) -> i32,
    pub(crate) kvcache_launch: unsafe extern "C" fn(Plan, *mut c_void, *const u64, *const u64) -> i32,
    pub(crate) kvcache_destroy: unsafe extern "C" fn(Plan) -> i32,
    pub(crate) append_problem_init: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) append_create: unsafe extern "C" fn(*const u64, i32, i32, *mut Plan) -> i32,
    pub(crate) append_run_host: unsafe extern "C" fn(Plan, *const u64, *const u64) -> i32,
    pub(crate) append_launch: unsafe extern "C" fn(Plan, *mut c_void, *const u64) -> i32,
    pub(crate) append_destroy: unsafe extern "C" fn(Plan) -> i32,
    pub(crate) merge_problem_init: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) merge_create: unsafe extern "C" fn(*const u64, i32, i32, *mut Plan) -> i32,
    pub(crate) merge_run_host: unsafe extern "C" fn(Plan, *const u64, *const u64) -> i32,
    pub(crate) merge_launch: unsafe extern "C" fn(Plan, *mut c_void, *const u64) -> i32,
    pub(crate) merge_destroy: unsafe extern "C" fn(Plan) -> i32,
    last_error: unsafe extern "C" fn() -> *const c_char,
    version: unsafe extern "C" fn() -> *const c_char,
}

impl Library {
    /// The library, opened once.
    pub(crate) fn get() -> &'static Self {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        LIBRARY.get_or_init(|| Self::open(&folder().join("libflashcore.so")))
    }

    #[expect(clippy::missing_transmute_annotations, reason = "the types are those of the fields")]
    fn open(path: &Path) -> Self {
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a text with a terminating zero; opening the library runs no code of it but that of the linker.
        let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
        // SAFETY: after a failure there is a text.
        assert!(!library.is_null(), "{}", unsafe { CStr::from_ptr(dlerror()) }.to_string_lossy());
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: a text with a terminating zero.
                let address = unsafe { dlsym(library, concat!("flashcore_", $name, "\0").as_ptr().cast()) };
                assert!(!address.is_null(), "the library has no flashcore_{}", $name);
                // SAFETY: the header declares the function with this type.
                unsafe { std::mem::transmute::<*mut c_void, _>(address) }
            }};
        }
        Self {
            problem_init: function!("problem_init"),
            plan_create: function!("plan_create"),
            plan_create_with_config: function!("plan_create_with_config"),
            plan_launch: function!("plan_launch"),
            plan_launch_tensors: function!("plan_launch_tensors"),
            plan_workspace_bytes: function!("plan_workspace_bytes"),
            plan_run_host: function!("plan_run_host"),
            plan_describe: function!("plan_describe"),
            plan_destroy: function!("plan_destroy"),
            problem_init_sized: function!("problem_init_sized"),
            plan_run_tensors: function!("plan_run_tensors"),
            continue_create: function!("continue_create"),
            continue_run_host: function!("continue_run_host"),
            continue_run_tensors: function!("continue_run_tensors"),
            continue_launch: function!("continue_launch"),
            continue_destroy: function!("continue_destroy"),
            kvcache_problem_init: function!("kvcache_problem_init"),
            kvcache_create: function!("kvcache_create"),
            kvcache_run_host: function!("kvcache_run_host"),
            kvcache_run_tensors: function!("kvcache_run_tensors"),
            kvcache_launch: function!("kvcache_launch"),
            kvcache_destroy: function!("kvcache_destroy"),
            append_problem_init: function!("append_problem_init"),
            append_create: function!("append_create"),
            append_run_host: function!("append_run_host"),
            append_launch: function!("append_launch"),
            append_destroy: function!("append_destroy"),
            merge_problem_init: function!("merge_problem_init"),
            merge_create: function!("merge_create"),
            merge_run_host: function!("merge_run_host"),
            merge_launch: function!("merge_launch"),
            merge_destroy: function!("merge_destroy"),
            last_error: function!("last_error"),
            version: function!("version"),
        }
    }

    pub(crate) fn last_error(&self) -> String {
        // SAFETY: the header promises a text that is valid until the next call on this thread.
        unsafe { CStr::from_ptr((self.last_error)()) }.to_string_lossy().into_owned()
    }

    pub(crate) fn version(&self) -> String {
        // SAFETY: the header promises a text that is valid forever.
        unsafe { CStr::from_ptr((self.version)()) }.to_string_lossy().into_owned()
    }

    /// A problem as `flashcore_problem_init` leaves it.
    pub(crate) fn problem(&self, batch: u64, heads: u64, length: u64, head_dim: u64, dtype: i32) -> Struct {
        let mut problem = Struct::zeroed("flashcore_problem_t");
        // SAFETY: it has the size that the header says.
        let status = unsafe { (self.problem_init)(problem.address_mut(), batch, heads, length, head_dim, dtype) };
        assert_eq!(status, 0, "{}", self.last_error());
        problem
    }

    /// A plan on the CPU, or the status and the words.
    pub(crate) fn create(&self, problem: &Struct) -> Result<Plan, (i32, String)> {
        let mut plan = std::ptr::dangling_mut();
        let cpu = Header::get().constant("DEVICE_CPU");
        // SAFETY: the struct is as large as it says, and the plan can be written.
        match unsafe { (self.plan_create)(problem.address(), cpu, 0, &raw mut plan) } {
            0 => Ok(plan),
            status => {
                assert!(plan.is_null(), "a plan that was not made is not null");
                Err((status, self.last_error()))
            }
        }
    }

    /// Runs a plan on tensors of the host.
    ///
    /// # Safety
    ///
    /// What the structs point to can be read and written as they say, or is refused before it is.
    pub(crate) unsafe fn run(&self, plan: Plan, inputs: &Struct, outputs: &Struct) -> Result<(), (i32, String)> {
        // SAFETY: the structs are as large as they say; the rest is the contract of this function.
        match unsafe { (self.plan_run_host)(plan, inputs.address(), outputs.address()) } {
            0 => Ok(()),
            status => Err((status, self.last_error())),
        }
    }

    pub(crate) fn destroy(&self, plan: Plan) {
        // SAFETY: any address may be given.
        let status = unsafe { (self.plan_destroy)(plan) };
        assert_eq!(status, 0, "{}", self.last_error());
    }
}
