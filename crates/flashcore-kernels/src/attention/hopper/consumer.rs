//! The warpgroups that compute.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress, SpecialRegister};
use flashcore_problem::Operand;

use super::key_group::KeyGroup;
use super::key_tiles::KeyTiles;
use super::schedule::Tile;
use super::{Cta, WARPGROUP, WARPGROUP_ROWS, epilogue};
use crate::attention::Work;
use crate::config::WarpScheduler;
use crate::element::Element;
use crate::tile::{
    Accumulator, AddedTerm, CHUNK_BYTES, CHUNK_ELEMENTS, ExpressionCode, FragmentPosition, KeyMask, LANES,
    OnlineSoftmax, PANEL_COLUMNS, PANEL_ROW_BYTES, PRODUCT_DEPTH, PanelMatrix, RESULT_COLUMNS, ROW_STEP,
    ROWS_PER_BLOCK, Raised, Rounded, ScorePlaces, ScoreTerms, StoredStage, TransferCursor,
};

/// Keys that an expression is asked about at a time.
const KEYS_AT_ONCE: u32 = 32;
/// Rows of a lane.
const LANE_ROWS: u32 = 2;
/// The barrier at which the first warpgroup waits for its turn; 0 is that of the CTA.
const FIRST_TURN: u32 = 1;
/// The barrier at which all warpgroups that compute meet.
pub(super) const ALL_CONSUMERS: u32 = 8;

/// Computes every tile of the CTA.
pub(super) fn run<T: Element>(k: &mut Builder, cta: &Cta, thread: Reg<U32>, warpgroup: Reg<U32>) {
    let consumer = Consumer::<T>::new(k, cta, thread, warpgroup);
    if cta.reads_early() {
        cta.wait_for_kernel_before(k);
    }
    consumer.turns.begin(k);
    let own = cta.config.has_own_ranges(cta.specialization).then_some(consumer.row_group);
    let part = own.or_else(|| cta.common_part(k));
    let tickets = cta.shared.tickets.zip(part);
    let read = |k: &mut Builder| tickets.map(|(tickets, part)| tickets.read(k, &consumer.query, part));
    cta.schedule.each_tile(k, part, read, |k, tile| consumer.compute(k, cta, tile));
    consumer.end_stores(k);
    consumer.turns.end(k);
}

/// What a warpgroup has in registers, and where it stands.
pub(super) struct Consumer<T: Element> {
    /// The first of the lane's rows in the tile of the CTA; the other is 8 further on.
    pub(super) row: Reg<U32>,
    pub(super) position: FragmentPosition,
    /// Holds in one lane of each warp.
    pub(super) leader: Reg<Pred>,
    pub(super) query: TransferCursor,
    /// The place of a query where the output lies that the copy engine stores, if it does.
    pub(super) stored: Option<StoredStage>,
    keys: TransferCursor,
    values: TransferCursor,
    /// Bytes from the query tile to the rows of the warpgroup.
    query_offset: Reg<U32>,
    pub(super) row_group: Reg<U32>,
    /// Which of the tiles of keys are its own.
    key_group: Option<KeyGroup>,
    turns: Turns,
    scores: Accumulator,
    weights: Rounded<T>,
    pub(super) output: Accumulator,
}

impl<T: Element> Consumer<T> {
    fn new(k: &mut Builder, cta: &Cta, thread: Reg<U32>, warpgroup: Reg<U32>) -> Self {
        let (shared, config) = (&cta.shared, cta.config);
        let lane = k.and(thread, LANES - 1);
        let position = FragmentPosition::new(k, lane);
        let warp = k.shr(thread, LANES.ilog2());
        let key_group = (config.key_sharers() > 1).then(|| KeyGroup::new(k, cta, warp, lane, warpgroup));
        let (warp, row_group) = match &key_group {
            Some(group) => (group.row_warp, group.row_group),
            // The warps that copy come first.
            None => (k.sub(warp, WARPGROUP / LANES), warpgroup),
        };
        let row = k.mad(warp, ROWS_PER_BLOCK, position.group);
        let [keys, values] = [shared.key_ring, shared.value_ring].map(|ring| match &key_group {
            Some(group) => ring.cursor_of(k, cta.base, group.number, config.kv_split_warpgroups),
            None => ring.cursor(k, cta.base),
        });
        let value_columns = cta.specialization.value_dim.next_multiple_of(RESULT_COLUMNS);
        Self {
            row,
            position,
            leader: k.elect(),
            query: shared.query_ring.cursor(k, cta.base),
            stored: config.stores_by_copy(cta.specialization).then(|| StoredStage::none(k)),
            keys,
            values,
            query_offset: k.mul(row_group, WARPGROUP_ROWS * PANEL_ROW_BYTES),
            row_group,
            key_group,
            turns: Turns::new(k, config.warp_scheduler, warpgroup, config.warpgroups),
            scores: k.section("scores", |k| Accumulator::unset(k, config.tile_n)),
            weights: k.section("weights", |k| Rounded::unset(k, config.tile_n)),
            output: k.section("output", |k| Accumulator::unset(k, value_columns)),
        }
    }

