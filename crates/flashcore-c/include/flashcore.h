/*
 * flashcore: fused attention on NVIDIA GPUs and on the CPU.
 *
 * Generated from crates/flashcore-c/src by cbindgen; change it there. `cargo test -p flashcore-c` compares, and
 * FLASHCORE_BLESS=1 cargo test -p flashcore-c writes it anew.
 *
 *     flashcore_attention_problem_t problem;
 *     flashcore_attention_problem_init(&problem, 1, 8, 1024, 64, FLASHCORE_DTYPE_F16);
 *     problem.mask = FLASHCORE_MASK_CAUSAL;
 *     flashcore_plan_t *plan;
 *     if (flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_CUDA, 0, NULL, &plan) != FLASHCORE_OK)
 *         puts(flashcore_last_error());
 *     flashcore_tensor_t tensors[] = {
 *         {FLASHCORE_QUERY, FLASHCORE_DTYPE_F16, query, bytes, {0}},
 *         {FLASHCORE_KEY, FLASHCORE_DTYPE_F16, key, bytes, {0}},
 *         {FLASHCORE_VALUE, FLASHCORE_DTYPE_F16, value, bytes, {0}},
 *         {FLASHCORE_OUTPUT, FLASHCORE_DTYPE_F16, output, bytes, {0}},
 *     };
 *     flashcore_launch(plan, stream, tensors, 4);
 *
 * A problem is everything about a computation except the numbers in its tensors. A plan is a problem on a device. A call
 * runs or launches a plan on a list of tensors: flashcore_run() on the host's memory, flashcore_launch() on a GPU's.
 *
 * The interface is frozen at 1.0: from then on nothing here changes or goes away, and what is new has new names. Until then
 * a program is compiled with the header of its library; struct_size of a problem is checked.
 *
 * Every function may be called from any thread, and one plan by many at once: plans do not change. A plan may be launched
 * on any streams at once; see flashcore_launch() for what it keeps for each. A plan is destroyed when no thread is about to
 * use it: a call with a plan that is gone is an error, and not a crash.
 *
 * Functions that return a flashcore_status_t return FLASHCORE_OK, which is 0, or the kind of failure;
 * flashcore_last_error() has the words, with the argument, its value and what is allowed.
 *
 * A forked process can use the CPU, with plans of its parent or its own. CUDA does not survive a fork: where the parent has
 * used it, what asks for a GPU returns FLASHCORE_NO_DEVICE in the child.
 */

#ifndef FLASHCORE_H
#define FLASHCORE_H

#include <stdint.h>

/* The version of this header; flashcore_version() is that of the library. */
#define FLASHCORE_VERSION_MAJOR 0
#define FLASHCORE_VERSION_MINOR 1
#define FLASHCORE_VERSION_PATCH 0
/* For comparisons: 0.1.0 is 100, 1.2.3 is 10203. */
#define FLASHCORE_VERSION_NUMBER (FLASHCORE_VERSION_MAJOR * 10000 + FLASHCORE_VERSION_MINOR * 100 + FLASHCORE_VERSION_PATCH)
#define FLASHCORE_VERSION "0.1.0"

/* The operands of operations, for flashcore_tensor_t. */
// The query, query_heads by query_length by head_dim. An append without it transforms the query output.
#define FLASHCORE_QUERY 1

// The key, key_heads by key_length by head_dim.
#define FLASHCORE_KEY 2

// The value, key_heads by key_length by value_dim.
#define FLASHCORE_VALUE 3

// The output, query_heads by query_length by value_dim.
#define FLASHCORE_OUTPUT 4

// The log-sum-exp (LSE) of each row, contiguous [batch, query head, query row]; with cu_seqlens_q, [query head, row of
// all sequences].
#define FLASHCORE_LSE 5

// Where the query rows of each sequence begin among those of all, and where the last ends (varlen).
#define FLASHCORE_CU_SEQLENS_Q 6

// Where the keys of each sequence begin among those of all, and where the last ends (varlen).
#define FLASHCORE_CU_SEQLENS_K 7

// Query rows of each sequence; the rows after them are neither read nor written.
#define FLASHCORE_SEQUSED_Q 8

