//! Every row of the table with every combination of its modifiers, and every choice of registers and constants.
//!
//! The product is complete on purpose: which of the combinations exist is for the verifier to say.

use flashcore_ir::{
    Accumulation, Address, Compare, CopyCache, FenceScope, Fp8, L2Prefetch, LoadCache, Major, MatrixSource, MmaShape,
    Op, Operand, ReduceOp, RegisterChange, RegisterId, Rounding, ShuffleMode, Space, SpecialRegister, StoreCache, Type,
    VoteMode,
};

/// Stands for a register that the kernel will fill in.
const ANY: RegisterId = RegisterId(0);
const AT: Address = Address { base: ANY, offset: -16 };
const COUNTS: [u32; 4] = [1, 2, 3, 4];
const YES_OR_NO: [bool; 2] = [false, true];

/// All combinations, in the order of the table. Their registers are for the caller to fill in. `parameters` are the
/// types of the parameters of the kernel.
pub(crate) fn all(parameters: &[Type]) -> Vec<Op> {
    let mut list = List::default();
    moves(&mut list, parameters);
    arithmetic(&mut list);
    bits(&mut list);
    conversions(&mut list);
    warp(&mut list);
    memory(&mut list);
    copies(&mut list);
    tensor_copies(&mut list);
    tensor(&mut list);
    warpgroups(&mut list);
    barriers(&mut list);
    mbarriers(&mut list);
    clusters(&mut list);
    list.ops
}

#[derive(Default)]
struct List {
    ops: Vec<Op>,
    /// Bit mask of the operands of the current operation that are constants.
    constants: u32,
    /// Number of operands requested so far.
    operands: u32,
}

impl List {
    /// Appends the operation once for each choice of registers and constants.
    fn push(&mut self, make: impl Fn(&mut Self) -> Op) {
        self.constants = 0;
        loop {
            self.operands = 0;
            let op = make(self);
            self.ops.push(op);
            self.constants += 1;
            if self.constants >> self.operands != 0 {
                return;
            }
        }
    }

    fn push_types(&mut self, make: impl Fn(&mut Self, Type) -> Op) {
        for ty in Type::ALL {
            self.push(|list| make(list, ty));
        }
    }

    /// An operand: a register, or this constant.
    fn or(&mut self, constant: u64) -> Operand {
        let is_constant = self.constants >> self.operands & 1 == 1;
        self.operands += 1;
        if is_constant { Operand::Constant(constant) } else { Operand::Register(ANY) }
    }

    /// An operand: a register, or the constant 1.
    fn any(&mut self) -> Operand {
        self.or(1)
    }
}

fn registers(count: u32) -> Vec<RegisterId> {
    vec![ANY; count as usize]
}

fn moves(list: &mut List, parameters: &[Type]) {
    list.push_types(|list, ty| Op::Mov { ty, d: ANY, a: list.any() });
    for to in Type::ALL {
        list.push_types(|list, from| Op::Reinterpret { to, from, d: ANY, a: list.any() });
    }
    for register in SpecialRegister::ALL {
        list.push(|_| Op::Special { register: *register, d: ANY });
    }
    list.push(|_| Op::SharedBase { d: ANY });
    for (parameter, ty) in parameters.iter().enumerate() {
        list.push(|_| Op::LoadParam { ty: *ty, parameter: parameter as u32, d: ANY });
    }
    // The parameter after those of values.
    list.push(|_| Op::TensorMapAddress { parameter: parameters.len() as u32, d: ANY });
    for compare in Compare::ALL {
        list.push_types(|list, ty| {
            let (a, b) = (list.any(), list.any());
            Op::SetPredicate { compare: *compare, ty, d: ANY, a, b }
        });
    }
    list.push_types(|list, ty| Op::Select { ty, d: ANY, a: list.any(), b: list.any(), condition: registers(1) });
}

