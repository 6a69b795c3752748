//! A kernel as a PTX module: the frame around the instructions, control flow as labels, and comments that lead back
//! to the Rust source.

use std::fmt::{Display, Write};

use flashcore_ir::{If, Instruction, Kernel, Loop, Op, Origin, ParameterType, SectionId, Statement, VerifiedKernel};

use crate::instruction;
use crate::names::Names;

/// Options of a print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrintOptions {
    /// The Rust file and line beside each instruction. Off by default: they change with every edit above them.
    pub source_lines: bool,
}

/// The kernel as a PTX module with one entry point, in the lowest PTX version that has its instructions.
pub fn print(kernel: &VerifiedKernel) -> String {
    print_with(kernel, PrintOptions::default())
}

/// [`print()`] with options.
pub fn print_with(kernel: &VerifiedKernel, options: PrintOptions) -> String {
    let mut printer =
        Printer { kernel, options, names: Names::new(kernel), text: String::new(), depth: 0, place: None };
    printer.module(kernel);
    printer.text
}

struct Printer<'kernel> {
    kernel: &'kernel Kernel,
    options: PrintOptions,
    names: Names,
    text: String,
    depth: usize,
    /// The section and file of the last comment.
    place: Option<(SectionId, &'static str)>,
}

impl Printer<'_> {
    fn module(&mut self, verified: &VerifiedKernel) {
        let kernel = self.kernel;
        let arch = verified.arch();
        let (major, minor) = verified.ptx();
        self.line(format_args!(".version {major}.{minor}"));
        self.line(format_args!(".target {arch}"));
        self.line(".address_size 64");
        if uses_shared_memory(kernel) {
            // Sized by the launch.
            let (alignment, name) = (shared_alignment(kernel), instruction::SHARED_MEMORY);
            self.line(format_args!(".extern .shared .align {alignment} .b8 {name}[];"));
        }
        self.line("");
        let parameters: Vec<String> = kernel
            .parameters
            .iter()
            .map(|parameter| match parameter.ty {
                ParameterType::Value(ty) => format!("    .param .{ty} {}", parameter.name),
                ParameterType::TensorMap => format!("    .param .align 64 .b8 {}[128]", parameter.name),
            })
            .collect();
        self.line(format_args!(".visible .entry {}(", kernel.name));
        if !parameters.is_empty() {
            self.line(parameters.join(",\n"));
        }
        self.line(")");
        self.line(format_args!(".maxntid {}, 1, 1", kernel.threads));
        if kernel.cluster != [1; 3] {
            let [x, y, z] = kernel.cluster;
            self.line(format_args!(".reqnctapercluster {x}, {y}, {z}"));
        }
        // Always: without it ptxas may prefer spills to fewer CTAs on an SM.
        self.line(format_args!(".maxnreg {}", register_limit(kernel)));
        self.line("{");
        self.depth = 1;
        for declaration in self.names.declarations(kernel) {
            self.line(declaration);
        }
        self.block(&kernel.body.statements);
        self.line("ret;");
        self.depth = 0;
        self.line("}");
    }

    fn block(&mut self, statements: &[Statement]) {
        for statement in statements {
            self.comment(statement.origin());
            match statement {
                Statement::Instruction(instruction) => self.instruction(instruction),
                Statement::If(choice) => self.choice(choice),
                Statement::Loop(repetition) => self.repetition(repetition),
            }
        }
    }

    fn nested(&mut self, statements: &[Statement]) {
        self.depth += 1;
        self.block(statements);
        self.depth -= 1;
    }

    fn instruction(&mut self, instruction: &Instruction) {
        let guard = instruction.guard.map_or_else(String::new, |guard| {
            format!("@{}{} ", if guard.negated { "!" } else { "" }, self.names.register(guard.predicate))
        });
        for text in instruction::lines(&instruction.op, &guard, self.kernel, &self.names) {
            if self.options.source_lines {
                let Origin { file, line, .. } = instruction.origin;
                self.line(format_args!("{text}  // {}:{line}", file_name(file)));
            } else {
                self.line(text);
            }
        }
    }

    fn choice(&mut self, choice: &If) {
        let label = self.names.label(choice.origin.section, "if");
        let end = format!("{label}_end");
        let otherwise = format!("{label}_else");
        let has_otherwise = !choice.otherwise.statements.is_empty();
        let skip = if has_otherwise { &otherwise } else { &end };
        let condition = self.names.register(choice.condition);
        self.line(format!("@!{condition} {} {skip};", branch(choice.uniform)));
        self.nested(&choice.then.statements);
        if has_otherwise {
            // Every lane here has executed `then`, so all of them leave.
            self.nested_line(format_args!("{} {end};", branch(true)));
            self.line(format_args!("{otherwise}:"));
            self.nested(&choice.otherwise.statements);
        }
        self.line(format_args!("{end}:"));
    }

    fn repetition(&mut self, repetition: &Loop) {
        let label = self.names.label(repetition.origin.section, "loop");
        self.line(format_args!("{label}:"));
        self.nested(&repetition.header.statements);
        let condition = self.names.register(repetition.condition);
        let leave = format!("@!{condition} {} {label}_end;", branch(repetition.uniform));
        self.nested_line(leave);
        self.nested(&repetition.body.statements);
        // Every lane here has executed the body, so all of them go back.
        self.nested_line(format_args!("{} {label};", branch(true)));
        self.line(format_args!("{label}_end:"));
    }

    /// Writes a comment with the origin of the following lines, if it is not that of the lines before.
    fn comment(&mut self, origin: Origin) {
        let place = (origin.section, origin.file);
        if self.place != Some(place) {
            self.place = Some(place);
            let section = self.kernel.section(origin.section);
            self.line(format_args!("// {section}  ({})", file_name(origin.file)));
        }
    }

    fn nested_line(&mut self, text: impl Display) {
        self.depth += 1;
        self.line(text);
        self.depth -= 1;
    }

    fn line(&mut self, text: impl Display) {
        let indent = 4 * self.depth;
        writeln!(self.text, "{:indent$}{text}", "").expect("a string takes all that is written to it");
    }
}