// Keys of each sequence, at most key_length; for attention with an append, those before it (cache_seqlens).
#define FLASHCORE_SEQUSED_K 9

// Keys at the beginning of each sequence that are padding. They count in seqused_k.
#define FLASHCORE_LEFTPAD_K 10

// The batch of the KV cache, or the row of the page table, of each sequence.
#define FLASHCORE_KV_BATCH_IDX 11

// The pages of each sequence. Entries past its last key may hold anything.
#define FLASHCORE_PAGE_TABLE 12

// One slope per query head.
#define FLASHCORE_ALIBI_SLOPES 13

// One sink per query head.
#define FLASHCORE_SINKS 14

// The floats that score_mod and mask_mod read.
#define FLASHCORE_AUX_F32 15

// The integers that score_mod and mask_mod read.
#define FLASHCORE_AUX_I32 16

// The bias that is added to the scores.
#define FLASHCORE_BIAS 17

// The scale of an FP8 query: the number that its codes are multiplied by (q_descale).
#define FLASHCORE_Q_SCALE 18

// The scale of an FP8 key: the number that its codes are multiplied by (k_descale).
#define FLASHCORE_K_SCALE 19

// The scale of an FP8 value: the number that its codes are multiplied by (v_descale).
#define FLASHCORE_V_SCALE 20

// The keys that are appended.
#define FLASHCORE_NEW_KEY 21

// The values that are appended.
#define FLASHCORE_NEW_VALUE 22

// The slot of each new key and value: page times page size plus row. -1 skips it.
#define FLASHCORE_SLOT_MAPPING 23

// The position of each token, for the rotary embedding.
#define FLASHCORE_POSITIONS 24

// Where the new keys of each sequence begin among those of all, and where the last ends.
#define FLASHCORE_CU_SEQLENS_K_NEW 25

// The position at which each sequence starts, instead of its keys before the append.
#define FLASHCORE_ROTARY_SEQLENS 26

// Cosines of the rotary embedding, [max_position, dim / 2].
#define FLASHCORE_COS 27

// Sines of the rotary embedding, [max_position, dim / 2].
#define FLASHCORE_SIN 28

// Weights of the norm of the query, one for each column.
#define FLASHCORE_QUERY_NORM 29

// Weights of the norm of the new keys, one for each column.
#define FLASHCORE_KEY_NORM 30

// The key cache, which new keys are written to.
#define FLASHCORE_KEY_CACHE 31

// The value cache, which new values are written to.
#define FLASHCORE_VALUE_CACHE 32

// The query after norm and rotary embedding; where no query is given, before it too.
#define FLASHCORE_QUERY_OUTPUT 33

// The outputs of partial results, in the order in which they are merged.
#define FLASHCORE_PART_OUTPUTS 34

// The log-sum-exp of partial results, f32.
#define FLASHCORE_PART_LSES 35

// Attention; the problem is a flashcore_attention_problem_t.
#define FLASHCORE_OPERATION_ATTENTION 1

// Attention over more keys, merged into an output and an LSE that are given: those of attention over other keys, or the
// start, an output of 0 and an LSE of minus infinity. The problem is a flashcore_attention_problem_t of the new keys; its
// lse must be 1, and its lse_without_sink 0 with sinks. A sink counts each time, so it belongs to one of the plans. Output
// and LSE are read and replaced; rows that no sequence has stay as they are.
#define FLASHCORE_OPERATION_CONTINUE 2

// An append to a paged KV cache by slots; the problem is a flashcore_append_problem_t.
#define FLASHCORE_OPERATION_APPEND 3

// Attention with a growing KV cache; the problem is a flashcore_kvcache_problem_t.
#define FLASHCORE_OPERATION_KVCACHE 4

// A merge of partial results; the problem is a flashcore_merge_problem_t.
#define FLASHCORE_OPERATION_MERGE 5

// IEEE half precision.
#define FLASHCORE_DTYPE_F16 1

// bfloat16.
#define FLASHCORE_DTYPE_BF16 2

// IEEE single precision.
#define FLASHCORE_DTYPE_F32 3

// IEEE double precision.
#define FLASHCORE_DTYPE_F64 4

// FP8: 4 exponent bits, 3 mantissa bits, up to 448, no infinity (OCP e4m3fn).
#define FLASHCORE_DTYPE_E4M3 5