    fn compute(&self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        let work = &tile.work;
        let specialization = cta.specialization;
        let all_key_tiles = KeyTiles::new(k, tile, cta.config);
        let has_own = cta.config.has_own_ranges(specialization);
        let key_tiles = if has_own { all_key_tiles.of_group(k, tile) } else { all_key_tiles };
        cta.wait_for_kernel_before(k);
        let places = k.section("rows", |k| self.score_places(k, work));
        let (row, rows) = (places.rows[0], places.rows.len());
        let terms = specialization.has_terms().then(|| k.section("score terms", |k| work.score_terms(k, row, rows)));
        let added = work.added_term(k, row, rows);
        let mask_expression = work.mask_expression(k, row, rows);
        let scale = if terms.is_none() { Some(work.parameters.scale_log2) } else { None };
        let mask = key_mask(work, &places);
        let softmax = k.section("softmax", |k| {
            OnlineSoftmax::new(k, LANE_ROWS, scale, cta.config.rescale, cta.config.exponential)
        });
        self.output.clear(k);
        let raised = Raised::none(k, LANE_ROWS);
        let step = Step { cta, work, terms, added, places, mask, mask_expression, softmax, raised, key_tiles };

        let store = |k: &mut Builder| k.section("epilogue", |k| epilogue::store(k, self, work, &step.softmax));
        let attend = |k: &mut Builder| {
            if has_own {
                self.attend_own(k, &step, &all_key_tiles);
            } else {
                self.attend(k, &step);
            }
        };
        // Without keys there is no query, but where it would be stands what the tile is.
        let pass = |k: &mut Builder| {
            if cta.shared.tickets.is_some() {
                self.end_stores(k);
                self.query.release(k, self.leader);
            }
        };
        if let Some(group) = &self.key_group {
            let has_some = group.has_some(k, &key_tiles);
            k.if_uniform(has_some, |k| self.attend(k, &step));
            k.section("other keys", |k| group.gather(k, cta.config, &step.softmax, &self.output));
            let is_first = group.is_first(k);
            k.if_uniform(is_first, store);
        } else if let Some(target) = cta.maps.output {
            let store_by_copy = |k: &mut Builder| {
                k.section("epilogue", |k| epilogue::store_by_copy(k, self, cta, tile, target, &step.softmax));
            };
            k.if_else_uniform(
                all_key_tiles.any,
                |k| {
                    attend(k);
                    store_by_copy(k);
                },
                // There is no query either, in whose place the output could be written.
                |k| {
                    pass(k);
                    store(k);
                },
            );
        } else {
            if cta.shared.tickets.is_some() {
                k.if_else_uniform(all_key_tiles.any, attend, pass);
            } else {
                k.if_uniform(all_key_tiles.any, attend);
            }
            store(k);
        }
    }

    /// Goes through those of all tiles that an expression leaves to the rows of this warpgroup, past those of others.
    fn attend_own(&self, k: &mut Builder, step: &Step<'_>, all: &KeyTiles) {
        let own = step.key_tiles;
        k.if_else_uniform(
            own.any,
            |k| {
                self.pass_by(k, own.last, all.last);
                self.attend(k, step);
                self.pass_by(k, all.first, own.first);
            },
            |k| {
                self.wait_for_query(k, step.cta);
                self.end_stores(k);
                self.release_query(k);
                let before_first = k.sub(all.first, 1i32);
                self.pass_by(k, before_first, all.last);
            },
        );
    }

