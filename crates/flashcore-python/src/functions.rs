//! Tables of functions of other libraries, by addresses that are handed over at run time.

macro_rules! functions {
    ($(#[$documentation:meta])* $name:ident; $($field:ident = $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        $(#[$documentation])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $name {
            /// The names, one a line, with a terminating zero.
            pub(crate) const SYMBOLS: &str = concat!($($symbol, "\n",)* "\0");

            /// The functions at the addresses of `SYMBOLS`; none if the number is another, or one is null.
            ///
            /// # Safety
            ///
            /// Each address must be that of the function of the name in its place, or 0.
            pub(crate) unsafe fn new(addresses: &[usize]) -> Option<Self> {
                let mut rest = addresses.iter().copied();
                let functions = Self {
                    $($field: {
                        let address = rest.next().filter(|&address| address != 0)?;
                        // SAFETY: by the caller, a function of this signature is there.
                        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                    },)*
                };
                rest.next().is_none().then_some(functions)
            }
        }
    };
}

pub(crate) use functions;
