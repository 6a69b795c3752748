//! The modifiers of operations: which form of an operation it is.

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
    };
}

modifier! {
    /// A memory space that operations address by a register.
    Space {
        /// Memory of the device, 64-bit addresses.
        Global = "global",
        /// Memory of the CTA, 32-bit addresses.
        Shared = "shared",
        /// Memory of a CTA of the same cluster, 32-bit addresses that `mapa` makes.
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
    /// Where a shuffle takes its value from.
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
    /// What a vote asks of the predicate over the warp.
    VoteMode {
        /// True in every lane.
        All = "all",
        /// True in some lane.
        Any = "any",
        /// The same in every lane.
        Uniform = "uni",
    }
}

modifier! {
    /// What an atomic, a reduction to memory or a warp reduction does with the values.
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
    /// How a load may be cached.
    LoadCache {
        /// The default: all levels.
        All = "ca",
        /// L2 only.
        L2 = "cg",
        /// Streaming: likely used once.
        Streaming = "cs",
        /// Read-only data through the non-coherent path; the kernel never writes it.
        ReadOnly = "nc",
        /// Never from a cache.
        Volatile = "cv",
    }
}

modifier! {
    /// How a store may be cached.
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
    /// Which caches an asynchronous copy goes through.
    CopyCache {
        /// L1 and L2; 4, 8 or 16 bytes.
        All = "ca",
        /// L2 only; 16 bytes.
        L2 = "cg",
    }
}

modifier! {
    /// How much around an access is brought into L2 as well.
    L2Prefetch {
        /// Nothing asked for.
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
    /// The threads among which a fence orders memory.
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
    }
}

impl MmaShape {
    /// The dimension summed over.
    pub const fn depth(self) -> u32 {
        match self {
            Self::M16N8K4 => 4,
            Self::M16N8K8 => 8,
            Self::M16N8K16 => 16,
        }
    }
}

modifier! {
    /// How the number of registers of a warpgroup changes.
    RegisterChange {
        /// It grows, once others have released as many.
        Increase = "inc",
        /// It shrinks.
        Decrease = "dec",
    }
}

modifier! {
    /// Whether a product of a warpgroup is added to what the accumulator holds.
    Accumulation {
        /// It takes the place of it.
        Replace = "replace",
        /// It is added.
        Add = "add",
        /// It is added where a predicate holds, and takes the place elsewhere.
        AddWhere = "add where",
    }
}

modifier! {
    /// Which elements of a matrix in shared memory are adjacent.
    Major {
        /// Those along the dimension summed over.
        Depth = "depth",
        /// Those along rows of the product for A, columns for B.
        Outer = "outer",
    }
}

modifier! {
    /// Where the first operand of a product of a warpgroup is.
    MatrixSource {
        /// In shared memory, as a descriptor says.
        Shared = "shared",
        /// In registers.
        Registers = "registers",
    }
}

modifier! {
    /// How rows of shared memory are permuted in pieces of 16 bytes, so that a column of them lies in different banks.
    Swizzle {
        /// Not at all.
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

    /// Where the byte lies that would lie at `address` without swizzle: the bits that number a piece of 16 bytes are
    /// changed by those that number a row of 128.
    pub const fn apply(self, address: u32) -> u32 {
        match self.bytes() {
            None => address,
            Some(bytes) => address ^ (address >> 3 & (bytes - 16)),
        }
    }
}

modifier! {
    /// How a conversion rounds.
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
