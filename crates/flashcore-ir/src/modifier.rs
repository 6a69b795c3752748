//! The modifiers of operations, which select one form of an operation.

use core::fmt;

/// Declares a modifier: an enum whose variants have the name that dumps show.
macro_rules! modifier {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in dumps.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.name())
            }
        }

        impl crate::forms::Modifier for $name {
            fn values(_: &str, _: &str) -> &'static [Self] {
                Self::ALL
            }
        }
    };
}

modifier! {
    /// A memory space that operations address by a register.
    Space {
        /// Device memory, 64-bit addresses.
        Global = "global",
        /// Shared memory of the CTA, 32-bit addresses.
        Shared = "shared",
        /// Shared memory of any CTA of the cluster (DSMEM), 32-bit addresses made by `mapa`.
        Cluster = "shared::cluster",
    }
}

modifier! {
    /// A comparison. On floats every comparison with a NaN is false, except `Ne`.
    Compare {
        /// Equal.
        Eq = "eq",
        /// Not equal.
        Ne = "ne",
        /// Less.
        Lt = "lt",
        /// Less or equal.
        Le = "le",
        /// Greater.
        Gt = "gt",
        /// Greater or equal.
        Ge = "ge",
    }
}

modifier! {
    /// The source lane of a shuffle.
    ShuffleMode {
        /// Lane `index`.
        Index = "idx",
        /// Lane `self - index`.
        Up = "up",
        /// Lane `self + index`.
        Down = "down",
        /// Lane `self ^ index`.
        Butterfly = "bfly",
    }
}

modifier! {
    /// The condition that a vote tests over the predicates of a warp.
    VoteMode {
        /// True in every lane.
        All = "all",
        /// True in some lane.
        Any = "any",
        /// Equal in all lanes.
        Uniform = "uni",
    }
}

modifier! {
    /// The combining operation of an atomic, a reduction to memory or a warp reduction.
    ReduceOp {
        /// Sum.
        Add = "add",
        /// Minimum.
        Min = "min",
        /// Maximum.
        Max = "max",
        /// Bitwise and.
        And = "and",
        /// Bitwise or.
        Or = "or",
        /// Bitwise exclusive or.
        Xor = "xor",
        /// Replace; the old value is returned. Atomics only.
        Exchange = "exch",
    }
}

modifier! {
    /// The cache operator of a load.
    LoadCache {
        /// The default: all levels.
        All = "ca",
        /// L2 only.
        L2 = "cg",
        /// Streaming: likely used once.
        Streaming = "cs",
        /// Read-only data through the non-coherent path; the kernel never writes it.
        ReadOnly = "nc",
        /// Bypasses all caches.
        Volatile = "cv",
    }
}

modifier! {
    /// The cache operator of a store.
    StoreCache {
        /// The default: write back at all levels.
        WriteBack = "wb",
        /// L2 only.
        L2 = "cg",
        /// Streaming: likely not read again soon.
        Streaming = "cs",
        /// Through to memory.
        WriteThrough = "wt",
    }
}

modifier! {
    /// The caches that a `cp.async` goes through.
    CopyCache {
        /// L1 and L2; 4, 8 or 16 bytes.
        All = "ca",
        /// L2 only; 16 bytes.
        L2 = "cg",
    }
}

modifier! {
    /// The size of the L2 prefetch that accompanies an access.
    L2Prefetch {
        /// No prefetch.
        None = "none",
        /// 64 bytes.
        Bytes64 = "L2::64B",
        /// 128 bytes.
        Bytes128 = "L2::128B",
        /// 256 bytes.
        Bytes256 = "L2::256B",
    }
}

modifier! {
    /// The threads for which a fence orders memory.
    FenceScope {
        /// This CTA.
        Cta = "cta",
        /// The cluster of this CTA.
        Cluster = "cluster",
        /// The whole GPU.
        Gpu = "gpu",
        /// GPUs and host.
        System = "sys",
    }
}

modifier! {
    /// A shape of `mma.sync`: rows of A, columns of B, and the dimension summed over.
    MmaShape {
        /// 16 × 8 × 8.
        M16N8K8 = "m16n8k8",
        /// 16 × 8 × 16.
        M16N8K16 = "m16n8k16",
        /// 16 × 8 × 4, `tf32` only.
        M16N8K4 = "m16n8k4",
        /// 16 × 8 × 32, 8-bit floats only.
        M16N8K32 = "m16n8k32",
    }
}

impl MmaShape {
    /// The dimension summed over.
    pub const fn depth(self) -> u32 {
        match self {
            Self::M16N8K4 => 4,
            Self::M16N8K8 => 8,
            Self::M16N8K16 => 16,
            Self::M16N8K32 => 32,
        }
    }
}