    /// Waits for the query, unless what stands beside it has been read.
    fn wait_for_query(&self, k: &mut Builder, cta: &Cta) {
        if cta.shared.tickets.is_none() {
            self.query.wait_until_full(k);
        }
    }

    /// The next query may come, unless the output is written to the place of this one.
    fn release_query(&self, k: &mut Builder) {
        if self.stored.is_none() {
            k.section("query", |k| self.query.release(k, self.leader));
        }
    }

    /// The place from which the rows before were stored may have a query again.
    fn end_stores(&self, k: &mut Builder) {
        if let Some(stored) = self.stored {
            stored.end(k, self.leader);
        }
    }

    /// The address of the rows of the warpgroup in the place of the query.
    pub(super) fn tile_m(&self, k: &mut Builder) -> Reg<U32> {
        let address = self.query.tile(k);
        k.add(address, self.query_offset)
    }

    /// Lets go of as many tiles of keys as lie from one number to another.
    fn pass_by(&self, k: &mut Builder, from: Reg<S32>, to: Reg<S32>) {
        k.section("tiles of others", |k| {
            k.for_uniform(from, to, 1i32, |k, _| {
                for ring in [&self.keys, &self.values] {
                    ring.wait_until_full(k);
                    ring.release(k, self.leader);
                }
            });
        });
    }

    /// Goes through the tiles of keys, of which there is at least one.
    fn attend(&self, k: &mut Builder, step: &Step<'_>) {
        let (cta, key_tiles) = (step.cta, step.key_tiles);
        let specialization = cta.specialization;
        let query = k.section("query", |k| {
            self.wait_for_query(k, cta);
            let address = self.tile_m(k);
            cta.shared.query.by_rows(k, address)
        });
        let key_tile = match &self.key_group {
            Some(group) => group.last_tile(k, &key_tiles),
            None => k.copy(key_tiles.last),
        };
        let first_key = key_tiles.first_key(k, key_tile);
        k.section("first scores", |k| {
            self.keys.wait_until_full(k);
            k.wgmma_fence();
            self.start_scores(k, step, &query);
            self.end_stores(k);
            k.wgmma_wait(0);
            self.keys.release(k, self.leader);
        });
        k.section("first weights", |k| match step.few_keys(k, first_key) {
            Some((has_few, few)) => {
                let few = self.scores.first_columns(few);
                k.if_else_uniform(
                    has_few,
                    |k| self.first_weights(k, step, &few, key_tile, first_key),
                    |k| self.first_weights(k, step, &self.scores, key_tile, first_key),
                );
            }
            None => self.first_weights(k, step, &self.scores, key_tile, first_key),
        });
        k.section("first values", |k| {
            self.values.wait_until_full(k);
            if specialization.has(Operand::SequsedK) {
                self.clear_values_past_end(k, step, first_key);
            }
        });
        // What masks cut on the right, what every row attends, what masks cut on the left.
        if specialization.right || specialization.mask_mod.is_some() {
            self.each_before(k, step, &query, key_tile, key_tiles.whole_end, true);
        }
        self.each_before(k, step, &query, key_tile, key_tiles.whole_first, false);
        if specialization.left || specialization.mask_mod.is_some() {
            self.each_before(k, step, &query, key_tile, key_tiles.first, true);
        }
        self.release_query(k);
        k.section("last output", |k| {
            if specialization.left {
                let first_key = key_tiles.first_key(k, key_tile);
                self.clear_values_before_window(k, step, first_key);
            }
            if cta.config.overlap_rescale {
                step.softmax.rescale(k, &self.output, &step.raised);
            }
            k.wgmma_fence();
            self.start_output(k, cta);
            k.wgmma_wait(0);
            self.values.release(k, self.leader);
        });
    }

    /// The weights of the tile that comes first, of as many keys as there are scores.
    fn first_weights(
        &self,
        k: &mut Builder,
        step: &Step<'_>,
        scores: &Accumulator,
        key_tile: Reg<S32>,
        first_key: Reg<S32>,
    ) {
        step.apply_terms(k, scores, first_key);
        step.apply_masks_where_cut(k, scores, key_tile, first_key);
        step.softmax.raise(k, scores, &step.raised);
        step.softmax.weigh(k, scores, &step.raised);
        self.weights.round(k, scores);
    }