fn arithmetic(list: &mut List) {
    list.push_types(|list, ty| Op::Add { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Sub { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Mul { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::MulHigh { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::MulWide { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Mad { ty, d: ANY, a: list.any(), b: list.any(), c: list.any() });
    list.push_types(|list, ty| Op::MadWide { ty, d: ANY, a: list.any(), b: list.any(), c: list.any() });
    list.push_types(|list, ty| Op::Fma { ty, d: ANY, a: list.any(), b: list.any(), c: list.any() });
    list.push_types(|list, ty| Op::Div { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Rem { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Min { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Max { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Neg { ty, d: ANY, a: list.any() });
    list.push_types(|list, ty| Op::Abs { ty, d: ANY, a: list.any() });
}

fn bits(list: &mut List) {
    list.push_types(|list, ty| Op::And { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Or { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Xor { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Not { ty, d: ANY, a: list.any() });
    list.push_types(|list, ty| Op::Shl { ty, d: ANY, a: list.any(), b: list.any() });
    list.push_types(|list, ty| Op::Shr { ty, d: ANY, a: list.any(), b: list.any() });
    list.push(|list| Op::Lop3 { table: 0x96, d: ANY, a: list.any(), b: list.any(), c: list.any() });
    list.push(|list| Op::BitFieldExtract { d: ANY, a: list.any(), position: list.any(), length: list.any() });
    list.push(|list| {
        let (a, b) = (list.any(), list.any());
        Op::BitFieldInsert { d: ANY, a, b, position: list.any(), length: list.any() }
    });
    list.push(|list| Op::Permute { d: ANY, a: list.any(), b: list.any(), selector: list.or(0x7654_3210) });
    list.push(|list| Op::PopCount { d: ANY, a: list.any() });
    list.push(|list| Op::LeadingZeros { d: ANY, a: list.any() });
}

fn conversions(list: &mut List) {
    for to in Type::ALL {
        for rounding in Rounding::ALL {
            list.push_types(|list, from| Op::Convert { to, from, rounding: *rounding, d: ANY, a: list.any() });
        }
    }
    list.push_types(|list, to| Op::ConvertPair { to, d: ANY, high: list.any(), low: list.any() });
    for ty in Fp8::ALL {
        list.push(|list| Op::ConvertFp8 { to: *ty, d: ANY, high: list.any(), low: list.any() });
        list.push(|_| Op::WidenFp8 { from: *ty, d: ANY, a: vec![ANY] });
    }
    list.push_types(|_, to| Op::Pack { to, d: ANY, low: registers(1), high: registers(1) });
    list.push_types(|_, from| Op::Unpack { from, low: ANY, high: ANY, a: registers(1) });
    list.push_types(|list, ty| Op::Exp2 { ty, d: ANY, a: list.any() });
    list.push(|list| Op::Log2 { d: ANY, a: list.any() });
    list.push(|list| Op::Reciprocal { d: ANY, a: list.any() });
    list.push(|list| Op::ReciprocalSqrt { d: ANY, a: list.any() });
    list.push(|list| Op::Sqrt { d: ANY, a: list.any() });
    list.push_types(|list, ty| Op::Tanh { ty, d: ANY, a: list.any() });
}

fn warp(list: &mut List) {
    for mode in ShuffleMode::ALL {
        for control in [0, 0x1f, 0x1c1f] {
            list.push_types(|list, ty| {
                let index = list.any();
                Op::Shuffle { mode: *mode, control, ty, d: ANY, index, a: registers(1) }
            });
        }
    }
    for mode in VoteMode::ALL {
        list.push(|_| Op::Vote { mode: *mode, d: ANY, a: registers(1) });
    }
    list.push(|_| Op::Ballot { d: ANY, a: registers(1) });
    for op in ReduceOp::ALL {
        list.push_types(|_, ty| Op::ReduceWarp { op: *op, ty, d: ANY, a: registers(1) });
    }
    list.push(|_| Op::Elect { d: ANY });
    list.push(|_| Op::WarpSync {});
}

fn memory(list: &mut List) {
    for space in Space::ALL {
        for count in COUNTS {
            for cache in LoadCache::ALL {
                for prefetch in L2Prefetch::ALL {
                    list.push_types(|_, ty| Op::Load {
                        space: *space,
                        cache: *cache,
                        prefetch: *prefetch,
                        ty,
                        count,
                        d: registers(count),
                        source: AT,
                    });
                }
            }
            for cache in StoreCache::ALL {
                list.push_types(|_, ty| Op::Store {
                    space: *space,
                    cache: *cache,
                    ty,
                    count,
                    a: registers(count),
                    target: AT,
                });
            }
        }
    }
    list.push(|_| Op::Prefetch { source: AT });
    for space in Space::ALL {
        for op in ReduceOp::ALL {
            list.push_types(|_, ty| Op::Atomic { space: *space, op: *op, ty, d: ANY, a: registers(1), target: AT });
            list.push_types(|_, ty| Op::Reduce { space: *space, op: *op, ty, a: registers(1), target: AT });
        }
        list.push_types(|_, ty| Op::CompareAndSwap {
            space: *space,
            ty,
            d: ANY,
            compare: registers(1),
            value: registers(1),
            target: AT,
        });
    }
}

fn copies(list: &mut List) {
    for bytes in [2, 4, 8, 16, 32] {
        for cache in CopyCache::ALL {
            for prefetch in L2Prefetch::ALL {
                for zero_fill in YES_OR_NO {
                    list.push(|_| Op::CopyAsync {
                        bytes,
                        cache: *cache,
                        prefetch: *prefetch,
                        zero_fill,
                        source_bytes: registers(u32::from(zero_fill)),
                        target: AT,
                        source: AT,
                    });
                }
            }
        }
    }
    list.push(|_| Op::CopyAsyncCommit {});
    list.push(|_| Op::CopyAsyncWait { pending: 0 });
    list.push(|_| Op::CopyAsyncWait { pending: 3 });
    list.push(|_| Op::CopyAsyncWaitAll {});
    list.push(|list| Op::BulkStore { bytes: list.or(128), target: AT, source: AT });
    list.push(|_| Op::BulkCommit {});
    for read in YES_OR_NO {
        list.push(|_| Op::BulkWait { pending: 0, read });
        list.push(|_| Op::BulkWait { pending: 2, read });
    }
    list.push(|_| Op::FenceProxyAsync {});
}

fn tensor_copies(list: &mut List) {
    list.push(|list| Op::BulkLoad { bytes: list.or(128), target: AT, source: AT, barrier: AT });
    for rank in 0..=6 {
        for hinted in YES_OR_NO {
            for multicast in YES_OR_NO {
                list.push(|_| Op::TensorLoad {
                    rank,
                    multicast,
                    hinted,
                    coordinates: registers(rank),
                    mask: registers(multicast.into()),
                    policy: registers(hinted.into()),
                    map: registers(1),
                    target: AT,
                    barrier: AT,
                });
            }
            list.push(|_| Op::TensorStore {
                rank,
                hinted,
                coordinates: registers(rank),
                policy: registers(hinted.into()),
                map: registers(1),
                source: AT,
            });
        }
    }
    list.push(|_| Op::PrefetchTensorMap { map: registers(1) });
}

fn tensor(list: &mut List) {
    for count in COUNTS {
        for transposed in YES_OR_NO {
            list.push_types(|_, ty| Op::LoadMatrix { count, transposed, ty, d: registers(count), source: AT });
            list.push_types(|_, ty| Op::StoreMatrix { count, transposed, ty, a: registers(count), target: AT });
        }
    }
    for shape in MmaShape::ALL {
        for accumulate in Type::ALL {
            list.push_types(|_, operand| {
                let pairs = matches!(operand, Type::F16x2 | Type::Bf16x2);
                let words = shape.depth() / if pairs { 2 } else { 1 };
                let accumulator = registers(if accumulate == Type::F16x2 { 2 } else { 4 });
                Op::Mma {
                    shape: *shape,
                    operand,
                    accumulate,
                    d: accumulator.clone(),
                    a: registers(16 * words / 32),
                    b: registers(8 * words / 32),
                    c: accumulator,
                }
            });
        }
    }
    for left in Fp8::ALL {
        for right in Fp8::ALL {
            list.push(|_| Op::MmaFp8 {
                left: *left,
                right: *right,
                d: registers(4),
                a: registers(4),
                b: registers(2),
                c: registers(4),
            });
        }
    }
}

fn warpgroups(list: &mut List) {
    // The widest in one form alone: ptxas takes its time over so many registers.
    for columns in [0, 8, 12, 256, 264] {
        for accumulate in Type::ALL.into_iter().filter(|ty| columns != 256 || *ty == Type::F16x2) {
            for accumulation in Accumulation::ALL {
                if columns == 256 && *accumulation != Accumulation::Replace {
                    continue;
                }
                for source in MatrixSource::ALL {
                    for (a_major, b_major) in Major::ALL.iter().flat_map(|a| Major::ALL.iter().map(move |b| (*a, *b))) {
                        list.push_types(|_, operand| {
                            let count = columns / if accumulate == Type::F16x2 { 4 } else { 2 };
                            // Written and read: two accumulators are not one, which the verifier refuses.
                            let read = if *accumulation == Accumulation::Replace { 0 } else { count };
                            Op::Wgmma {
                                columns,
                                operand,
                                accumulate,
                                accumulation: *accumulation,
                                source: *source,
                                a_major,
                                b_major,
                                d: registers(count),
                                c: registers(read),
                                scale: registers((*accumulation == Accumulation::AddWhere).into()),
                                a: registers(if *source == MatrixSource::Shared { 1 } else { 4 }),
                                b: registers(1),
                            }
                        });
                    }
                }
            }
        }
    }
    warpgroups_fp8(list);
    list.push(|_| Op::WgmmaFence {});
    list.push(|_| Op::WgmmaCommit {});
    list.push(|_| Op::WgmmaWait { pending: 0 });
    list.push(|_| Op::WgmmaWait { pending: 3 });
}

fn warpgroups_fp8(list: &mut List) {
    for columns in [0, 8, 12, 96, 264] {
        for (left, right) in Fp8::ALL.iter().flat_map(|left| Fp8::ALL.iter().map(move |right| (*left, *right))) {
            for (accumulation, source) in
                Accumulation::ALL.iter().flat_map(|how| MatrixSource::ALL.iter().map(move |source| (*how, *source)))
            {
                for (a_major, b_major) in Major::ALL.iter().flat_map(|a| Major::ALL.iter().map(move |b| (*a, *b))) {
                    list.push(|_| Op::WgmmaFp8 {
                        columns,
                        left,
                        right,
                        accumulation,
                        source,
                        a_major,
                        b_major,
                        d: registers(columns / 2),
                        c: registers(if accumulation == Accumulation::Replace { 0 } else { columns / 2 }),
                        scale: registers((accumulation == Accumulation::AddWhere).into()),
                        a: registers(if source == MatrixSource::Shared { 1 } else { 4 }),
                        b: registers(1),
                    });
                }
            }
        }
    }
}

fn barriers(list: &mut List) {
    list.push(|list| Op::BarrierSync { barrier: list.or(15), threads: list.or(32) });
    list.push(|list| Op::BarrierArrive { barrier: list.or(15), threads: list.or(32) });
    for scope in FenceScope::ALL {
        list.push(|_| Op::Fence { scope: *scope });
    }
    for change in RegisterChange::ALL {
        list.push(|_| Op::SetRegisterCount { change: *change, count: 40 });
        list.push(|_| Op::SetRegisterCount { change: *change, count: 41 });
    }
    list.push(|_| Op::GridDependencyWait {});
    list.push(|_| Op::LaunchDependents {});
    list.push(|_| Op::Exit {});
}

fn mbarriers(list: &mut List) {
    list.push(|list| Op::MbarrierInit { count: list.or(128), target: AT });
    list.push(|_| Op::MbarrierInvalidate { target: AT });
    for space in Space::ALL {
        list.push(|list| Op::MbarrierArrive { space: *space, count: list.or(2), target: AT });
        list.push(|list| Op::MbarrierArriveExpect { space: *space, bytes: list.or(1024), target: AT });
        list.push(|list| Op::MbarrierExpect { space: *space, bytes: list.or(1024), target: AT });
    }
    for scope in FenceScope::ALL {
        list.push(|list| Op::MbarrierWait { scope: *scope, parity: list.or(1), source: AT });
        for suspends in YES_OR_NO {
            let scope = *scope;
            list.push(|list| Op::MbarrierTest { suspends, scope, d: ANY, parity: list.or(0), source: AT });
        }
    }
    list.push(|_| Op::FenceMbarrierInit {});
}

fn clusters(list: &mut List) {
    list.push(|list| Op::MapShared { d: ANY, a: list.any(), rank: list.or(1) });
    list.push(|_| Op::ClusterArrive {});
    list.push(|_| Op::ClusterWait {});
}
