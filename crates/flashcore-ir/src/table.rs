//! The macro that turns the table of operations into the enum [`Op`](crate::Op) and one method per column.

macro_rules! operations {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $form:literal @ $manual:literal
            $({ $($attribute:ident: $attribute_type:ty),* $(,)? })?
            $(out ( $($out:ident: $out_type:expr),* ))?
            $(outs ( $($outs:ident[$outs_count:expr]: $outs_type:expr),* ))?
            $(in ( $($in:ident: $in_type:expr),* ))?
            $(ins ( $($ins:ident[$ins_count:expr]: $ins_type:expr),* ))?
            $(at ( $($at:ident: $space:expr),* ))?
            $(for $choice:ident in [$($choice_type:ident)*])?
            : $class:expr, $effect:expr, $aligned:literal, $since:expr;
    )*) => {
        /// An operation with its modifiers and operands: one variant per row of the table.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "the form of each row names its fields")]
        pub enum Op {
            $(
                $(#[doc = $doc])+
                #[doc = ""]
                #[doc = concat!("`", $form, "`, [manual](https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#", $manual, ").")]
                $name {
                    $($($attribute: $attribute_type,)*)?
                    $($($out: RegisterId,)*)?
                    $($($outs: Vec<RegisterId>,)*)?
                    $($($in: Operand,)*)?
                    $($($ins: Vec<RegisterId>,)*)?
                    $($($at: Address,)*)?
                },
            )*
        }

        /// The rows, in order.
        pub const TABLE: &[Entry] = &[
            $(Entry {
                name: stringify!($name),
                summary: concat!($($doc),+).trim_ascii(),
                form: $form,
                manual: $manual,
            },)*
        ];

        #[derive(Clone, Copy)]
        #[repr(usize)]
        enum Row { $($name),* }

        // The arms are generated for every row; a row uses those of its fields that its expressions name.
        #[expect(unused_variables, reason = "one expansion serves rows with and without modifiers")]
        impl Op {
            /// The row of the table.
            pub fn entry(&self) -> &'static Entry {
                match self { $(Self::$name { .. } => &TABLE[Row::$name as usize],)* }
            }

            /// The class of the operation.
            pub fn class(&self) -> Class {
                match self { $(Self::$name { $($($attribute,)*)? .. } => { $($(let $attribute = *$attribute;)*)? $class })* }
            }

            /// The memory effect of the operation.
            pub fn effect(&self) -> Effect {
                match self { $(Self::$name { $($($attribute,)*)? .. } => { $($(let $attribute = *$attribute;)*)? $effect })* }
            }

            /// True if all 32 lanes of the warp must execute it together (`.aligned`).
            pub fn is_aligned(&self) -> bool {
                match self { $(Self::$name { .. } => $aligned,)* }
            }

            /// The first PTX version and architecture that have it.
            pub fn since(&self) -> Since {
                match self { $(Self::$name { $($($attribute,)*)? .. } => { $($(let $attribute = *$attribute;)*)? $since })* }
            }

            /// The type modifier and the types the table allows for it.
            pub fn type_choice(&self) -> Option<(Type, &'static [Type])> {
                match self {
                    $(Self::$name { $($($attribute,)*)? .. } => {
                        $($(let $attribute = *$attribute;)*)?
                        let choice: Option<(Type, &'static [Type])> = None;
                        $(let choice: Option<(Type, &'static [Type])> = Some(($choice, &[$(Type::$choice_type),*]));)?
                        choice
                    })*
                }
            }

            /// Visits every operand, those it writes first.
            pub fn slots(&self, visit: &mut impl FnMut(Slot)) {
                match self {
                    $(Self::$name {
                        $($($attribute,)*)? $($($out,)*)? $($($outs,)*)? $($($in,)*)? $($($ins,)*)? $($($at,)*)?
                    } => {
                        $($(let $attribute = *$attribute;)*)?
                        $($(visit(Slot { role: Role::Write, name: stringify!($out), operand: Operand::Register(*$out), ty: $out_type });)*)?
                        $($(for register in $outs {
                            visit(Slot { role: Role::Write, name: stringify!($outs), operand: Operand::Register(*register), ty: $outs_type });
                        })*)?
                        $($(visit(Slot { role: Role::Read, name: stringify!($in), operand: *$in, ty: $in_type });)*)?
                        $($(for register in $ins {
                            visit(Slot { role: Role::ReadRegister, name: stringify!($ins), operand: Operand::Register(*register), ty: $ins_type });
                        })*)?
                        $($(visit(Slot { role: Role::Base, name: stringify!($at), operand: Operand::Register($at.base), ty: address_type($space) });)*)?
                    })*
                }
            }

            /// Visits every register operand mutably, those it writes first. For tools that transform kernels.
            pub fn registers_mut(&mut self, visit: &mut impl FnMut(Role, &'static str, &mut RegisterId)) {
                match self {
                    $(Self::$name {
                        $($($attribute,)*)? $($($out,)*)? $($($outs,)*)? $($($in,)*)? $($($ins,)*)? $($($at,)*)?
                    } => {
                        $($(visit(Role::Write, stringify!($out), $out);)*)?
                        $($(for register in $outs { visit(Role::Write, stringify!($outs), register); })*)?
                        $($(if let Operand::Register(register) = $in { visit(Role::Read, stringify!($in), register); })*)?
                        $($(for register in $ins { visit(Role::ReadRegister, stringify!($ins), register); })*)?
                        $($(visit(Role::Base, stringify!($at), &mut $at.base);)*)?
                    })*
                }
            }

            /// Visits every vector operand whose length is not what the modifiers demand.
            pub fn length_mismatches(&self, visit: &mut impl FnMut(LengthMismatch)) {
                match self {
                    $(Self::$name { $($($attribute,)*)? $($($outs,)*)? $($($ins,)*)? .. } => {
                        $($(let $attribute = *$attribute;)*)?
                        $($({
                            let expected = ($outs_count) as usize;
                            if $outs.len() != expected {
                                visit(LengthMismatch { name: stringify!($outs), actual: $outs.len(), expected });
                            }
                        })*)?
                        $($({
                            let expected = ($ins_count) as usize;
                            if $ins.len() != expected {
                                visit(LengthMismatch { name: stringify!($ins), actual: $ins.len(), expected });
                            }
                        })*)?
                    })*
                }
            }

            /// Visits every address with its space.
            pub fn addresses(&self, visit: &mut impl FnMut(&'static str, Space, Address)) {
                match self {
                    $(Self::$name { $($($attribute,)*)? $($($at,)*)? .. } => {
                        $($(let $attribute = *$attribute;)*)?
                        $($(visit(stringify!($at), $space, *$at);)*)?
                    })*
                }
            }

            /// Visits every operand that may be a constant.
            pub fn operands_mut(&mut self, visit: &mut impl FnMut(&'static str, &mut Operand)) {
                match self {
                    $(Self::$name { $($($in,)*)? .. } => {
                        $($(visit(stringify!($in), $in);)*)?
                    })*
                }
            }

            /// Visits every combination of modifiers of a row, or of all, with a register or a constant for each operand that may be
            /// either.
            pub(crate) fn forms(row: Option<&str>, visit: &mut impl FnMut(Self)) {
                $(if row.is_none_or(|row| row == stringify!($name)) {
                    let mut choices = Choices::default();
                    loop {
                        $($(let $attribute = choices.pick(<$attribute_type as Modifier>::values(stringify!($name), stringify!($attribute)));)*)?
                        visit(Self::$name {
                            $($($attribute,)*)?
                            $($($out: ANY,)*)?
                            $($($outs: vec![ANY; ($outs_count) as usize],)*)?
                            $($($in: choices.operand(stringify!($in)),)*)?
                            $($($ins: vec![ANY; ($ins_count) as usize],)*)?
                            $($($at: Address { base: ANY, offset: -16 },)*)?
                        });
                        if !choices.advance() {
                            break;
                        }
                    }
                })*
            }

            /// Visits every modifier, for dumps.
            pub(crate) fn modifiers(&self, visit: &mut impl FnMut(&'static str, &dyn core::fmt::Debug)) {
                match self {
                    $(Self::$name { $($($attribute,)*)? .. } => {
                        $($(visit(stringify!($attribute), $attribute);)*)?
                    })*
                }
            }
        }
    };
}