    /// Works on the tiles of keys before `key_tile`, down to `bound`.
    fn each_before(
        &self,
        k: &mut Builder,
        step: &Step<'_>,
        query: &PanelMatrix,
        key_tile: Reg<S32>,
        bound: Reg<S32>,
        is_cut: bool,
    ) {
        let groups = step.cta.config.key_sharers() as i32;
        k.while_uniform(
            |k| {
                let next = if groups == 1 { key_tile } else { k.sub(key_tile, groups - 1) };
                k.compare(Compare::Gt, next, bound)
            },
            |k| {
                k.add_to(key_tile, -groups);
                let name = if is_cut { "cut tile" } else { "tile" };
                k.section(name, |k| self.tile(k, step, query, key_tile, is_cut));
            },
        );
    }

    /// The scores of one tile of keys and the output of the one before, together; then the weights of the one.
    fn tile(&self, k: &mut Builder, step: &Step<'_>, query: &PanelMatrix, key_tile: Reg<S32>, is_cut: bool) {
        let cta = step.cta;
        self.keys.wait_until_full(k);
        self.turns.wait(k, WarpScheduler::PingPong);
        k.section("scores", |k| {
            k.wgmma_fence();
            self.start_scores(k, step, query);
        });
        k.section("output", |k| {
            if cta.config.overlap_rescale {
                step.softmax.rescale(k, &self.output, &step.raised);
            }
            k.wgmma_fence();
            self.start_output(k, cta);
        });
        self.turns.pass(k, WarpScheduler::PingPong);
        let first_key = step.key_tiles.first_key(k, key_tile);
        k.wgmma_wait(1);
        self.keys.release(k, self.leader);
        step.apply_terms(k, &self.scores, first_key);
        if is_cut {
            step.apply_masks(k, &self.scores, first_key);
        }
        step.softmax.raise(k, &self.scores, &step.raised);
        self.turns.wait(k, WarpScheduler::ExclusiveExp);
        step.softmax.weigh(k, &self.scores, &step.raised);
        let before = self.values.leave(k);
        // Here and not before the product: a wait for a barrier is a loop, across which compilers do not move the end of
        // the product up; without it they do, to before the exponentials.
        self.values.wait_until_full(k);
        self.turns.pass(k, WarpScheduler::ExclusiveExp);
        k.wgmma_wait(0);
        before.release(k, self.leader);
        self.weights.round(k, &self.scores);
        if !cta.config.overlap_rescale {
            step.softmax.rescale(k, &self.output, &step.raised);
        }
    }

    /// Zeroes the V rows of a tile past the last key of the batch. Their weights are zero, but they may hold anything, a
    /// NaN too; TMA has zeroed what lies past the end of the tensor.
    fn clear_values_past_end(&self, k: &mut Builder, step: &Step<'_>, first_key: Reg<S32>) {
        let left = k.sub(step.mask.key_length, first_key);
        let any = k.compare(Compare::Lt, left, step.cta.config.tile_n as i32);
        self.clear_values(k, step.cta, any, Compare::Ge, left);
    }

    /// Zeroes the V rows of a tile before the first key that any row of the batch attends.
    fn clear_values_before_window(&self, k: &mut Builder, step: &Step<'_>, first_key: Reg<S32>) {
        let first_row = k.copy(0u32);
        let first_attended = step.work.first_key(k, first_row);
        let before = k.sub(first_attended, first_key);
        let any = k.compare(Compare::Gt, before, 0i32);
        self.clear_values(k, step.cta, any, Compare::Lt, before);
    }