modifier! {
    /// An 8-bit float. Registers hold them two in 16 bits or four in 32, the element with the lower index in the lowest byte.
    Fp8 {
        /// Four exponent bits, three fraction bits, numbers to 448; no infinity, and one NaN of each sign.
        E4m3 = "e4m3",
        /// Five exponent bits, two fraction bits, numbers to 57344; infinities and NaNs.
        E5m2 = "e5m2",
    }
}

modifier! {
    /// The direction in which `setmaxnreg` changes the registers of a warpgroup.
    RegisterChange {
        /// Grows, once other warpgroups have released as many.
        Increase = "inc",
        /// Shrinks.
        Decrease = "dec",
    }
}

modifier! {
    /// The use of the old accumulator in a `wgmma` (`scale-d` of the PTX manual).
    Accumulation {
        /// The product replaces it.
        Replace = "replace",
        /// The product is added to it.
        Add = "add",
        /// The product is added where a predicate holds, and replaces it elsewhere.
        AddWhere = "add where",
    }
}

modifier! {
    /// The major-ness of a matrix in shared memory: the dimension along which elements are adjacent.
    Major {
        /// K-major: along the dimension summed over.
        Depth = "depth",
        /// MN-major: along rows of the product for A, columns for B.
        Outer = "outer",
    }
}

modifier! {
    /// The location of the A operand of a `wgmma`.
    MatrixSource {
        /// In shared memory, given by a descriptor.
        Shared = "shared",
        /// In registers.
        Registers = "registers",
    }
}

modifier! {
    /// A shared-memory swizzle: the permutation of 16-byte pieces of a row that spreads a column over different banks.
    Swizzle {
        /// No permutation.
        None = "no swizzle",
        /// Pairs of pieces, over 256 bytes.
        Bytes32 = "32 bytes",
        /// Fours of pieces, over 512 bytes.
        Bytes64 = "64 bytes",
        /// Eights of pieces, over 1024 bytes.
        Bytes128 = "128 bytes",
    }
}

impl Swizzle {
    /// Bytes within which pieces are permuted.
    pub const fn bytes(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }

    /// Bytes after which the permutation repeats: what an address must be a multiple of to be where it begins.
    pub const fn period(self) -> u32 {
        match self.bytes() {
            None => 16,
            Some(bytes) => 8 * bytes,
        }
    }

    /// Returns the swizzled address of the byte at `address` of the plain layout: the bits that number a piece of 16
    /// bytes are xored with those that number a row of 128.
    pub const fn apply(self, address: u32) -> u32 {
        match self.bytes() {
            None => address,
            Some(bytes) => address ^ (address >> 3 & (bytes - 16)),
        }
    }
}

modifier! {
    /// The rounding mode of a conversion.
    Rounding {
        /// Exact, or truncating between integers.
        Exact = "exact",
        /// To nearest, ties to even.
        NearestEven = "rn",
        /// To nearest, ties away from zero.
        NearestAway = "rna",
        /// Float to integer, towards zero.
        ToZero = "rzi",
        /// Float to integer, towards minus infinity.
        Down = "rmi",
        /// Float to integer, towards plus infinity.
        Up = "rpi",
        /// Float to integer, to nearest even.
        NearestInteger = "rni",
    }
}

modifier! {
    /// A special register of the thread.
    SpecialRegister {
        /// Thread index in the CTA, x.
        ThreadX = "tid.x",
        /// Thread index in the CTA, y.
        ThreadY = "tid.y",
        /// Thread index in the CTA, z.
        ThreadZ = "tid.z",
        /// CTA size, x.
        BlockX = "ntid.x",
        /// CTA index, x.
        CtaX = "ctaid.x",
        /// CTA index, y.
        CtaY = "ctaid.y",
        /// CTA index, z.
        CtaZ = "ctaid.z",
        /// Number of CTAs, x.
        GridX = "nctaid.x",
        /// Number of CTAs, y.
        GridY = "nctaid.y",
        /// Number of CTAs, z.
        GridZ = "nctaid.z",
        /// Lane in the warp.
        Lane = "laneid",
        /// CTA index in the cluster, x.
        ClusterCtaX = "cluster_ctaid.x",
        /// CTA index in the cluster, y.
        ClusterCtaY = "cluster_ctaid.y",
        /// CTA index in the cluster, z.
        ClusterCtaZ = "cluster_ctaid.z",
        /// Number of CTAs of the cluster, x.
        ClusterX = "cluster_nctaid.x",
        /// Number of CTAs of the cluster, y.
        ClusterY = "cluster_nctaid.y",
        /// Number of CTAs of the cluster, z.
        ClusterZ = "cluster_nctaid.z",
        /// Rank of the CTA in the cluster, counted in x, then y, then z.
        ClusterRank = "cluster_ctarank",
        /// Number of CTAs of the cluster.
        ClusterSize = "cluster_nctarank",
    }
}