// FP8: 5 exponent bits, 2 mantissa bits, up to 57344 (OCP e5m2).
#define FLASHCORE_DTYPE_E5M2 6

// Integers of 32 bits, signed or unsigned: lengths, offsets, page tables.
#define FLASHCORE_DTYPE_I32 7

// Integers of 64 bits: slots.
#define FLASHCORE_DTYPE_I64 8

// Every row attends every key.
#define FLASHCORE_MASK_NONE 0

// Rows attend the keys up to and including their own position.
#define FLASHCORE_MASK_CAUSAL 1

// Rows attend the keys from window_left before to window_right after their own position, both included.
#define FLASHCORE_MASK_WINDOW 2

// Row i stands at key i, as in PyTorch's is_causal.
#define FLASHCORE_ALIGNMENT_TOP_LEFT 0

// Row i stands at key i + key_length - query_length, as in FlashAttention and in decoding with a cache.
#define FLASHCORE_ALIGNMENT_BOTTOM_RIGHT 1

// Contiguous [batch, head, row, column], as in PyTorch.
#define FLASHCORE_LAYOUT_BHSD 0

// Contiguous [batch, row, head, column], as in FlashAttention.
#define FLASHCORE_LAYOUT_BSHD 1

// Query, key and value of one row side by side; output as in BSHD.
#define FLASHCORE_LAYOUT_PACKED_QKV 2

// The strides of the problem.
#define FLASHCORE_LAYOUT_STRIDED 3

// Natural logarithms: FlashAttention, cuDNN, PyTorch, flashcore.
#define FLASHCORE_LSE_NATURAL 0

// Logarithms of base 2: FlashInfer.
#define FLASHCORE_LSE_BASE_2 1

// No rotary embedding.
#define FLASHCORE_ROTARY_NONE 0

// Columns i and i + dim / 2 make a pair (GPT-NeoX; rotary_interleaved=False).
#define FLASHCORE_ROTARY_NEOX 1

// Columns 2 i and 2 i + 1 make a pair (GPT-J; rotary_interleaved=True).
#define FLASHCORE_ROTARY_GPTJ 2

// In the place of an operand: device memory that the kernels of a launch use among themselves, of
// flashcore_plan_workspace_bytes() bytes at least, 16-byte aligned. It is used by nobody else until the launch has
// finished, or while a graph of it is executed. Without it a launch takes the workspace of the stream, which a captured
// launch does not have. A run takes none.
#define FLASHCORE_WORKSPACE -1

// In the place of an operand: no tensor, but the tokens of a launch, in `bytes`, at most those of the problem of an append
// or a merge. Without it they are those of the problem.
#define FLASHCORE_TOKENS -2

// The CPU; the ordinal is ignored.
#define FLASHCORE_DEVICE_CPU 0

// The GPU of the ordinal, from 0.
#define FLASHCORE_DEVICE_CUDA 1

// The first GPU that can be used, else the CPU; the ordinal is ignored. flashcore_plan_describe() says which it is.
#define FLASHCORE_DEVICE_BEST 2

// A problem on a device, ready to be run any number of times, by any number of threads at once.
typedef struct flashcore_plan_t flashcore_plan_t;

// Success, or the kind of failure; flashcore_last_error() has the message.
typedef int32_t flashcore_status_t;

// The beginning of every problem. The functions that fill a problem fill it.
typedef struct flashcore_problem_t {
  // FLASHCORE_OPERATION_*, which says what struct it is.
  int32_t operation;
  // sizeof that struct of the caller; it must be that of the library.
  uint32_t struct_size;
} flashcore_problem_t;

// Distances in elements between neighbours of each dimension. Neighbouring columns are always adjacent.
typedef struct flashcore_strides_t {
  // From one batch to the next; in the caches of an append, from one page to the next.
  uint64_t batch;
  // From one head to the next.
  uint64_t head;
  // From one row of the sequence, or one token, to the next.
  uint64_t row;
} flashcore_strides_t;