/// `.uni` tells the compiler that the lanes do not diverge.
const fn branch(uniform: bool) -> &'static str {
    if uniform { "bra.uni" } else { "bra" }
}

/// The name without its folders, which depend on where a crate is built.
fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// The registers per thread that the kernel may use, and with which its CTA can still be launched: ptxas takes
/// `.maxnreg` literally, and 254 registers for each of 512 threads are more than an SM has.
fn register_limit(kernel: &Kernel) -> u32 {
    /// An SM has four partitions; warps go to them in turn, and to each thread registers by eights.
    const PARTITIONS: u32 = 4;
    const PARTITION_REGISTERS: u32 = 16_384;
    const WARP: u32 = 32;
    const GRANULE: u32 = 8;
    let threads_per_partition = kernel.threads.div_ceil(PARTITIONS * WARP) * WARP;
    let share = PARTITION_REGISTERS / threads_per_partition / GRANULE * GRANULE;
    kernel.register_budget.min(share)
}

/// Alignment of shared memory: 1024 bytes where hardware swizzles by address, the period of the widest pattern; else
/// 128, which suits bulk copies.
fn shared_alignment(kernel: &Kernel) -> u32 {
    let mut swizzles = false;
    kernel.instructions(&mut |instruction| {
        swizzles |= matches!(
            instruction.op,
            Op::TensorLoad { .. } | Op::TensorStore { .. } | Op::Wgmma { .. } | Op::WgmmaFp8 { .. }
        );
    });
    if swizzles { 1024 } else { 128 }
}

fn uses_shared_memory(kernel: &Kernel) -> bool {
    let mut uses = kernel.shared_bytes > 0;
    kernel.instructions(&mut |instruction| uses |= matches!(instruction.op, Op::SharedBase { .. }));
    uses
}
