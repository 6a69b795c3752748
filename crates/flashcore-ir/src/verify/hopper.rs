//! The rules of operations that came with Hopper: `mbarrier`s, clusters and `wgmma`.

use super::Rule;
use crate::operand::{FenceScope, Operand, RegisterId};
use crate::target::Arch;
use crate::types::Type;

/// The most arrivals, and the most bytes in flight, that an `mbarrier` counts.
pub(super) const MOST_ARRIVALS: u64 = (1 << 20) - 1;
/// The most CTAs of a cluster that every GPU with clusters can run.
const MOST_CTAS: u32 = 8;

pub(super) fn arrivals(count: Operand, broken: &mut Vec<Rule>) {
    if let Operand::Constant(count) = count
        && !(1..=MOST_ARRIVALS).contains(&count)
    {
        broken.push(Rule::MbarrierCount { count });
    }
}

pub(super) fn expected_bytes(bytes: Operand, broken: &mut Vec<Rule>) {
    if let Operand::Constant(bytes) = bytes
        && bytes > MOST_ARRIVALS
    {
        broken.push(Rule::MbarrierBytes { bytes });
    }
}

pub(super) fn phase(scope: FenceScope, parity: Operand, broken: &mut Vec<Rule>) {
    if !matches!(scope, FenceScope::Cta | FenceScope::Cluster) {
        broken.push(Rule::MbarrierScope { scope });
    }
    if let Operand::Constant(parity @ 2..) = parity {
        broken.push(Rule::Parity { parity });
    }
}

pub(super) fn cluster(cluster: [u32; 3], arch: Arch) -> Option<Rule> {
    let ctas = cluster.iter().try_fold(1u32, |product, &size| product.checked_mul(size));
    match ctas {
        Some(1) => None,
        Some(2..=MOST_CTAS) if arch.has_clusters() => None,
        Some(2..=MOST_CTAS) => Some(Rule::NoClusters { arch, cluster }),
        Some(_) | None => Some(Rule::ClusterSize { cluster }),
    }
}

pub(super) fn columns(columns: u32, broken: &mut Vec<Rule>) {
    if !(8..=256).contains(&columns) || !columns.is_multiple_of(8) {
        broken.push(Rule::ProductColumns { columns });
    }
}

pub(super) fn in_place(d: &[RegisterId], c: &[RegisterId], broken: &mut Vec<Rule>) {
    if !c.is_empty() && c != d {
        broken.push(Rule::AccumulatorMoved);
    }
}

pub(super) fn product(columns: u32, operand: Type, accumulate: Type, broken: &mut Vec<Rule>) {
    self::columns(columns, broken);
    match (operand, accumulate) {
        (Type::F16x2, Type::F32 | Type::F16x2) | (Type::Bf16x2, Type::F32) => {}
        _ => broken.push(Rule::NoWarpgroupProduct { operand, accumulate }),
    }
}