// Attention: everything about it except the numbers in its tensors. Begin with flashcore_attention_problem_init() and
// change fields. A field of a feature that is off stays 0.
typedef struct flashcore_attention_problem_t {
  // FLASHCORE_OPERATION_ATTENTION, or FLASHCORE_OPERATION_CONTINUE.
  struct flashcore_problem_t base;
  // Batches, or sequences.
  uint64_t batch;
  // Heads of query and output.
  uint64_t query_heads;
  // Heads of key and value; query_heads must be a multiple of it.
  uint64_t key_heads;
  // Rows of query and output; with cu_seqlens_q or seqused_q, the most that a sequence may have.
  uint64_t query_length;
  // Rows of key and value; with cu_seqlens_k, seqused_k or page_table, the most that a sequence may have.
  uint64_t key_length;
  // Columns of query and key.
  uint64_t head_dim;
  // Columns of value and output.
  uint64_t value_dim;
  // Factor of the products of query and key; used in f32 unless dtype is FLASHCORE_DTYPE_F64.
  double scale;
  // FLASHCORE_DTYPE_*: the elements of the query, and of key, value and output unless kv_dtype or out_dtype say.
  int32_t dtype;
  // FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of key and value, a KV cache in FP8; 0 for dtype.
  int32_t kv_dtype;
  // FLASHCORE_DTYPE_F16 or FLASHCORE_DTYPE_BF16: the elements of the output where dtype is FLASHCORE_DTYPE_E4M3.
  int32_t out_dtype;
  // FLASHCORE_LAYOUT_*.
  int32_t layout;
  // FLASHCORE_MASK_*.
  int32_t mask;
  // FLASHCORE_ALIGNMENT_*: where a row stands among the keys, for masks.
  int32_t alignment;
  // Keys attended before the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit. A "sliding window of w"
  // that counts the row itself is w - 1 here.
  int64_t window_left;
  // Keys attended after the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit.
  int64_t window_right;
  // score = softcap * tanh(score / softcap).
  float softcap;
  // 1 if there is a slope per query head, subtracted for every position of distance.
  int32_t alibi;
  // 1 if there is a sink per query head: one more score in the denominator.
  int32_t sinks;
  // 1 if there is a bias that is added to the scores.
  int32_t bias;
  // 1 if the log-sum-exp of each row is wanted.
  int32_t lse;
  // FLASHCORE_LSE_*: the base of the log-sum-exp.
  int32_t lse_base;
  // 1 if the log-sum-exp leaves the sink out: that of the keys alone.
  int32_t lse_without_sink;
  // 1 if the query rows of all sequences are packed into one batch of total_q rows (varlen). Query and output are then
  // tensors of one batch: FLASHCORE_LAYOUT_BSHD is [total_q, head, column].
  int32_t cu_seqlens_q;
  // 1 if the keys of all sequences are packed into one batch of total_k rows (varlen).
  int32_t cu_seqlens_k;
  // 1 if each sequence has a number of query rows of its own, at most query_length.
  int32_t seqused_q;
  // 1 if each sequence has a number of keys of its own, at most key_length.
  int32_t seqused_k;
  // 1 if each sequence begins with padding among its keys.
  int32_t leftpad_k;
  // 1 if each sequence names the batch of the KV cache, or the row of the page table, that it reads.
  int32_t kv_batch_idx;
  // 1 if key and value are num_pages pages of page_size rows each, which a page table gives to the sequences. The batch
  // strides of key and value are then those from page to page.
  int32_t page_table;
  // 1 if an FP8 query has a scale.
  int32_t q_scale;
  // 1 if an FP8 key has a scale.
  int32_t k_scale;
  // 1 if an FP8 value has a scale.
  int32_t v_scale;
  // Rows of query and output in all, for cu_seqlens_q.
  uint64_t total_q;
  // Rows of key and value in all, for cu_seqlens_k.
  uint64_t total_k;
  // Batches of the KV cache, or rows of the page table, for kv_batch_idx.
  uint64_t kv_batch;
  // Rows of a page, for page_table.
  uint64_t page_size;
  // Pages of the cache, for page_table.
  uint64_t num_pages;
  // Entries of a row of the page table, for page_table. table_width * page_size must be at least key_length.
  uint64_t table_width;
  // Entries from one row of the page table to the next, for page_table; 0 for table_width.
  uint64_t table_stride;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t query_strides;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t key_strides;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t value_strides;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t output_strides;
  // The change of each score, an expression like "score + 0.1 * (query - key)", with a terminating zero; null for none.
  // docs/score-mod.md has the language. The text is not needed after the plan is made.
  const char *score_mod;
  // The keys that take part besides those of mask, an expression like "aux_i32[query] == aux_i32[key]"; null for all.
  const char *mask_mod;
  // Entries of the table of floats that score_mod and mask_mod read.
  uint64_t aux_f32;
  // Entries of the table of integers that score_mod and mask_mod read.
  uint64_t aux_i32;
} flashcore_attention_problem_t;

