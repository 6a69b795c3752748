//! What a launch did, in numbers: the gates that a profiler gives on a GPU.

use core::ops::AddAssign;

use flashcore_ir::Class;

use crate::registers::{LANES, lanes};

/// What a launch did. All numbers are sums over the warps of all CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Instructions executed by warps, by [`Class`]; see [`Counters::instructions_of`].
    pub instructions: [u64; Class::ALL.len()],
    /// Lanes that executed an instruction.
    pub lane_operations: u64,
    /// `mma` instructions.
    pub mma: u64,
    /// `wgmma` instructions executed by warps, each for a quarter of the product.
    pub wgmma: u64,
    /// Multiplications and additions of the tensor cores.
    pub tensor_flops: u64,
    /// Exponentials computed by lanes; one of a pair counts two.
    pub exponentials: u64,
    /// Loads from shared memory, without `ldmatrix`.
    pub shared_loads: SharedTraffic,
    /// Stores to shared memory.
    pub shared_stores: SharedTraffic,
    /// `ldmatrix`.
    pub load_matrix: SharedTraffic,
    /// `stmatrix`.
    pub store_matrix: SharedTraffic,
    /// What `cp.async` writes to shared memory.
    pub copy_async_writes: SharedTraffic,
    /// Loads from global memory, by instructions, by `cp.async` and by bulk loads.
    pub global_loads: GlobalTraffic,
    /// Stores to global memory, by instructions and by bulk copies.
    pub global_stores: GlobalTraffic,
    /// Bytes that `cp.async` read from global memory, which [`Counters::global_loads`] includes.
    pub copy_async_bytes: u64,
    /// Bytes that were loaded from and stored to the shared memory of CTAs of the cluster, which do not pass the banks of
    /// the SM that executes it.
    pub cluster_bytes: u64,
    /// Atomics and reductions to memory, executed by lanes.
    pub atomics: u64,
    /// Barrier operations executed by warps, waiting or only arriving.
    pub barriers: u64,
    /// Bytes that bulk loads and loads of boxes write to shared memory, of all CTAs that receive them.
    pub bulk_load_bytes: u64,
    /// Waits for phases of `mbarrier`s, executed by warps.
    pub mbarrier_waits: u64,
}

/// Traffic between registers and shared memory.
///
/// A request is what the banks can serve at once if no two lanes conflict: 32 lanes of at most 4 bytes, 16 of 8, 8 of
/// 16, or the 8 rows of a matrix. It takes as many transactions as the busiest of the 32 banks has different words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SharedTraffic {
    /// Requests with an active lane.
    pub requests: u64,
    /// Transactions they took.
    pub transactions: u64,
    /// Bytes of the active lanes.
    pub bytes: u64,
}

impl SharedTraffic {
    /// Transactions per request: 1.0 without bank conflicts, and without requests.
    pub fn transactions_per_request(&self) -> f64 {
        if self.requests == 0 { 1.0 } else { self.transactions as f64 / self.requests as f64 }
    }
}

/// Traffic between a SM and global memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GlobalTraffic {
    /// Instructions of warps.
    pub requests: u64,
    /// Different sectors of 32 bytes that they touched.
    pub sectors: u64,
    /// Bytes of the active lanes.
    pub bytes: u64,
}

impl GlobalTraffic {
    /// Of the bytes that the sectors moved, the part that was asked for. More than 1 where lanes share bytes.
    pub fn sector_use(&self) -> f64 {
        if self.sectors == 0 { 1.0 } else { self.bytes as f64 / (self.sectors * SECTOR_BYTES) as f64 }
    }
}

const BANKS: usize = 32;
const SECTOR_BYTES: u64 = 32;
/// Bytes that the banks serve at once.
const REQUEST_BYTES: u32 = 128;

impl Counters {
    /// Instructions of a class executed by warps.
    pub fn instructions_of(&self, class: Class) -> u64 {
        self.instructions[class as usize]
    }

    /// Instructions of all classes executed by warps.
    pub fn instructions_in_all(&self) -> u64 {
        self.instructions.iter().sum()
    }

    /// All requests to shared memory and their transactions together.
    pub fn shared(&self) -> SharedTraffic {
        let mut sum = self.shared_loads;
        sum += self.shared_stores;
        sum += self.load_matrix;
        sum += self.store_matrix;
        sum += self.copy_async_writes;
        sum
    }