    /// Zeroes the V rows whose number in the tile compares so with `bound`, if there are any.
    fn clear_values(&self, k: &mut Builder, cta: &Cta, any: Reg<Pred>, compare: Compare, bound: Reg<S32>) {
        let Cta { config, shared, .. } = cta;
        let threads = config.row_groups() * WARPGROUP;
        k.section("clear values", |k| {
            k.if_uniform(any, |k| {
                let thread = k.special(SpecialRegister::ThreadX);
                let (thread, barrier) = match &self.key_group {
                    Some(group) => (group.thread(k, thread), group.barrier(k)),
                    None => (k.sub(thread, WARPGROUP), k.copy(ALL_CONSUMERS)),
                };
                let tile = self.values.tile(k);
                let first = k.mad(thread, CHUNK_BYTES, tile);
                let zero = k.copy(0u32);
                let chunks_per_row = PANEL_COLUMNS / CHUNK_ELEMENTS;
                for chunk in (0..config.tile_n * chunks_per_row).step_by(threads as usize) {
                    let number = k.add(thread, chunk);
                    let row = k.shr(number, chunks_per_row.ilog2());
                    let row = k.reinterpret::<U32, S32>(row);
                    let clears = k.compare(compare, row, bound);
                    let is_there = k.compare(Compare::Lt, row, config.tile_n as i32);
                    let clears = k.and(clears, is_there);
                    for panel in 0..shared.value.panels() {
                        let bytes = panel * shared.value.panel_bytes() + chunk * CHUNK_BYTES;
                        let target = SharedAddress::from(first).plus(bytes as i32);
                        k.when(clears, |k| k.store_shared(target, &[zero; 4]));
                    }
                }
                k.fence_proxy_async();
                k.barrier_sync(barrier, threads);
            });
        });
    }

    fn start_scores(&self, k: &mut Builder, step: &Step<'_>, query: &PanelMatrix) {
        let shared = &step.cta.shared;
        let address = self.keys.tile(k);
        let keys = shared.key.by_rows(k, address);
        let depth = step.cta.specialization.head_dim.next_multiple_of(PRODUCT_DEPTH);
        self.scores.start_product_of_rows::<T>(k, query, &keys, depth);
    }

    fn start_output(&self, k: &mut Builder, cta: &Cta) {
        let address = self.values.tile(k);
        let values = cta.shared.value.by_columns(k, address);
        self.output.start_adding_product(k, &self.weights, &values);
    }

    /// Where the scores of a lane stand.
    fn score_places(&self, k: &mut Builder, work: &Work) -> ScorePlaces {
        let column = k.shl(self.position.member, 1u32);
        let column = k.reinterpret::<U32, S32>(column);
        let last_row = k.sub(work.row_count, 1u32);
        let first = k.add(work.first_row, self.row);
        let position = work.position(k, first);
        let rows = (0..LANE_ROWS).map(|row| {
            let row = k.add(first, row * ROW_STEP);
            k.min(row, last_row)
        });
        let rows = rows.collect();
        let last_key = k.sub(work.key_length, 1i32);
        ScorePlaces { rows, position, column, last_key }
    }
}

/// What the work on every tile of keys needs.
struct Step<'a> {
    cta: &'a Cta,
    work: &'a Work,
    terms: Option<ScoreTerms>,
    added: Option<AddedTerm>,
    places: ScorePlaces,
    mask: KeyMask,
    mask_expression: Option<ExpressionCode>,
    softmax: OnlineSoftmax,
    /// What came of the last tile.
    raised: Raised,
    key_tiles: KeyTiles,
}

impl Step<'_> {
    fn apply_terms(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        if let Some(terms) = &self.terms {
            k.section("score terms", |k| terms.apply(k, scores, &self.places, first_key));
        }
        if let Some(added) = &self.added {
            k.section("score terms", |k| {
                let config = self.cta.config;
                let key = k.add(first_key, self.places.column);
                let span = self.work.tile_span(k, config.tile_m(), first_key, config.tile_n);
                added.apply(k, scores, key, span);
            });
        }
    }

    /// Whether a tile that begins at a key has few keys, and how many these are at most: of those that an expression leaves the
    /// last may have but some.
    fn few_keys(&self, k: &mut Builder, first_key: Reg<S32>) -> Option<(Reg<Pred>, u32)> {
        let few = (self.cta.config.tile_n / 2).next_multiple_of(PRODUCT_DEPTH);
        self.work.specialization.mask_mod.map(|_| {
            let left = k.sub(self.work.key_length, first_key);
            (k.compare(Compare::Le, left, few as i32), few)
        })
    }

    /// The masks of a tile that may be cut. Most often no row attends any of its keys from one on, and all attend the others,
    /// of which the expression need not be asked.
    fn apply_masks_where_cut(&self, k: &mut Builder, scores: &Accumulator, tile: Reg<S32>, first_key: Reg<S32>) {
        let cut = self.key_tiles.is_cut(k, tile);
        k.if_uniform(cut, |k| {
            k.section("mask", |k| match self.key_tiles.is_cut_by_expression(k, tile) {
                Some(is_cut) => {
                    self.mask.apply_where_cut(k, scores, first_key, self.cta.config.tile_n);
                    k.if_uniform(is_cut, |k| self.apply_expression(k, scores, first_key));
                }
                None => self.mask.apply(k, scores, first_key),
            });
        });
    }

    /// The masks of a tile that is cut.
    fn apply_masks(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        k.section("mask", |k| {
            if self.mask_expression.is_some() {
                self.mask.apply_where_cut(k, scores, first_key, self.cta.config.tile_n);
                self.apply_expression(k, scores, first_key);
            } else {
                self.mask.apply(k, scores, first_key);
            }
        });
    }

    /// Takes out what an expression says, of a few keys at a time, since registers are few.
    fn apply_expression(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        let Some(expression) = &self.mask_expression else { return };
        let key = k.add(first_key, self.places.column);
        for (part, scores) in (0..).zip(scores.parts(KEYS_AT_ONCE)) {
            let key = k.add(key, part * KEYS_AT_ONCE as i32);
            expression.read_tile(k, &scores, key).mask(k, &scores);
        }
    }
}

