//! Parameters of kernels beside attention: words that change from launch to launch, then arguments of the plan.

/// Declares the parameters of a kernel once: its registers, the words of a launch, the number of those.
macro_rules! operation_parameters {
    (
        $(#[$values_doc:meta])* $Values:ident, $WORDS:ident;
        launch { $($(#[$doc:meta])* $launch:ident,)* } plan { $($plan:ident: $ty:ident,)* }
    ) => {
        struct Parameters {
            $($launch: Reg<U64>,)*
            $($plan: Reg<$ty>,)*
        }

        impl Parameters {
            fn load(k: &mut Builder) -> Self {
                Self {
                    $($launch: k.parameter::<U64>(stringify!($launch)),)*
                    $($plan: k.parameter::<$ty>(stringify!($plan)),)*
                }
            }
        }

        $(#[$values_doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $Values {
            $($(#[$doc])* pub $launch: u64,)*
        }

        /// Number of words of a launch.
        pub const $WORDS: usize = [$(stringify!($launch)),*].len();

        impl $Values {
            /// The first arguments of the kernel.
            pub const fn words(&self) -> [u64; $WORDS] {
                [$(self.$launch),*]
            }
        }
    };
}