// The rotary embedding of query and new keys.
typedef struct flashcore_rotary_t {
  // FLASHCORE_ROTARY_*.
  int32_t style;
  // FLASHCORE_DTYPE_*: the elements of the tables of cosines and sines, those of the tensors or float.
  int32_t table_dtype;
  // Columns that are rotated: even, at most head_dim.
  uint64_t dim;
  // Rows of the tables. A position outside is an error in the host's memory, and clamped on a GPU.
  uint64_t max_position;
  // Elements from one row of a table to the next; at least dim / 2.
  uint64_t table_stride;
} flashcore_rotary_t;

// An append of new keys and values to a paged KV cache: everything about it except the numbers in its tensors. Begin with
// flashcore_append_problem_init() and change fields.
//
// The key of token t goes to row slot % page_size of page slot / page_size, slot being slot_mapping[t]; so does its value.
// Slot -1 skips a token; any other that the cache does not have is an error in the host's memory, and skipped on
// a GPU. No two tokens may have the same slot.
typedef struct flashcore_append_problem_t {
  // FLASHCORE_OPERATION_APPEND.
  struct flashcore_problem_t base;
  // Tokens; a launch may have fewer.
  uint64_t tokens;
  // Heads of the query; 0 for no query.
  uint64_t query_heads;
  // Heads of key and value.
  uint64_t key_heads;
  // Columns of query and key.
  uint64_t head_dim;
  // Columns of value.
  uint64_t value_dim;
  // Pages of the cache.
  uint64_t num_pages;
  // Rows of a page.
  uint64_t page_size;
  // FLASHCORE_DTYPE_F16, _BF16 or _F32: the elements of all tensors, but for caches with a cache_dtype.
  int32_t dtype;
  // FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of the caches, to which new keys and values are
  // quantized; 0 for dtype.
  int32_t cache_dtype;
  // FLASHCORE_DTYPE_I32 or FLASHCORE_DTYPE_I64: the positions, for rotary.
  int32_t position_dtype;
  // 1 if query and key are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
  int32_t qk_norm;
  // Added to the mean square.
  float norm_eps;
  // 1 if keys have a scale in an FP8 cache; else 0.
  int32_t k_scale;
  // 1 if values have a scale in an FP8 cache; else 0.
  int32_t v_scale;
  // 1 if those scales are computed, one for each row and head of the cache, and written; 0 if they are given.
  int32_t compute_scales;
  // The rotary embedding.
  struct flashcore_rotary_t rotary;
  // Strides of the query; batch is not used.
  struct flashcore_strides_t query_strides;
  // Strides of the query output; batch is not used.
  struct flashcore_strides_t query_output_strides;
  // Strides of the new keys; batch is not used.
  struct flashcore_strides_t key_strides;
  // Strides of the new values; batch is not used.
  struct flashcore_strides_t value_strides;
  // Strides of the key cache.
  struct flashcore_strides_t key_cache_strides;
  // Strides of the value cache.
  struct flashcore_strides_t value_cache_strides;
} flashcore_append_problem_t;

