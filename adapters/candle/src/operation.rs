//! Attention as an operation of candle: arguments, devices, and the log-sum-exp as a second result.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Error, Layout, MetalStorage, Result, Shape, Tensor, bail};

/// Name of the operation, in candle's messages and in ours.
pub(crate) const NAME: &str = "flash-attn";

/// Everything about a call but q, k and v.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) softmax_scale: f32,
    /// Keys before and after a row's own position; `None` is no limit.
    pub(crate) window: (Option<usize>, Option<usize>),
    /// 0 is none.
    pub(crate) softcap: f32,
    pub(crate) alibi_slopes: Option<Tensor>,
    /// Packed sequences; `None` for tensors with a batch.
    pub(crate) sequences: Option<Sequences>,
    /// The log-sum-exp, if it is wanted: an operation of candle has one result.
    pub(crate) lse: Option<Slot>,
}

/// Packed sequences (varlen).
#[derive(Clone, Debug)]
pub(crate) struct Sequences {
    pub(crate) seqlens_q: Tensor,
    pub(crate) seqlens_k: Tensor,
    pub(crate) max_seqlen_q: usize,
    pub(crate) max_seqlen_k: usize,
    pub(crate) pages: Option<Pages>,
}

/// A paged KV cache.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    pub(crate) block_table: Tensor,
    pub(crate) mm_prefix_ranges: Option<Tensor>,
    pub(crate) page_block_size: usize,
}

impl Sequences {
    pub(crate) fn new(seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize) -> Self {
        Self { seqlens_q: seqlens_q.clone(), seqlens_k: seqlens_k.clone(), max_seqlen_q, max_seqlen_k, pages: None }
    }

    pub(crate) fn paged(mut self, pages: Pages) -> Self {
        self.pages = Some(pages);
        self
    }
}

impl Pages {
    pub(crate) fn new(block_table: &Tensor, mm_prefix_ranges: Option<&Tensor>, page_block_size: usize) -> Self {
        Self { block_table: block_table.clone(), mm_prefix_ranges: mm_prefix_ranges.cloned(), page_block_size }
    }
}

impl Operation {
    pub(crate) const fn new(softmax_scale: f32, window: (Option<usize>, Option<usize>)) -> Self {
        Self { softmax_scale, window, softcap: 0.0, alibi_slopes: None, sequences: None, lse: None }
    }

    pub(crate) fn alibi(mut self, slopes: Option<&Tensor>) -> Self {
        self.alibi_slopes = slopes.cloned();
        self
    }

    pub(crate) const fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = softcap;
        self
    }

    pub(crate) fn sequences(mut self, sequences: Sequences) -> Self {
        self.sequences = Some(sequences);
        self
    }

    /// Takes an argument of candle-flash-attn-v3 that plans decide for themselves.
    pub(crate) const fn gqa_packing(self, _use_gqa_packing: bool) -> Self {
        self
    }

    /// The output.
    pub(crate) fn apply(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.check_devices(q, k, v)?;
        q.apply_op3(k, v, self)
    }

    /// The output and the log-sum-exp of each row.
    pub(crate) fn apply_with_lse(mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.check_devices(q, k, v)?;
        let slot = Slot::default();
        self.lse = Some(slot.clone());
        let output = q.apply_op3(k, v, self)?;
        // Gradients of either result are refused.
        let lse = q.apply_op3(k, v, TakeLse(slot))?;
        Ok((output, lse))
    }

    fn check_devices(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        let sequences = self.sequences.as_ref();
        let pages = sequences.and_then(|sequences| sequences.pages.as_ref());
        let tensors = [
            ("k", Some(k)),
            ("v", Some(v)),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
            ("seqlens_q", sequences.map(|sequences| &sequences.seqlens_q)),
            ("seqlens_k", sequences.map(|sequences| &sequences.seqlens_k)),
            ("block_table", pages.map(|pages| &pages.block_table)),
            ("mm_prefix_ranges", pages.and_then(|pages| pages.mm_prefix_ranges.as_ref())),
        ];
        for (name, tensor) in tensors {
            if let Some(tensor) = tensor.filter(|tensor| !tensor.device().same_device(q.device())) {
                let (device, expected) = (tensor.device().location(), q.device().location());
                bail!("{NAME}: {name} is on {device:?} and q on {expected:?}; move it there with to_device(q.device())")
            }
        }
        Ok(())
    }
}

