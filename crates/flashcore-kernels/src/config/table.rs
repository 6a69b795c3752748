//! The table of a family's choices: a row for each field of its config, from which follow the struct, its default, the names
//! of configs, the values that are allowed, and those that a search tries.
//!
//! A name is the family and the tokens of its fields, in the order of the table. Each row says how the field is named:
//!
//! * `name [tile]`: rows and keys of a tile, as `64x128`;
//! * `name []`: in the token of another field;
//! * `name [always N "stage"]`: the number and a suffix;
//! * `name [N "splits"]`: the same, unless it is the default;
//! * `name ["pdl" => true]`: one token for each value that has one.
//!
//! `unnamed` is the value that a name without any token of the field stands for, where that is not the default. `near` has the
//! values that a search tries. Expressions of a row may use every field.

use core::fmt;

use super::Config;
use crate::unsupported::Reason;

/// A token of the name of a config.
pub(crate) struct NameToken<C> {
    /// The token as messages show it, with `N` for a number.
    pub(crate) shown: &'static str,
    /// False if every name has it.
    pub(crate) is_optional: bool,
    /// The token in the name of a config, if there is one.
    pub(crate) write: fn(&C) -> Option<String>,
    /// Sets the field, if this is its token.
    pub(crate) read: fn(&mut C, &str) -> Option<()>,
}

/// A config with a table.
pub(crate) trait Table: Copy + Default + Into<Config> + 'static {
    /// The name of the family.
    const FAMILY: &'static str;
    /// The config whose name has no optional token.
    const UNNAMED: Self;
    /// The tokens of names, by field.
    const TOKENS: &'static [&'static [NameToken<Self>]];

    /// The choices that no kernel can be generated with.
    fn flaws(self) -> Vec<Reason>;

    /// The configs with another value of one field.
    fn near_in_table(self) -> Vec<Config>;

    /// Writes the name.
    fn write_name(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(Self::FAMILY)?;
        let mut tokens = Self::TOKENS.iter().copied().flatten().filter_map(|token| (token.write)(self));
        tokens.try_for_each(|token| write!(formatter, "-{token}"))
    }

    /// The config of a name, or the default for the name of the family. The caller checks that the name is written like this.
    fn parse(name: &str) -> Option<Config> {
        let tokens = name.strip_prefix(Self::FAMILY)?;
        if tokens.is_empty() {
            return Some(Self::default().into());
        }
        let mut config = Self::UNNAMED;
        // From the end: the warps of a tile's rows follow from later tokens.
        for token in tokens.strip_prefix('-')?.rsplit('-') {
            Self::TOKENS.iter().copied().flatten().find_map(|known| (known.read)(&mut config, token))?;
        }
        Some(config.into())
    }

    /// The names of the family, as messages show them.
    fn names() -> String {
        let optional = Self::TOKENS.iter().copied().flatten().filter(|token| token.is_optional);
        let optional: Vec<_> = optional.map(|token| format!("-{}", token.shown)).collect();
        let more = if optional.is_empty() { String::new() } else { format!(", with any of {}", optional.join(", ")) };
        let unnamed: Config = Self::UNNAMED.into();
        format!("{} such as {unnamed}{more}", Self::FAMILY)
    }
}

/// Declares the config of a family by its [table](self).
macro_rules! config_table {
    (
        $(#[$meta:meta])*
        pub struct $Config:ident is $family:literal {$(
            $(#[$doc:meta])*
            $field:ident: $type:ty = $default:expr, name [$($name:tt)*]
            $(, unnamed $unnamed:expr)?
            $(, allowed {$($allowed:literal => $is_allowed:expr),* $(,)?})?
            $(, near [$($near:expr),* $(,)?])?;
        )*}
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $Config {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl $Config {
            /// The default.
            pub(crate) const BASE: Self = Self { $($field: $default),* };
        }

        impl Default for $Config {
            fn default() -> Self {
                Self::BASE
            }
        }

        impl $crate::config::Table for $Config {
            const FAMILY: &'static str = $family;
            const UNNAMED: Self = Self { $($field: config_table!(@unnamed $default $(, $unnamed)?)),* };
            const TOKENS: &'static [&'static [$crate::config::NameToken<Self>]] =
                &[$(config_table!(@tokens $field $($name)*)),*];

            #[allow(unused_variables, reason = "fields without a rule")]
            fn flaws(self) -> Vec<$crate::Reason> {
                let Self { $($field),* } = self;
                let rules = [$($($((stringify!($field), $field as u32, $allowed, $is_allowed),)*)?)*];
                let broken = rules.into_iter().filter(|(.., is_allowed)| !is_allowed);
                let reason = |(argument, value, allowed, _)| $crate::Reason::Config { kernel: $family, argument, value, allowed };
                broken.map(reason).collect()
            }

            #[allow(unused_variables, reason = "fields that no search changes")]
            fn near_in_table(self) -> Vec<$crate::config::Config> {
                let Self { $($field),* } = self;
                vec![$($($({
                    let mut config = self;
                    config.$field = $near;
                    config.into()
                },)*)?)*]
            }
        }
    };
    (@unnamed $default:expr) => { $default };
    (@unnamed $default:expr, $unnamed:expr) => { $unnamed };
    (@tokens $field:ident) => { &[] };
    (@tokens $field:ident tile) => {
        &[$crate::config::NameToken {
            shown: "ROWSxKEYS",
            is_optional: false,
            write: |config| Some(format!("{}x{}", config.tile_m(), config.tile_n)),
            read: |config, token| {
                let (rows, keys) = token.split_once('x')?;
                config.tile_n = keys.parse().ok()?;
                config.set_tile_m(rows.parse().ok()?)
            },
        }]
    };
    (@tokens $field:ident always N $suffix:literal) => {
        config_table!(@number $field, false, $suffix)
    };
    (@tokens $field:ident N $suffix:literal) => {
        config_table!(@number $field, true, $suffix)
    };
    (@tokens $field:ident always $($token:literal => $value:expr),*) => {
        config_table!(@values $field, false, $($token => $value),*)
    };
    (@tokens $field:ident $($token:literal => $value:expr),*) => {
        config_table!(@values $field, true, $($token => $value),*)
    };
    (@number $field:ident, $is_optional:literal, $suffix:literal) => {
        &[$crate::config::NameToken {
            shown: concat!("N", $suffix),
            is_optional: $is_optional,
            write: |config| {
                let is_named = !$is_optional || config.$field != <Self as $crate::config::Table>::UNNAMED.$field;
                is_named.then(|| format!("{}{}", config.$field, $suffix))
            },
            read: |config, token| {
                config.$field = token.strip_suffix($suffix)?.parse().ok()?;
                Some(())
            },
        }]
    };
    (@values $field:ident, $is_optional:literal, $($token:literal => $value:expr),*) => {
        &[$($crate::config::NameToken {
            shown: $token,
            is_optional: $is_optional,
            write: |config| (config.$field == $value).then(|| $token.to_owned()),
            read: |config, token| (token == $token).then(|| config.$field = $value),
        }),*]
    };
}

pub(crate) use config_table;
