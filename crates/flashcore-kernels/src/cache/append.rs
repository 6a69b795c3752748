//! Append kernel: new keys and values to the slots of a KV cache, with QK-norm and rotary embedding on the way.
//!
//! A row is one head of one token. Some lanes of a warp have a row, each two vectors of 16 bytes of it, which hold both
//! columns of every pair that is rotated, so that nothing but the sum of a norm crosses lanes. CTAs of the first part of
//! the grid have query rows, those of the second keys, the rest values.

use flashcore_ir::types::{F32, Pred, S32, S64, U32, U64};
use flashcore_ir::{Arch, Argument, Builder, Compare, Kernel, Reg, SpecialRegister};
use flashcore_problem::{AppendProblem, Strides};

use super::rotary_rows::{Item, Norm, TableRow, Tables, normalize};
use super::spec::{AppendSpec, RowShape, THREADS};
use crate::spec::KernelKey;
use crate::unsupported::Reason;

/// Declares the parameters once: registers of the kernel, words of a launch, arguments of a plan.
macro_rules! parameters {
    (launch { $($(#[$doc:meta])* $launch:ident,)* } plan { $($plan:ident: $ty:ident,)* }) => {
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

        /// Addresses and sizes of one launch of an append; 0 for what the problem does not have.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct AppendValues {
            $($(#[$doc])* pub $launch: u64,)*
        }

        /// Number of words of a launch.
        pub const APPEND_WORDS: usize = [$(stringify!($launch)),*].len();

        impl AppendValues {
            /// The first arguments of the kernel.
            pub const fn words(&self) -> [u64; APPEND_WORDS] {
                [$(self.$launch),*]
            }
        }
    };
}

parameters! {
    launch {
        /// The new keys.
        key,
        /// The new values.
        value,
        /// The key cache.
        key_cache,
        /// The value cache.
        value_cache,
        /// The slot of each token, 64 bits, signed.
        slot_mapping,
        /// The query.
        query,
        /// The query output.
        query_output,
        /// The position of each token.
        positions,
        /// The cosines.
        cos,
        /// The sines.
        sin,
        /// The weights of the norm of the query.
        query_norm,
        /// The weights of the norm of the key.
        key_norm,
        /// Tokens of this launch, at most those of the plan.
        tokens,
    }
    plan {
        query_head_stride: U64,
        query_token_stride: U64,
        query_output_head_stride: U64,
        query_output_token_stride: U64,
        key_head_stride: U64,
        key_token_stride: U64,
        value_head_stride: U64,
        value_token_stride: U64,
        key_cache_page_stride: U64,
        key_cache_head_stride: U64,
        key_cache_row_stride: U64,
        value_cache_page_stride: U64,
        value_cache_head_stride: U64,
        value_cache_row_stride: U64,
        table_stride: U64,
        query_heads: U32,
        key_heads: U32,
        page_size: U32,
        slots: U32,
        last_position: S32,
        eps: F32,
    }
}

/// The launch of an append on a GPU: kernel, grid and arguments, without addresses.
#[derive(Debug, Clone)]
pub struct AppendPlan {
    /// The kernel.
    pub key: KernelKey,
    /// All arguments; the first [`APPEND_WORDS`] are 0.
    pub template: Vec<Argument>,
    spec: AppendSpec,
    query_heads: u32,
    key_heads: u32,
}

impl AppendPlan {
    /// The plan for a problem, or every reason against it.
    pub fn new(problem: &AppendProblem, arch: Arch) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let spec = AppendSpec::of(problem);
        let key = KernelKey::Append(spec, arch);
        key.check().map_err(|errors| errors.into_iter().map(Reason::Kernel).collect::<Vec<_>>())?;
        Ok(Self {
            key,
            template: arguments(problem),
            spec,
            query_heads: problem.query_heads as u32,
            key_heads: problem.key_heads as u32,
        })
    }

    /// CTAs for so many tokens.
    pub fn grid(&self, tokens: usize) -> [u32; 3] {
        let [queries, keys] = [tokens as u32 * self.query_heads, tokens as u32 * self.key_heads];
        let (key_rows, value_rows) = (self.spec.key_rows(), self.spec.value_rows());
        [key_rows.ctas(queries) + key_rows.ctas(keys) + value_rows.ctas(keys), 1, 1]
    }

    /// Bytes of which the addresses of query, query output, key, key cache and norm weights must be multiples, those of
    /// value and value cache, and those of the tables.
    pub fn alignments(&self) -> [u64; 3] {
        let AppendSpec { dtype, key_vec, value_vec, rotary, .. } = self.spec;
        let element = dtype.size_bytes() as u64;
        let table = rotary.map_or(1, |rotary| u64::from(rotary.table_vec) * rotary.table_dtype.size_bytes() as u64);
        [u64::from(key_vec) * element, u64::from(value_vec) * element, table]
    }
}

fn arguments(problem: &AppendProblem) -> Vec<Argument> {
    let element = problem.dtype.size_bytes() as u64;
    let bytes = |stride: usize| Argument::U64(stride as u64 * element);
    let token = |strides: Strides| [bytes(strides.head), bytes(strides.row)];
    let cache = |strides: Strides| [bytes(strides.batch), bytes(strides.head), bytes(strides.row)];
    let strides = problem.strides;
    let table_element = problem.table_dtype().size_bytes() as u64;
    let table_stride = problem.rotary.map_or(0, |rotary| rotary.table_stride as u64 * table_element);
    let last_position = problem.rotary.map_or(0, |rotary| rotary.max_position as i32 - 1);
    let mut arguments = vec![Argument::U64(0); APPEND_WORDS];
    arguments.extend([strides.query, strides.query_output, strides.key, strides.value].into_iter().flat_map(token));
    arguments.extend([strides.key_cache, strides.value_cache].into_iter().flat_map(cache));
    arguments.push(Argument::U64(table_stride));
    let sizes = [problem.query_heads, problem.key_heads, problem.page_size, problem.slots()];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::S32(last_position));
    arguments.push(Argument::F32(problem.qk_norm.map_or(0.0, |norm| norm.eps)));
    arguments
}

/// Rows of one tensor: where they come from, and what is done to them.
struct Pass {
    shape: RowShape,
    first_cta: Reg<U32>,
    heads: Reg<U32>,
    rows: Reg<U32>,
    source: Reg<U64>,
    source_strides: [Reg<U64>; 2],
    /// A row that nobody writes, which lanes without a vector of their own load in place of one that its owner may store
    /// at the same time: the source may be the target.
    unwritten: Option<Reg<U64>>,
    transforms: bool,
    norm: Option<Norm>,
}

/// The row of a lane.
struct LaneRow {
    exists: Reg<Pred>,
    token: Reg<U32>,
    head: Reg<U64>,
    lane_in_row: Reg<U32>,
}

/// Writes the kernel.
pub(super) fn kernel(spec: AppendSpec) -> Kernel {
    let mut builder = Builder::new(spec.name(), THREADS);
    let k = &mut builder;
    let p = Parameters::load(k);
    let tokens = k.truncate(p.tokens);
    let cta = k.special(SpecialRegister::CtaX);
    let (key_rows, value_rows) = (spec.key_rows(), spec.value_rows());
    let keys = k.mul(tokens, p.key_heads);
    let first_key_cta = if spec.query {
        let queries = k.mul(tokens, p.query_heads);
        let first_key_cta = ctas(k, key_rows, queries);
        let is_query = k.compare(Compare::Lt, cta, first_key_cta);
        let first_cta = k.copy(0u32);
        k.if_uniform(is_query, |k| {
            k.section("query", |k| {
                let norm = spec.qk_norm.then_some(Norm { weights: p.query_norm, eps: p.eps });
                let pass = Pass {
                    shape: key_rows,
                    first_cta,
                    heads: p.query_heads,
                    rows: queries,
                    source: p.query,
                    source_strides: [p.query_token_stride, p.query_head_stride],
                    unwritten: Some(p.key),
                    transforms: spec.transforms(),
                    norm,
                };
                pass.write(k, &p, cta, |k, row| {
                    let token = k.widen(row.token);
                    let address = k.mad(token, p.query_output_token_stride, p.query_output);
                    (k.mad(row.head, p.query_output_head_stride, address), row.exists)
                });
            });
        });
        first_key_cta
    } else {
        k.copy(0u32)
    };
    let key_ctas = ctas(k, key_rows, keys);
    let first_value_cta = k.add(first_key_cta, key_ctas);
    let from_key = k.compare(Compare::Ge, cta, first_key_cta);
    let before_value = k.compare(Compare::Lt, cta, first_value_cta);
    let is_key = k.and(from_key, before_value);
    k.if_uniform(is_key, |k| {
        k.section("key", |k| {
            let norm = spec.qk_norm.then_some(Norm { weights: p.key_norm, eps: p.eps });
            let pass = Pass {
                shape: key_rows,
                first_cta: first_key_cta,
                heads: p.key_heads,
                rows: keys,
                source: p.key,
                source_strides: [p.key_token_stride, p.key_head_stride],
                unwritten: None,
                transforms: spec.transforms(),
                norm,
            };
            let strides = [p.key_cache_page_stride, p.key_cache_row_stride, p.key_cache_head_stride];
            pass.write(k, &p, cta, |k, row| slot_address(k, &p, row, p.key_cache, strides));
        });
    });
    let is_value = k.compare(Compare::Ge, cta, first_value_cta);
    k.if_uniform(is_value, |k| {
        k.section("value", |k| {
            let pass = Pass {
                shape: value_rows,
                first_cta: first_value_cta,
                heads: p.key_heads,
                rows: keys,
                source: p.value,
                source_strides: [p.value_token_stride, p.value_head_stride],
                unwritten: None,
                transforms: false,
                norm: None,
            };
            let strides = [p.value_cache_page_stride, p.value_cache_row_stride, p.value_cache_head_stride];
            pass.write(k, &p, cta, |k, row| slot_address(k, &p, row, p.value_cache, strides));
        });
    });
    builder.finish()
}

/// CTAs for so many rows.
fn ctas(k: &mut Builder, shape: RowShape, rows: Reg<U32>) -> Reg<U32> {
    let per_cta = shape.rows_per_cta();
    let last = k.add(rows, per_cta - 1);
    k.shr(last, per_cta.ilog2())
}

/// The address of the row of a cache that a token's slot names, and if the slot is one of the cache: a slot that is
/// negative or past the last page is skipped.
fn slot_address(
    k: &mut Builder,
    p: &Parameters,
    row: &LaneRow,
    cache: Reg<U64>,
    [page_stride, row_stride, head_stride]: [Reg<U64>; 3],
) -> (Reg<U64>, Reg<Pred>) {
    let address = k.mad_wide(row.token, 8u32, p.slot_mapping);
    let slot = k.load_one::<S64>(address);
    // As an unsigned number, a negative slot is past every cache.
    let slot = k.reinterpret::<S64, U64>(slot);
    let slots = k.widen(p.slots);
    let is_slot = k.compare(Compare::Lt, slot, slots);
    let slot = k.truncate(slot);
    let slot = k.select(is_slot, slot, 0u32);
    let page = k.div(slot, p.page_size);
    let first = k.mul(page, p.page_size);
    let row_in_page = k.sub(slot, first);
    let (page, row_in_page) = (k.widen(page), k.widen(row_in_page));
    let address = k.mad(page, page_stride, cache);
    let address = k.mad(row_in_page, row_stride, address);
    let address = k.mad(row.head, head_stride, address);
    (address, k.and(row.exists, is_slot))
}

impl Pass {
    /// The row of this lane; one past the last is the last again, which is not stored.
    fn row(&self, k: &mut Builder, cta: Reg<U32>) -> LaneRow {
        let thread = k.special(SpecialRegister::ThreadX);
        let lane_in_row = k.and(thread, self.shape.lanes - 1);
        let row_in_cta = k.shr(thread, self.shape.lanes.ilog2());
        let cta = k.sub(cta, self.first_cta);
        let row = k.mad(cta, self.shape.rows_per_cta(), row_in_cta);
        let exists = k.compare(Compare::Lt, row, self.rows);
        let last = k.sub(self.rows, 1u32);
        let row = k.min(row, last);
        let token = k.div(row, self.heads);
        let first = k.mul(token, self.heads);
        let head = k.sub(row, first);
        LaneRow { exists, token, head: k.widen(head), lane_in_row }
    }

    /// Loads, transforms and stores the rows of a CTA.
    fn write(
        &self,
        k: &mut Builder,
        p: &Parameters,
        cta: Reg<U32>,
        target: impl FnOnce(&mut Builder, &LaneRow) -> (Reg<U64>, Reg<Pred>),
    ) {
        let Self { shape, .. } = *self;
        let vector = shape.vector;
        let element = vector.dtype.size_bytes() as u32;
        let row = self.row(k, cta);
        let [token_stride, head_stride] = self.source_strides;
        let token = k.widen(row.token);
        let source = k.mad(token, token_stride, self.source);
        let source = k.mad(row.head, head_stride, source);
        let steps = shape.items.div_ceil(shape.lanes);
        let items: Vec<_> = (0..steps).map(|step| Item::new(k, shape, row.lane_in_row, step)).collect();
        // All loads of the row before anything waits for one of them.
        let mut bits: Vec<_> = items
            .iter()
            .map(|item| {
                [0, 1].map(|side| {
                    let source = self.unwritten.map_or(source, |unwritten| {
                        let exists = item.exists[side].map_or(row.exists, |exists| k.and(row.exists, exists));
                        k.select(exists, source, unwritten)
                    });
                    let address = k.mad_wide(item.columns[side], element, source);
                    vector.load(k, address)
                })
            })
            .collect();
        let (target, is_stored) = target(k, &row);
        if self.transforms {
            let mut values: Vec<_> =
                bits.iter().map(|[first, second]| [vector.widen(k, first), vector.widen(k, second)]).collect();
            let tables = shape.rotary.map(|rotary| {
                let tables = Tables {
                    positions: p.positions,
                    cos: p.cos,
                    sin: p.sin,
                    stride: p.table_stride,
                    last_position: p.last_position,
                };
                (rotary.style, TableRow::new(k, shape, rotary, tables, row.token))
            });
            if let Some(norm) = &self.norm {
                normalize(k, shape, norm, &items, &mut values);
            }
            if let Some((style, tables)) = tables {
                for (item, values) in items.iter().zip(&mut values) {
                    tables.rotate(k, style, item, values);
                }
            }
            bits = values.iter().map(|[first, second]| [vector.round(k, first), vector.round(k, second)]).collect();
        }
        for (item, vectors) in items.iter().zip(&bits) {
            for ((column, exists), bits) in item.columns.into_iter().zip(item.exists).zip(vectors) {
                let is_stored = match exists {
                    Some(exists) => k.and(is_stored, exists),
                    None => is_stored,
                };
                let address = k.mad_wide(column, element, target);
                k.when(is_stored, |k| vector.store(k, address, bits));
            }
        }
    }
}