/// The place where the log-sum-exp waits to become a tensor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<Lse>>>);

#[derive(Debug)]
pub(crate) enum Lse {
    Cpu(Vec<f32>, Shape),
    #[cfg(feature = "cuda")]
    Cuda(CudaStorage, Shape),
}

impl Slot {
    pub(crate) fn put(&self, lse: Lse) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse);
    }

    fn take(&self) -> Option<Lse> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The operation whose result is the log-sum-exp that another has left.
struct TakeLse(Slot);

impl CustomOp3 for TakeLse {
    fn name(&self) -> &'static str {
        "flash-attn-lse"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        match self.0.take() {
            Some(Lse::Cpu(lse, shape)) => Ok((CpuStorage::F32(lse), shape)),
            _ => bail!("{NAME}: the log-sum-exp was not computed on the CPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        match self.0.take() {
            Some(Lse::Cuda(lse, shape)) => Ok((lse, shape)),
            _ => bail!("{NAME}: the log-sum-exp was not computed on the GPU"),
        }
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Err(no_backward())
    }
}

impl CustomOp3 for Operation {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        crate::cpu::forward(self, (q, q_layout), (k, k_layout), (v, v_layout))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        crate::cuda::forward(self, (q, q_layout), (k, k_layout), (v, v_layout))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        bail!("{NAME}: the tensors are on a GPU; turn on the cargo feature `cuda` of flashcore-candle")
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        bail!("{NAME}: Metal is not there; move the tensors with to_device(&Device::Cpu), or use candle_nn::ops::sdpa")
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Err(no_backward())
    }
}

fn no_backward() -> Error {
    Error::msg(format!(
        "{NAME} has no backward pass; detach() its result, or compute attention with matmul and softmax where gradients \
         are needed"
    ))
}

/// Attention as an operation of candle, for `Tensor::apply_op3`.
#[derive(Clone, Debug)]
pub struct FlashAttn {
    /// Factor of the product of query and key.
    pub softmax_scale: f32,
    /// Slopes of `ALiBi`, `f32`, one for each query head.
    pub alibi_slopes: Option<Tensor>,
    /// Keys that a row attends before its own position; `None` is no limit.
    pub window_size_left: Option<usize>,
    /// Keys that a row attends after its own position; `None` is no limit.
    pub window_size_right: Option<usize>,
    /// `score = softcap * tanh(score / softcap)`; `None` and 0 are none.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    fn operation(&self) -> Operation {
        Operation::new(self.softmax_scale, (self.window_size_left, self.window_size_right))
            .alibi(self.alibi_slopes.as_ref())
            .softcap(self.softcap.unwrap_or(0.0))
    }
}

/// Makes a struct with a method `operation` an operation of candle.
macro_rules! delegate {
    ($name:ident) => {
        impl CustomOp3 for $name {
            fn name(&self) -> &'static str {
                self.operation().name()
            }

            fn cpu_fwd(
                &self,
                q: &CpuStorage,
                q_layout: &Layout,
                k: &CpuStorage,
                k_layout: &Layout,
                v: &CpuStorage,
                v_layout: &Layout,
            ) -> Result<(CpuStorage, Shape)> {
                self.operation().cpu_fwd(q, q_layout, k, k_layout, v, v_layout)
            }

            fn cuda_fwd(
                &self,
                q: &CudaStorage,
                q_layout: &Layout,
                k: &CudaStorage,
                k_layout: &Layout,
                v: &CudaStorage,
                v_layout: &Layout,
            ) -> Result<(CudaStorage, Shape)> {
                self.operation().cuda_fwd(q, q_layout, k, k_layout, v, v_layout)
            }

            fn metal_fwd(
                &self,
                q: &MetalStorage,
                q_layout: &Layout,
                k: &MetalStorage,
                k_layout: &Layout,
                v: &MetalStorage,
                v_layout: &Layout,
            ) -> Result<(MetalStorage, Shape)> {
                self.operation().metal_fwd(q, q_layout, k, k_layout, v, v_layout)
            }

            fn bwd(
                &self,
                q: &Tensor,
                k: &Tensor,
                v: &Tensor,
                output: &Tensor,
                gradient: &Tensor,
            ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
                self.operation().bwd(q, k, v, output, gradient)
            }
        }
    };
}
pub(crate) use delegate;

delegate!(FlashAttn);
