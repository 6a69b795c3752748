//! Signal handler: names the guarded buffer of a fault before the process ends.
//!
//! The handler runs in a thread that was stopped anywhere, inside the allocator perhaps. So it allocates nothing, locks
//! nothing, writes with one system call, and finds the buffer in a table of atomics by the address of the fault.

use std::cell::UnsafeCell;
use std::fmt::Write;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::Label;

/// Buffers that can be watched at once; more are guarded all the same, and their faults have no name.
const PLACES: usize = 1024;
/// Touching an inaccessible page is a segmentation fault on Linux and a bus error on macOS.
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// A mapping in the table. Free when `start` is 0, being filled in when `label` is null.
struct Place {
    start: AtomicUsize,
    end: AtomicUsize,
    label: AtomicPtr<Report>,
}

struct Report {
    payload: Range<usize>,
    label: Label,
}

static TABLE: [Place; PLACES] =
    [const { Place { start: AtomicUsize::new(0), end: AtomicUsize::new(0), label: AtomicPtr::new(ptr::null_mut()) } };
        PLACES];

/// A mapping that is in the table for as long as this lives.
#[derive(Debug)]
pub(super) struct Watched(usize);

impl Watched {
    /// `None` when the table is full.
    pub(super) fn new(mapping: Range<usize>, payload: Range<usize>, label: Label) -> Option<Self> {
        let is_free = |place: &Place| {
            place.start.compare_exchange(0, mapping.start, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let index = TABLE.iter().position(is_free)?;
        TABLE[index].end.store(mapping.end, Ordering::Relaxed);
        let report = Box::into_raw(Box::new(Report { payload, label }));
        TABLE[index].label.store(report, Ordering::Release);
        Some(Self(index))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let place = &TABLE[self.0];
        let report = place.label.swap(ptr::null_mut(), Ordering::AcqRel);
        place.end.store(0, Ordering::Relaxed);
        place.start.store(0, Ordering::Release);
        // SAFETY: it came from `Box::into_raw` in `new`, and the swap gave it to us alone. A handler that holds it runs
        // for a fault in this mapping, whose owner is therefore still borrowed and not being dropped.
        drop(unsafe { Box::from_raw(report) });
    }
}

/// Earlier handlers of the signals. Written once, before the handler that reads it is installed.
struct Previous(UnsafeCell<[MaybeUninit<libc::sigaction>; SIGNALS.len()]>);

// SAFETY: written under `INSTALLED` alone, each element before the handler of its signal exists, and only read after.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new([MaybeUninit::uninit(); SIGNALS.len()]));
static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();

/// Installs the handler, the first time.
pub(super) fn install() -> io::Result<()> {
    INSTALLED.get_or_init(install_for_all).map_err(io::Error::from_raw_os_error)
}

fn install_for_all() -> Result<(), i32> {
    let last_error = || io::Error::last_os_error().raw_os_error().unwrap_or(0);
    for (index, signal) in SIGNALS.into_iter().enumerate() {
        // SAFETY: `sigaction` is plain data, for which zeros are a value: no flags, an empty mask, the default action.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = report_fault as *const () as usize;
        // Threads of Rust have a second stack, for stack overflows.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: nobody else writes here, as `INSTALLED` runs this once, and no handler of ours reads it yet.
        let previous = unsafe { (*PREVIOUS.0.get())[index].as_mut_ptr() };
        // SAFETY: reads the action that is there into memory for it.
        if unsafe { libc::sigaction(signal, ptr::null(), previous) } != 0 {
            return Err(last_error());
        }
        // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what a handler may.
        if unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) } != 0 {
            return Err(last_error());
        }
    }
    Ok(())
}

/// Names the buffer, puts the previous action back, and returns to the access, which then faults for good.
extern "C" fn report_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the system gives a valid `siginfo_t`, and these signals have an address.
    let address = unsafe { (*info).si_addr() } as usize;
    let holds =
        |place: &&Place| (place.start.load(Ordering::Acquire)..place.end.load(Ordering::Relaxed)).contains(&address);
    if let Some(place) = TABLE.iter().find(holds) {
        let report = place.label.load(Ordering::Acquire);
        // SAFETY: null, or a report that lives as long as its mapping, in which an access is going on.
        if let Some(report) = unsafe { report.as_ref() } {
            write_report(report, address);
        }
    }
    if let Some(index) = SIGNALS.iter().position(|&known| known == signal) {
        // SAFETY: filled in before this handler was installed, and not written since.
        let previous = unsafe { (*PREVIOUS.0.get())[index].as_ptr() };
        // SAFETY: puts back what the system itself reported.
        unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
    }
}

fn write_report(report: &Report, address: usize) {
    let Report { payload, label: Label { tensor, case } } = report;
    let mut text = Text { bytes: [0; 1024], length: 0 };
    // A text too long is cut.
    let _ = if address < payload.start {
        write!(text, "\nflashcore: fault {} bytes before the start of {tensor}", payload.start - address)
    } else if address < payload.end {
        write!(text, "\nflashcore: fault at byte {} of {tensor}, which is only to be read", address - payload.start)
    } else {
        write!(text, "\nflashcore: fault {} bytes after the last of {tensor}", address - payload.end + 1)
    };
    let _ = writeln!(text, "\n  {case}");
    // SAFETY: writes initialised bytes of this frame. That it may fail changes nothing.
    unsafe { libc::write(libc::STDERR_FILENO, text.bytes.as_ptr().cast(), text.length) };
}

/// A text in the frame of the handler.
struct Text {
    bytes: [u8; 1024],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let length = text.len().min(self.bytes.len() - self.length);
        self.bytes[self.length..self.length + length].copy_from_slice(&text.as_bytes()[..length]);
        self.length += length;
        Ok(())
    }
}
