//! Parameters of kernels beside attention: words that change from launch to launch, then arguments of the plan.

/// Declares the parameters of a kernel once: its registers, and where the words of a launch come from.
macro_rules! operation_parameters {
    (launch { $($launch:ident,)* } plan { $($plan:ident: $ty:ident,)* }) => {
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Parameters {
            $(pub(crate) $launch: Reg<U64>,)*
            $(pub(crate) $plan: Reg<$ty>,)*
        }

        impl Parameters {
            /// Declares and loads them.
            pub(crate) fn load(k: &mut Builder) -> Self {
                Self {
                    $($launch: k.parameter::<U64>(stringify!($launch)),)*
                    $($plan: k.parameter::<$ty>(stringify!($plan)),)*
                }
            }
        }

        /// Where the words of a launch come from.
        struct Words {
            $($launch: Word,)*
        }

        impl Words {
            /// The words, in the order of the parameters.
            fn list(self) -> impl Iterator<Item = Word> {
                [$(self.$launch),*].into_iter()
            }
        }
    };
}
