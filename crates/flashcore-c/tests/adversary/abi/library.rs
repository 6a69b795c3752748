//! The shared library, opened at run time, and its functions by the types of the header.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use super::built::folder;
use super::header::{Header, Struct, Tensors};

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

const RTLD_NOW: c_int = 2;

pub(crate) type Plan = *mut c_void;

/// The functions of the library.
pub(crate) struct Library {
    pub(crate) attention_problem_init: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) kvcache_problem_init: unsafe extern "C" fn(*mut u64, *const u64, u64) -> i32,
    pub(crate) append_problem_init: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) merge_problem_init: unsafe extern "C" fn(*mut u64, u64, u64, u64, u64, i32) -> i32,
    pub(crate) plan_create: unsafe extern "C" fn(*const u64, i32, i32, *const c_char, *mut Plan) -> i32,
    pub(crate) run: unsafe extern "C" fn(Plan, *const u64, u64) -> i32,
    pub(crate) launch: unsafe extern "C" fn(Plan, *mut c_void, *const u64, u64) -> i32,
    pub(crate) check: unsafe extern "C" fn(Plan, *mut c_void, *const u64, u64) -> i32,
    pub(crate) plan_workspace_bytes: unsafe extern "C" fn(Plan) -> u64,
    pub(crate) plan_describe: unsafe extern "C" fn(Plan) -> *const c_char,
    pub(crate) plan_destroy: unsafe extern "C" fn(Plan) -> i32,
    pub(crate) configs: unsafe extern "C" fn() -> *const c_char,
    pub(crate) status_name: unsafe extern "C" fn(i32) -> *const c_char,
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
            attention_problem_init: function!("attention_problem_init"),
            kvcache_problem_init: function!("kvcache_problem_init"),
            append_problem_init: function!("append_problem_init"),
            merge_problem_init: function!("merge_problem_init"),
            plan_create: function!("plan_create"),
            run: function!("run"),
            launch: function!("launch"),
            check: function!("check"),
            plan_workspace_bytes: function!("plan_workspace_bytes"),
            plan_describe: function!("plan_describe"),
            plan_destroy: function!("plan_destroy"),
            configs: function!("configs"),
            status_name: function!("status_name"),
            last_error: function!("last_error"),
            version: function!("version"),
        }
    }

    pub(crate) fn last_error(&self) -> String {
        // SAFETY: the header promises a text that is valid until the next call on this thread.
        text(unsafe { (self.last_error)() })
    }

    pub(crate) fn version(&self) -> String {
        // SAFETY: the header promises a text that is valid forever.
        text(unsafe { (self.version)() })
    }

    /// A problem as `flashcore_attention_problem_init` leaves it.
    pub(crate) fn problem(&self, batch: u64, heads: u64, length: u64, head_dim: u64, dtype: i32) -> Struct {
        self.filled("attention", |problem| {
            // SAFETY: it has the size that the header says.
            unsafe { (self.attention_problem_init)(problem, batch, heads, length, head_dim, dtype) }
        })
    }

    /// A problem as its function leaves it.
    pub(crate) fn filled(&self, operation: &str, fill: impl FnOnce(*mut u64) -> i32) -> Struct {
        let mut problem = Struct::zeroed(&format!("flashcore_{operation}_problem_t"));
        assert_eq!(fill(problem.address_mut()), 0, "{}", self.last_error());
        problem
    }

    /// A plan on the CPU, or the status and the words.
    pub(crate) fn create(&self, problem: &Struct) -> Result<Plan, (i32, String)> {
        let mut plan = std::ptr::dangling_mut();
        let cpu = Header::get().constant("DEVICE_CPU");
        // SAFETY: the struct is as large as it says, and the plan can be written.
        match unsafe { (self.plan_create)(problem.address(), cpu, 0, std::ptr::null(), &raw mut plan) } {
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
    /// What the tensors point to can be read and written as they say, or is refused before it is.
    pub(crate) unsafe fn try_run(&self, plan: Plan, tensors: &Tensors) -> Result<(), (i32, String)> {
        let words = tensors.words();
        // SAFETY: as many tensors; the rest is the contract of this function.
        match unsafe { (self.run)(plan, words.as_ptr(), tensors.entries.len() as u64) } {
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

/// A text of the library.
pub(crate) fn text(text: *const c_char) -> String {
    assert!(!text.is_null());
    // SAFETY: not null, and every text of the library ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
