//! Names of registers and labels: readable, and stable under edits.
//!
//! A register is called `%softmax_f3`: the section that made it, a letter for its type, and its number among the
//! registers of that section and type. Labels are `$softmax_loop_0`, numbered within their section as well. So an
//! edit to one section leaves the text of the others as it was, and a diff of two prints shows the edit alone.

use std::collections::{BTreeMap, BTreeSet};

use flashcore_ir::{Kernel, RegisterId, SectionId, Statement, Type};

/// The names of one kernel.
pub(crate) struct Names {
    /// By register; registers that nothing mentions have a name too.
    registers: Vec<String>,
    /// By section.
    slugs: Vec<String>,
    /// Number of labels of each kind in each section.
    labels: BTreeMap<(SectionId, &'static str), u32>,
}

impl Names {
    pub(crate) fn new(kernel: &Kernel) -> Self {
        let slugs = slugs(kernel);
        let registers = kernel
            .registers
            .iter()
            .map(|register| {
                let slug = &slugs[register.section.0 as usize];
                format!("%{slug}_{}{}", letter(register.ty), register.number)
            })
            .collect();
        Self { registers, slugs, labels: BTreeMap::new() }
    }

    pub(crate) fn register(&self, register: RegisterId) -> &str {
        &self.registers[register.0 as usize]
    }

    /// A new label of the section.
    pub(crate) fn label(&mut self, section: SectionId, kind: &'static str) -> String {
        let count = self.labels.entry((section, kind)).or_default();
        let label = format!("${}_{kind}_{count}", self.slugs[section.0 as usize]);
        *count += 1;
        label
    }

    /// The `.reg` declarations of what the kernel mentions, a line per section and type.
    pub(crate) fn declarations(&self, kernel: &Kernel) -> Vec<String> {
        let mut counts = BTreeMap::<(SectionId, Type), u32>::new();
        mentioned(kernel, &mut |id| {
            let register = kernel.registers[id.0 as usize];
            let count = counts.entry((register.section, register.ty)).or_default();
            *count = (*count).max(register.number + 1);
        });
        counts
            .into_iter()
            .map(|((section, ty), count)| {
                let slug = &self.slugs[section.0 as usize];
                format!(".reg .{} %{slug}_{}<{count}>;", storage(ty), letter(ty))
            })
            .collect()
    }
}

/// The kind of register that holds the type: sizes without a kind of number, because PTX lets every instruction use
/// those, where it would refuse an `.f32` register as an operand of `mma` or `ldmatrix`.
pub(crate) const fn storage(ty: Type) -> &'static str {
    match ty {
        Type::Pred => "pred",
        Type::U16 | Type::F16 | Type::Bf16 => "b16",
        Type::U32 | Type::S32 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => "b32",
        Type::U64 | Type::S64 => "b64",
    }
}

const fn letter(ty: Type) -> &'static str {
    match ty {
        Type::Pred => "p",
        Type::U16 => "w",
        Type::F16 => "h",
        Type::Bf16 => "b",
        Type::U32 => "r",
        Type::S32 => "i",
        Type::F32 => "f",
        Type::Tf32 => "t",
        Type::F16x2 => "hh",
        Type::Bf16x2 => "bb",
        Type::U64 => "rd",
        Type::S64 => "id",
    }
}

/// A unique word for each section: its own name, and as many of its parents' as it takes.
fn slugs(kernel: &Kernel) -> Vec<String> {
    let paths: Vec<Vec<String>> =
        kernel.sections.iter().map(|section| section.path.iter().map(|name| word(name)).collect()).collect();
    let mut depths = vec![1; paths.len()];
    loop {
        let slugs: Vec<String> = paths
            .iter()
            .zip(&depths)
            .map(|(path, depth)| path[path.len().saturating_sub(*depth)..].join("_"))
            .collect();
        let mut deepened = false;
        for (index, depth) in depths.iter_mut().enumerate() {
            let shared = slugs.iter().enumerate().any(|(other, slug)| other != index && *slug == slugs[index]);
            if shared && *depth < paths[index].len() {
                *depth += 1;
                deepened = true;
            }
        }
        if !deepened {
            return distinct(slugs);
        }
    }
}

/// Sections whose whole paths read the same as words (`a b` and `a_b`) are told apart by underscores.
fn distinct(slugs: Vec<String>) -> Vec<String> {
    let mut taken = BTreeSet::new();
    slugs
        .into_iter()
        .map(|mut slug| {
            while !taken.insert(slug.clone()) {
                slug.push('_');
            }
            slug
        })
        .collect()
}

/// The name with everything that PTX does not allow in an identifier replaced.
fn word(name: &str) -> String {
    name.chars()
        .map(|character| if character.is_ascii_alphanumeric() { character.to_ascii_lowercase() } else { '_' })
        .collect()
}

/// Visits every mention of a register.
fn mentioned(kernel: &Kernel, visit: &mut impl FnMut(RegisterId)) {
    fn walk(statements: &[Statement], visit: &mut impl FnMut(RegisterId)) {
        for statement in statements {
            match statement {
                Statement::Instruction(instruction) => {
                    instruction.op.slots(&mut |slot| {
                        if let flashcore_ir::Operand::Register(register) = slot.operand {
                            visit(register);
                        }
                    });
                    if let Some(guard) = instruction.guard {
                        visit(guard.predicate);
                    }
                }
                Statement::If(choice) => {
                    visit(choice.condition);
                    walk(&choice.then.statements, visit);
                    walk(&choice.otherwise.statements, visit);
                }
                Statement::Loop(repetition) => {
                    walk(&repetition.header.statements, visit);
                    visit(repetition.condition);
                    walk(&repetition.body.statements, visit);
                }
            }
        }
    }
    walk(&kernel.body.statements, visit);
}

#[cfg(test)]
mod tests {
    use flashcore_ir::{Builder, Section};

    use super::*;

    fn check(paths: &[&str], expected: &[&str]) {
        let mut kernel = Builder::new("k", 32).finish();
        kernel.sections =
            paths.iter().map(|path| Section { path: path.split('/').map(ToOwned::to_owned).collect() }).collect();
        assert_eq!(slugs(&kernel), expected);
    }

    #[test]
    fn a_section_is_called_by_its_own_name() {
        check(&["prologue", "loop/softmax", "loop/Row maximum"], &["prologue", "softmax", "row_maximum"]);
    }

    #[test]
    fn parents_tell_sections_of_one_name_apart() {
        check(&["load", "keys/load", "values/load", "keys"], &["load", "keys_load", "values_load", "keys"]);
        check(&["a/b/c", "d/b/c", "b_c"], &["a_b_c", "d_b_c", "b_c"]);
    }

    #[test]
    fn sections_that_read_the_same_stay_apart() {
        check(&["a b", "a_b", "a-b", "a/b"], &["a_b", "a_b_", "a_b__", "b"]);
    }
}