    /// Transactions per request of all shared-memory traffic.
    pub fn transactions_per_request(&self) -> f64 {
        self.shared().transactions_per_request()
    }
}

impl SharedTraffic {
    /// Adds an access of `bytes` by each lane of `mask`.
    pub(crate) fn count(&mut self, addresses: &[u64; LANES], mask: u32, bytes: u32) {
        let group = (REQUEST_BYTES / bytes.max(4)) as usize;
        for first in (0..LANES).step_by(group) {
            let group_mask = if group == LANES { mask } else { mask >> first & ((1 << group) - 1) };
            if group_mask != 0 {
                self.count_request(lanes(group_mask).map(|lane| addresses[first + lane]), bytes);
            }
        }
    }

    /// Adds a request of `bytes` at each address.
    pub(crate) fn count_request(&mut self, addresses: impl Iterator<Item = u64>, bytes: u32) {
        let mut words = [0u64; BANKS];
        let mut known = 0;
        let mut busy = [0u8; BANKS];
        for address in addresses {
            for word in address / 4..(address + u64::from(bytes)).div_ceil(4) {
                let bank = (word % BANKS as u64) as usize;
                if busy[bank] == 0 || !words[..known].contains(&word) {
                    busy[bank] += 1;
                    words[known] = word;
                    known += 1;
                }
            }
            self.bytes += u64::from(bytes);
        }
        self.requests += 1;
        self.transactions += u64::from(busy.into_iter().max().unwrap_or(0));
    }
}

impl GlobalTraffic {
    /// Adds an access of some bytes by each lane: pairs of address and bytes.
    pub(crate) fn count(&mut self, accesses: impl Iterator<Item = (u64, u32)>) {
        let mut sectors = [0; LANES];
        let mut known = 0;
        for (address, bytes) in accesses.filter(|&(_, bytes)| bytes > 0) {
            // An access is aligned to its size of at most 16 bytes, so it lies in one sector.
            sectors[known] = address / SECTOR_BYTES;
            known += 1;
            self.bytes += u64::from(bytes);
        }
        let sectors = &mut sectors[..known];
        if sectors.is_empty() {
            return;
        }
        sectors.sort_unstable();
        self.requests += 1;
        self.sectors += 1 + sectors.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64;
    }

    /// Adds a bulk copy.
    pub(crate) fn count_bulk(&mut self, address: u64, bytes: u32) {
        self.requests += 1;
        self.count_part(address, bytes);
    }

    /// Adds adjacent bytes of a request.
    pub(crate) fn count_part(&mut self, address: u64, bytes: u32) {
        let end = address + u64::from(bytes);
        self.sectors += end.div_ceil(SECTOR_BYTES) - address / SECTOR_BYTES;
        self.bytes += u64::from(bytes);
    }
}

impl AddAssign for SharedTraffic {
    fn add_assign(&mut self, other: Self) {
        let Self { requests, transactions, bytes } = other;
        self.requests += requests;
        self.transactions += transactions;
        self.bytes += bytes;
    }
}

impl AddAssign for GlobalTraffic {
    fn add_assign(&mut self, other: Self) {
        let Self { requests, sectors, bytes } = other;
        self.requests += requests;
        self.sectors += sectors;
        self.bytes += bytes;
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        let Self {
            instructions,
            lane_operations,
            mma,
            wgmma,
            tensor_flops,
            exponentials,
            shared_loads,
            shared_stores,
            load_matrix,
            store_matrix,
            copy_async_writes,
            global_loads,
            global_stores,
            copy_async_bytes,
            cluster_bytes,
            atomics,
            barriers,
            bulk_load_bytes,
            mbarrier_waits,
        } = other;
        for (sum, count) in self.instructions.iter_mut().zip(instructions) {
            *sum += count;
        }
        self.lane_operations += lane_operations;
        self.mma += mma;
        self.wgmma += wgmma;
        self.tensor_flops += tensor_flops;
        self.exponentials += exponentials;
        self.shared_loads += shared_loads;
        self.shared_stores += shared_stores;
        self.load_matrix += load_matrix;
        self.store_matrix += store_matrix;
        self.copy_async_writes += copy_async_writes;
        self.global_loads += global_loads;
        self.global_stores += global_stores;
        self.copy_async_bytes += copy_async_bytes;
        self.cluster_bytes += cluster_bytes;
        self.atomics += atomics;
        self.barriers += barriers;
        self.bulk_load_bytes += bulk_load_bytes;
        self.mbarrier_waits += mbarrier_waits;
    }
}