// Attention with a KV cache that grows (flash_attn_with_kvcache): everything about it except the numbers in its tensors.
// Begin with flashcore_kvcache_problem_init() and change fields.
//
// New key i of sequence b goes to row seqused_k[b] + i of the sequence, and is rotated by that position, or by
// rotary_seqlens[b] + i; query row i is rotated by the same position with a causal mask or a window, else by that of row 0.
// The query then attends seqused_k[b] keys and the new ones, less leftpad_k[b]. Two sequences may share pages of keys
// that they have; rows that are appended must belong to one.
typedef struct flashcore_kvcache_problem_t {
  // FLASHCORE_OPERATION_KVCACHE.
  struct flashcore_problem_t base;
  // The attention: its key and value are the caches, and its seqused_k must be 1.
  struct flashcore_attention_problem_t attention;
  // New keys of each sequence; with total_new, the most that a sequence may have.
  uint64_t new_length;
  // Rows of the new keys of all sequences where they are packed into one batch (cu_seqlens_k_new); else 0.
  uint64_t total_new;
  // The rotary embedding.
  struct flashcore_rotary_t rotary;
  // 1 if each sequence says where its positions start; 0 for seqused_k.
  int32_t rotary_seqlens;
  // 1 if query and new keys are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
  int32_t qk_norm;
  // Added to the mean square.
  float norm_eps;
  // 1 if the scales of new keys and values in an FP8 cache (kv_dtype of the attention) are computed, one for each row and
  // head, and written; 0 if they are given.
  int32_t compute_scales;
  // Strides of the new keys.
  struct flashcore_strides_t new_key_strides;
  // Strides of the new values.
  struct flashcore_strides_t new_value_strides;
} flashcore_kvcache_problem_t;

// A merge of partial results of attention over disjoint keys: everything about it except the numbers in its tensors.
// Begin with flashcore_merge_problem_init() and change fields.
//
// A part whose log-sum-exp is infinite, of either sign, is empty, and its output is not looked at. A row of which all
// parts are empty gives output 0 and a log-sum-exp of minus infinity.
typedef struct flashcore_merge_problem_t {
  // FLASHCORE_OPERATION_MERGE.
  struct flashcore_problem_t base;
  // Number of partial results, from 2 to 256.
  uint64_t num_parts;
  // Tokens; a launch may have fewer.
  uint64_t tokens;
  // Heads.
  uint64_t heads;
  // Columns, up to 512.
  uint64_t value_dim;
  // FLASHCORE_DTYPE_F16, _BF16 or _F32: the elements of the outputs of the parts.
  int32_t part_dtype;
  // FLASHCORE_DTYPE_F16, _BF16 or _F32: the elements of the merged output.
  int32_t dtype;
  // FLASHCORE_LSE_*: the base of the logarithms.
  int32_t lse_base;
  // 1 if the merged log-sum-exp is wanted; else 0.
  int32_t lse;
  // Strides of the output of a part; batch is not used.
  struct flashcore_strides_t part_strides;
  // Strides of the log-sum-exp of a part; batch is not used.
  struct flashcore_strides_t part_lse_strides;
  // Strides of the merged output; batch is not used.
  struct flashcore_strides_t output_strides;
  // Strides of the merged log-sum-exp; batch is not used.
  struct flashcore_strides_t lse_strides;
} flashcore_merge_problem_t;

// A tensor of a call: device memory for a launch, the host's for a run.
//
// `strides` are distances in elements of the operands whose strides come with each call, and zeros of all others, whose
// strides are in the problem. A stride of 0 repeats an element. In order:
//
// - FLASHCORE_BIAS: from one batch to the next, query head, query row, key.
// - FLASHCORE_Q_SCALE, FLASHCORE_K_SCALE, FLASHCORE_V_SCALE: from one sequence of the batch to the next, wherever its rows
//   lie; batch of the tensor, or page of a paged cache; row in its batch or page; KV head; query head of those that share
//   a KV head, for the query alone. All 0 is one scale of the tensor, {0, 0, 0, 1} one for each KV head.
// - FLASHCORE_PART_OUTPUTS, FLASHCORE_PART_LSES: from one part to the next. Or each part has an entry, in their order, with
//   zeros; a launch takes no more than two.
typedef struct flashcore_tensor_t {
  // FLASHCORE_QUERY or another operand, FLASHCORE_WORKSPACE, or FLASHCORE_TOKENS.
  int32_t operand;
  // FLASHCORE_DTYPE_*: the type of the elements, which must be that of the plan.
  int32_t dtype;
  // The first element: 16-byte aligned for tensors of the problem's dtype on a GPU, else aligned for its type. Null with
  // 0 bytes is no tensor.
  void *data;
  // Bytes from the first element on, those between rows included; as many as the problem's strides reach, or more.
  uint64_t bytes;
  // Strides of some operands, else zeros.
  uint64_t strides[5];
} flashcore_tensor_t;