/// Which keys the rows of a lane attend.
fn key_mask(work: &Work, places: &ScorePlaces) -> KeyMask {
    let Work { parameters, specialization, key_length, .. } = *work;
    KeyMask {
        position: places.position,
        others: Vec::new(),
        column: places.column,
        left: specialization.left.then_some(parameters.window_left),
        right: specialization.right.then_some(parameters.window_right),
        key_length,
        rows: LANE_ROWS,
    }
}

/// The turns that warpgroups take: each waits for the one before it.
#[derive(Debug, Clone, Copy)]
struct Turns {
    /// At what.
    at: WarpScheduler,
    /// The barriers at which this warpgroup waits, and the next one does; where turns are taken.
    barriers: Option<(Reg<U32>, Reg<U32>)>,
    warpgroup: Option<Reg<U32>>,
    warpgroups: u32,
}

/// Threads that meet at a turn: those of the warpgroup that waits, and of the one that passes.
const TURN_THREADS: u32 = 2 * WARPGROUP;

impl Turns {
    fn new(k: &mut Builder, at: WarpScheduler, warpgroup: Reg<U32>, warpgroups: u32) -> Self {
        let warpgroup = (at != WarpScheduler::Free && warpgroups > 1).then_some(warpgroup);
        let barriers = warpgroup.map(|warpgroup| {
            let own = k.add(warpgroup, FIRST_TURN);
            let is_last = k.compare(Compare::Eq, warpgroup, warpgroups - 1);
            let next = k.add(own, 1u32);
            (own, k.select(is_last, FIRST_TURN, next))
        });
        Self { at, barriers, warpgroup, warpgroups }
    }

    /// The last lets the first begin.
    fn begin(&self, k: &mut Builder) {
        if let (Some(warpgroup), Some((_, next))) = (self.warpgroup, self.barriers) {
            let is_last = k.compare(Compare::Eq, warpgroup, self.warpgroups - 1);
            k.if_uniform(is_last, |k| k.barrier_arrive(next, TURN_THREADS));
        }
    }

    /// Waits for the turn, if it is for this that turns are taken.
    fn wait(&self, k: &mut Builder, what: WarpScheduler) {
        if let (true, Some((own, _))) = (self.at == what, self.barriers) {
            k.barrier_sync(own, TURN_THREADS);
        }
    }

    /// Passes it on.
    fn pass(&self, k: &mut Builder, what: WarpScheduler) {
        if let (true, Some((_, next))) = (self.at == what, self.barriers) {
            k.barrier_arrive(next, TURN_THREADS);
        }
    }

    /// The first takes the turn that the last has passed on to it.
    fn end(&self, k: &mut Builder) {
        if let (Some(warpgroup), Some((own, _))) = (self.warpgroup, self.barriers) {
            let is_first = k.compare(Compare::Eq, warpgroup, 0u32);
            k.if_uniform(is_first, |k| k.barrier_sync(own, TURN_THREADS));
        }
    }
}
