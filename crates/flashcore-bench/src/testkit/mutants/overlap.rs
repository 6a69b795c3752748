//! Bugs of launches that overlap (PDL): waits that are missing or come too late, and triggers that come too early.
//!
//! The simulator runs launches one after the other, so that none of these changes a result; each is a race between launches.

use flashcore_ir::{Block, Instruction, Kernel, Op, Space, Statement};

use super::Group;
use super::catalogue::{Mutation, mutations};
use super::edit::rewrite_if;

/// Memory touched before the launches before have ended; launches let go that must not begin yet.
pub const OVERLAP: &[Mutation] = mutations! { Group::Overlap;
    "hopper": "attention-does-not-wait", "no thread waits for the launch before" => |kernel| drop_waits(kernel, |_| true);
    "hopper": "producer-does-not-wait", "the producer loads what the launch before may still write" =>
        |kernel| drop_waits(kernel, |path| is_in(path, "producer") && !is_in(path, "transposer"));
    "hopper": "transposer-does-not-wait", "the transposer reads lengths that the launch before may still write" =>
        |kernel| drop_waits(kernel, |path| is_in(path, "transposer"));
    "hopper": "consumers-do-not-wait", "consumers read lengths that the launch before may still write" =>
        |kernel| drop_waits(kernel, |path| !is_in(path, "producer"));
    "hopper": "sorter-does-not-wait", "tiles are sorted by a block mask that the launch before may still write" => drop_outer_wait;
    "hopper": "attention-waits-after-the-first-read", "every thread reads something before it waits" =>
        |kernel| wait_after(kernel, is_read);
    "hopper": "attention-waits-after-the-first-load", "the producer loads a tile before it waits" =>
        |kernel| wait_after(kernel, |op| matches!(op, Op::TensorLoad { .. }));
    "hopper": "attention-waits-last", "nothing is waited for until the output is stored" => wait_last;
    "hopper": "attention-triggers-first", "the next launch may begin before this one has waited" => trigger_first;
    "hopper": "attention-triggers-before-each-wait", "each thread triggers and then waits" => |kernel| swap_triggers(kernel, |_| true);
    "hopper": "producer-triggers-before-it-waits", "the producer triggers and then waits" =>
        |kernel| swap_triggers(kernel, |path| is_in(path, "producer"));
    "hopper": "consumers-trigger-before-they-wait", "consumers trigger and then wait" =>
        |kernel| swap_triggers(kernel, |path| !is_in(path, "producer"));
    "combine": "combine-does-not-wait", "partials are read that may not have been written yet" => |kernel| drop_waits(kernel, |_| true);
    "combine": "combine-waits-last", "nothing is waited for until the rows are stored" => wait_last;
    "combine": "combine-waits-where-it-has-rows", "CTAs without rows to combine end before the launch before has" => wait_in_branch;
    "combine": "combine-triggers-first", "the next launch may begin before this one has waited" => trigger_first;
    "reset": "reset-does-not-wait", "the counter is set while the launch before may still take tiles" =>
        |kernel| drop_waits(kernel, |_| true);
    "reset": "reset-waits-last", "the counter is set before the wait" => wait_last;
};

const fn is_wait(op: &Op) -> bool {
    matches!(op, Op::GridDependencyWait {})
}

const fn is_trigger(op: &Op) -> bool {
    matches!(op, Op::LaunchDependents {})
}

const fn is_read(op: &Op) -> bool {
    matches!(op, Op::Load { space: Space::Global, .. } | Op::CopyAsync { .. })
}

fn is_in(path: &[String], name: &str) -> bool {
    path.iter().any(|section| section == name)
}

/// Drops the waits of the sections whose paths are as wanted.
fn drop_waits(kernel: &mut Kernel, wanted: fn(&[String]) -> bool) -> usize {
    change(kernel, is_wait, wanted, |_| Vec::new())
}

/// Drops the wait of all threads, outside of every role.
fn drop_outer_wait(kernel: &mut Kernel) -> usize {
    let statements = &mut kernel.body.statements;
    let count = statements.len();
    statements.retain(|statement| !matches!(statement, Statement::Instruction(Instruction { op, .. }) if is_wait(op)));
    count - statements.len()
}

/// Puts others in the place of instructions in sections whose paths are as wanted; returns how many there were.
fn change(
    kernel: &mut Kernel,
    matches: fn(&Op) -> bool,
    wanted: fn(&[String]) -> bool,
    mut replace: impl FnMut(Instruction) -> Vec<Instruction>,
) -> usize {
    let mut count = 0;
    rewrite_if(kernel, matches, |kernel, instruction| {
        if !wanted(&kernel.section(instruction.origin.section).path) {
            return vec![instruction];
        }
        count += 1;
        replace(instruction)
    });
    count
}

/// The same instruction with another operation, without a guard.
fn with(instruction: &Instruction, op: Op) -> Instruction {
    Instruction { op, guard: None, ..instruction.clone() }
}

/// Each wait comes after the first access of a kind that follows it, or never where none does.
fn wait_after(kernel: &mut Kernel, access: fn(&Op) -> bool) -> usize {
    let mut owed = 0;
    let mut count = 0;
    rewrite_if(
        kernel,
        |_| true,
        |_, instruction| {
            if is_wait(&instruction.op) {
                owed += 1;
                return Vec::new();
            }
            if owed > 0 && access(&instruction.op) {
                (owed, count) = (0, count + 1);
                let wait = with(&instruction, Op::GridDependencyWait {});
                return vec![instruction, wait];
            }
            vec![instruction]
        },
    );
    count
}

/// The only wait is the last instruction.
fn wait_last(kernel: &mut Kernel) -> usize {
    let mut wait = None;
    let count = change(
        kernel,
        is_wait,
        |_| true,
        |instruction| {
            wait = Some(instruction);
            Vec::new()
        },
    );
    kernel.body.statements.extend(wait.map(Statement::Instruction));
    count
}

/// The only wait is in the first branch that follows it.
fn wait_in_branch(kernel: &mut Kernel) -> usize {
    fn first_branch(block: &mut Block) -> Option<&mut Block> {
        block.statements.iter_mut().rev().find_map(|statement| match statement {
            Statement::If(choice) => Some(&mut choice.then),
            Statement::Instruction(_) | Statement::Loop(_) => None,
        })
    }
    let mut wait = None;
    let count = change(
        kernel,
        is_wait,
        |_| true,
        |instruction| {
            wait = Some(instruction);
            Vec::new()
        },
    );
    let (Some(wait), Some(branch)) = (wait, first_branch(&mut kernel.body)) else { return 0 };
    branch.statements.insert(0, Statement::Instruction(wait));
    count
}

/// The kernel begins with a trigger.
fn trigger_first(kernel: &mut Kernel) -> usize {
    let Some(origin) = kernel.body.statements.first().map(Statement::origin) else { return 0 };
    let trigger = Instruction { op: Op::LaunchDependents {}, guard: None, origin };
    kernel.body.statements.insert(0, Statement::Instruction(trigger));
    1
}

/// Each wait comes after a trigger.
fn swap_triggers(kernel: &mut Kernel, wanted: fn(&[String]) -> bool) -> usize {
    let triggers = change(kernel, is_trigger, wanted, |_| Vec::new());
    change(kernel, is_wait, wanted, |wait| vec![with(&wait, Op::LaunchDependents {}), wait]).min(triggers)
}