// Everything went well.
#define FLASHCORE_OK 0

// An argument is wrong: null, misaligned, too short, out of range. Nothing was done.
#define FLASHCORE_INVALID_ARGUMENT 1

// The arguments are right, and the device does not take the problem. Nothing was done.
#define FLASHCORE_UNSUPPORTED 2

// There is no such device: no driver, no GPU, no GPU of this number, a GPU that is too old, or one that was opened before
// a fork: CUDA does not survive it. The CPU works in forked processes.
#define FLASHCORE_NO_DEVICE 3

// The driver or the GPU failed.
#define FLASHCORE_CUDA_ERROR 4

// There is not enough memory on the GPU.
#define FLASHCORE_OUT_OF_MEMORY 5

// The kernel, as this driver compiles it, gave a wrong result on a small problem and is not used.
#define FLASHCORE_SELF_CHECK_FAILED 6

// The plan was destroyed before, or never created.
#define FLASHCORE_INVALID_PLAN 7

// A bug of flashcore.
#define FLASHCORE_INTERNAL 8

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Message of the last call on this thread that returned a status; empty if it succeeded. Never null.
//
// The pointer stays the same as long as the thread lives, and the text is that of the latest call: a call in the arguments
// of the same printf() is safe. Copy a text to keep it. Other threads must not read it. A message has at most 4095 bytes of
// UTF-8; a longer one is cut between two characters and ends with "...".
const char *flashcore_last_error(void);

// The name of a status, "FLASHCORE_OK" for 0. Never null, valid forever.
const char *flashcore_status_name(flashcore_status_t status);

// Fills a problem with self-attention: as many key heads as query heads, as many keys as queries, scale
// 1 / sqrt(head_dim), contiguous [batch, head, row, column], nothing masked, nothing optional.
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_attention_problem_t that can be written.
flashcore_status_t flashcore_attention_problem_init(struct flashcore_attention_problem_t *problem,
                                                    uint64_t batch,
                                                    uint64_t heads,
                                                    uint64_t length,
                                                    uint64_t head_dim,
                                                    int32_t dtype);

// Fills the problem of an append: contiguous [token, head, column] and [page, row, head, column], values as wide as keys,
// positions of 64 bits, without rotary embedding and norm.
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_append_problem_t that can be written.
flashcore_status_t flashcore_append_problem_init(struct flashcore_append_problem_t *problem,
                                                 uint64_t tokens,
                                                 uint64_t query_heads,
                                                 uint64_t key_heads,
                                                 uint64_t head_dim,
                                                 uint64_t num_pages,
                                                 uint64_t page_size,
                                                 int32_t dtype);

// Fills the problem of a growing KV cache: new_length keys for each sequence of the attention, which is copied, new keys
// and values contiguous [batch, row, head, column], without rotary embedding and norm.
//
// # Safety
//
// `attention` must be null, which is an error, or point to a flashcore_attention_problem_t. `problem` must be null, which
// is an error, or point to a flashcore_kvcache_problem_t that can be written.
flashcore_status_t flashcore_kvcache_problem_init(struct flashcore_kvcache_problem_t *problem,
                                                  const struct flashcore_attention_problem_t *attention,
                                                  uint64_t new_length);

// Fills the problem of a merge: contiguous outputs [token, head, column] of one element type, natural log-sum-exp
// [head, token], the merged one included.
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_merge_problem_t that can be written.
flashcore_status_t flashcore_merge_problem_init(struct flashcore_merge_problem_t *problem,
                                                uint64_t num_parts,
                                                uint64_t tokens,
                                                uint64_t heads,
                                                uint64_t value_dim,
                                                int32_t dtype);

