//! Launch shape and attributes, and the call of `cuLaunchKernelEx`.

use core::ffi::{c_int, c_uint, c_void};
use std::ptr;

use crate::arguments::Arguments;
use crate::context::cuda;
use crate::error::CudaError;
use crate::module::Function;
use crate::stream::Stream;
use crate::sys::{
    CUaccessPolicyWindow, CUaccessProperty, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1, CUlaunchConfig,
};

/// The most CTAs of a grid, by dimension.
const MOST_CTAS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// The most attributes of a launch here.
const MOST_ATTRIBUTES: usize = 3;

/// The shape of a launch: grid, threads, shared memory, clusters, and its overlap with other launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// CTAs of a cluster, which reach each other's shared memory (DSMEM).
    pub cluster: Option<[u32; 3]>,
    /// True if it may start before the preceding kernel on the stream has finished: programmatic dependent launch
    /// (PDL). The kernel must then wait itself (`griddepcontrol.wait`) before it reads data that the preceding one
    /// writes.
    pub overlaps_previous: bool,
    /// The range that L2 keeps in the part that [`Context::keep_in_l2`](crate::Context::keep_in_l2) set aside.
    pub l2_window: Option<L2Range>,
}

/// Device memory that L2 is asked to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L2Range {
    /// The start address.
    pub address: u64,
    /// The length in bytes.
    pub bytes: usize,
    /// The size of the part of L2 that is set aside: of a longer range, this much is kept.
    pub kept_bytes: usize,
}

impl LaunchShape {
    /// A launch without clusters or overlap.
    pub const fn new(grid: [u32; 3], threads: u32, shared_bytes: u32) -> Self {
        Self { grid, threads, shared_bytes, cluster: None, overlaps_previous: false, l2_window: None }
    }

    /// Checks the limits that the driver reports as a bare "invalid value".
    pub(crate) fn validate(&self) -> Result<(), CudaError> {
        let grid = self.grid;
        if grid.iter().zip(MOST_CTAS).any(|(&ctas, most)| ctas == 0 || ctas > most) {
            return Err(CudaError::Grid { grid });
        }
        if let Some(cluster) = self.cluster
            && grid.iter().zip(cluster).any(|(&ctas, cluster)| cluster == 0 || ctas % cluster != 0)
        {
            return Err(CudaError::Cluster { cluster, grid });
        }
        Ok(())
    }

    /// The attributes of the launch, and their number.
    fn attributes(&self) -> ([CUlaunchAttribute; MOST_ATTRIBUTES], usize) {
        let nothing = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = [nothing; MOST_ATTRIBUTES];
        let mut count = 0;
        if let Some([x, y, z]) = self.cluster {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim = CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if self.overlaps_previous {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = c_int::from(true);
            count += 1;
        }
        if let Some(L2Range { address, bytes, kept_bytes }) = self.l2_window.filter(|range| range.bytes > 0) {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW;
            attributes[count].value.accessPolicyWindow = CUaccessPolicyWindow {
                base_ptr: address as *mut c_void,
                num_bytes: bytes,
                hitRatio: (kept_bytes as f32 / bytes as f32).min(1.0),
                hitProp: CUaccessProperty::CU_ACCESS_PROPERTY_PERSISTING,
                missProp: CUaccessProperty::CU_ACCESS_PROPERTY_STREAMING,
            };
            count += 1;
        }
        (attributes, count)
    }
}

/// Enqueues a launch on a stream, or captures it in a graph. Allocates nothing: everything that the driver reads is on
/// the stack, and read before it returns.
///
/// # Safety
///
/// The arguments are those of the function, and the memory that they point to is valid until it has finished.
pub(crate) unsafe fn launch(
    function: &Function,
    stream: &Stream,
    shape: &LaunchShape,
    arguments: &Arguments,
) -> Result<(), CudaError> {
    let context = function.context();
    let _current = context.enter()?;
    let (mut attributes, count) = shape.attributes();
    let [grid_x, grid_y, grid_z] = shape.grid;
    let config = CUlaunchConfig {
        gridDimX: grid_x,
        gridDimY: grid_y,
        gridDimZ: grid_z,
        blockDimX: shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared_bytes,
        hStream: stream.handle(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: count as c_uint,
    };
    let mut pointers = arguments.pointers();
    // SAFETY: function and stream are valid as long as their borrows. The config, its attributes and the arguments live
    // until the call returns, which copies them. The rest is the contract of this function.
    unsafe {
        cuda!(context, cuLaunchKernelEx(&raw const config, function.raw(), pointers.as_mut_ptr(), ptr::null_mut()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_shapes_can_be_launched() {
        let grid = |grid| LaunchShape::new(grid, 128, 0);
        for sound in [[1, 1, 1], [2_147_483_647, 65_535, 65_535]] {
            assert_eq!(grid(sound).validate(), Ok(()));
        }
        for wrong in [[0, 1, 1], [1, 1, 0], [2_147_483_648, 1, 1], [1, 65_536, 1], [1, 1, 65_536]] {
            assert_eq!(grid(wrong).validate(), Err(CudaError::Grid { grid: wrong }));
        }
        let cluster = |cluster| LaunchShape { cluster: Some(cluster), ..grid([4, 6, 1]) };
        assert_eq!(cluster([2, 3, 1]).validate(), Ok(()));
        for wrong in [[3, 1, 1], [0, 1, 1], [1, 1, 2]] {
            let error = CudaError::Cluster { cluster: wrong, grid: [4, 6, 1] };
            assert_eq!(cluster(wrong).validate(), Err(error));
        }
    }
}
