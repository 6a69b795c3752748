//! Positions of the CTAs of a cluster in the grid, and the numbering of their warps.

/// A cluster of a grid. Without clusters each CTA is a cluster of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    /// CTAs of the grid.
    pub(crate) grid: [u32; 3],
    /// CTAs of a cluster.
    pub(crate) size: [u32; 3],
    /// The position of the cluster among the clusters.
    pub(crate) cluster: [u32; 3],
    /// Warps of a CTA.
    pub(crate) warps_per_cta: usize,
}

impl Placement {
    /// The cluster by its number.
    pub(crate) fn new(grid: [u32; 3], size: [u32; 3], warps_per_cta: usize, number: u64) -> Self {
        let [x, y, _] = [0, 1, 2].map(|axis| u64::from(grid[axis] / size[axis]));
        let cluster = [(number % x) as u32, (number / x % y) as u32, (number / x / y) as u32];
        Self { grid, size, cluster, warps_per_cta }
    }

    /// CTAs of the cluster.
    pub(crate) fn ctas(&self) -> usize {
        self.size.iter().product::<u32>() as usize
    }

    /// The position of a CTA within the cluster, by its rank.
    pub(crate) fn within(&self, rank: usize) -> [u32; 3] {
        let [x, y, _] = self.size;
        let rank = rank as u32;
        [rank % x, rank / x % y, rank / x / y]
    }

    /// The position of a CTA in the grid, by its rank.
    pub(crate) fn cta(&self, rank: usize) -> [u32; 3] {
        let within = self.within(rank);
        core::array::from_fn(|axis| self.cluster[axis] * self.size[axis] + within[axis])
    }

    /// The rank of the CTA that a warp of the cluster belongs to, and its number there.
    pub(crate) fn rank_and_warp(&self, warp: usize) -> (usize, usize) {
        (warp / self.warps_per_cta, warp % self.warps_per_cta)
    }
}