// Makes a plan for a problem of any operation on a device: `&problem.base` of its struct. On a GPU this compiles the
// kernels, or finds them in the cache.
//
// `config` names a GPU kernel config of attention: "ampere" or "scalar" for the default of a kernel, one of
// flashcore_configs(), or any other of that form; null is the best that is known.
//
// # Safety
//
// `problem` must be null, which is an error, or point to the base of a problem of its operation. `config` must be null or
// point to a text with a terminating zero. `plan` must be null, which is an error, or point to a pointer that can be
// written: it becomes the plan, or null if there is none.
flashcore_status_t flashcore_plan_create(const struct flashcore_problem_t *problem,
                                         int32_t device_kind,
                                         int32_t ordinal,
                                         const char *config,
                                         struct flashcore_plan_t **plan);

// Computes tensors in the host's memory, and returns when the outputs are there. On a GPU this copies everything there and
// back: convenient, not fast.
//
// Everything is checked first: types, sizes, lengths, slots, pages, and that nothing that is written overlaps anything
// else; on an error nothing is written. Two overlaps are allowed: the query output of an append may be its query, and the
// value cache may lie among the rows of the key cache.
//
// # Safety
//
// `tensors` must be null, which is an error unless `count` is 0, or point to `count` tensors; what they point to must be
// readable, and writable where the operand is written, for as many bytes as they say.
flashcore_status_t flashcore_run(const struct flashcore_plan_t *plan,
                                 const struct flashcore_tensor_t *tensors,
                                 uint64_t count);

// Puts the kernels of a plan for a GPU on a CUDA stream and returns before they have finished.
//
// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
//
// A plan may be launched by any threads on any streams at once, and a launch can be captured into a CUDA graph. Where
// flashcore_plan_workspace_bytes() is not 0 and there is no FLASHCORE_WORKSPACE, the launch takes that of the stream, which
// all plans share: it is allocated when the stream has none as large, in the place of a smaller one, and from the 33rd
// stream on in the place of another stream's, which waits for the device. A captured launch brings its workspace, or is an
// error: a graph can be executed on any stream, beside anything. Nothing else is allocated, and nothing is waited for.
//
// Types and sizes are checked. Lengths, offsets, pages, slots and positions are read when the kernels run, and clamped or
// skipped where they are out of range; see flashcore_check().
//
// # Safety
//
// `tensors` must be null, which is an error unless `count` is 0, or point to `count` tensors. Until the launch has finished,
// and whenever a graph with it is executed, the device memory that they name must hold as many bytes as they say, nobody
// may write what is read, and nobody may use what is written or the workspace. Of the executable graphs made from one
// captured launch, one may be executed at a time. The plan must not be destroyed before the stream has finished, or before
// a graph with the launch is.
flashcore_status_t flashcore_launch(const struct flashcore_plan_t *plan,
                                    void *stream,
                                    const struct flashcore_tensor_t *tensors,
                                    uint64_t count);

// Reads offsets, lengths, page tables, slots and positions of a launch back from the GPU and checks them, to explain wrong
// results: a launch clamps them, and flashcore_run() checks them. FLASHCORE_INVALID_ARGUMENT if anything is wrong, which
// flashcore_last_error() explains.
//
// They are read in the order of the stream, and this waits for them: a debug aid. It is refused while the stream captures a
// graph. With FLASHCORE_CHECK_LENGTHS=1 in the environment every launch does it first.
//
// # Safety
//
// As for flashcore_launch().
flashcore_status_t flashcore_check(const struct flashcore_plan_t *plan,
                                   void *stream,
                                   const struct flashcore_tensor_t *tensors,
                                   uint64_t count);

// Bytes of device memory that the kernels of a launch use among themselves; 0 on the CPU, and if it is no plan, which
// flashcore_last_error() then says.
uint64_t flashcore_plan_workspace_bytes(const struct flashcore_plan_t *plan);

// Describes a plan: problem, device, kernel, where the kernel came from and how long that took. Null if it is no plan.
// The text is valid until the plan is destroyed.
const char *flashcore_plan_describe(const struct flashcore_plan_t *plan);

// Destroys a plan. Null is nothing to destroy and fine; a plan that was destroyed before is an error.
flashcore_status_t flashcore_plan_destroy(struct flashcore_plan_t *plan);

// The version of the library, like "0.1.0". Never null, valid forever.
const char *flashcore_version(void);

// Names of GPU kernel configs for flashcore_plan_create(), one per line, tested and measured. Never null, valid
// forever.
const char *flashcore_configs(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLASHCORE_H */
