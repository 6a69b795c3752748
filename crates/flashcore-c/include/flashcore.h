/*
 * flashcore: fused attention on NVIDIA GPUs and on the CPU.
 *
 * Generated from crates/flashcore-c/src by cbindgen; change it there. `cargo test -p flashcore-c` compares, and
 * FLASHCORE_BLESS=1 cargo test -p flashcore-c writes it anew.
 *
 *     flashcore_problem_t problem;
 *     flashcore_problem_init(&problem, 1, 8, 1024, 64, FLASHCORE_DTYPE_F16);
 *     problem.mask = FLASHCORE_MASK_CAUSAL;
 *     flashcore_plan_t *plan;
 *     if (flashcore_plan_create(&problem, FLASHCORE_DEVICE_CUDA, 0, &plan) != FLASHCORE_OK)
 *         puts(flashcore_last_error());
 *     else
 *         flashcore_plan_launch(plan, stream, query, key, value, output, NULL);
 *
 * Every function may be called from any thread, and one plan by many at once: plans do not change. A plan may be launched
 * on any streams at once; see flashcore_plan_launch_tensors() for what it keeps for each. Who destroys a plan must know
 * that nobody is about to use it: a call with a plan that is gone is an error, and not a crash.
 *
 * Functions that return a flashcore_status_t return FLASHCORE_OK, which is 0, or the kind of failure;
 * flashcore_last_error() has the words, with the argument, its value and what is allowed.
 *
 * Structs that begin with struct_size grow at their end, where zeros mean that something is off. A struct of an older
 * header is taken as if zeros followed. One of a newer header is taken if what this library does not know is zeros, and
 * refused else.
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

/* The name that flashcore_tensors_t had first. */
#define flashcore_device_tensors_t flashcore_tensors_t

// IEEE half precision.
#define FLASHCORE_DTYPE_F16 0

// bfloat16.
#define FLASHCORE_DTYPE_BF16 1

// IEEE single precision.
#define FLASHCORE_DTYPE_F32 2

// IEEE double precision.
#define FLASHCORE_DTYPE_F64 3

// FP8: 4 exponent bits, 3 mantissa bits, up to 448, no infinity (OCP e4m3fn).
#define FLASHCORE_DTYPE_E4M3 4

// FP8: 5 exponent bits, 2 mantissa bits, up to 57344 (OCP e5m2).
#define FLASHCORE_DTYPE_E5M2 5

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

// The CPU; the ordinal is ignored.
#define FLASHCORE_DEVICE_CPU 0

// The GPU of the ordinal, from 0.
#define FLASHCORE_DEVICE_CUDA 1

// The first GPU that can be used, else the CPU; the ordinal is ignored. flashcore_plan_describe() says which it is.
#define FLASHCORE_DEVICE_BEST 2

// No rotary embedding.
#define FLASHCORE_ROTARY_NONE 0

// Columns i and i + rotary_dim / 2 make a pair (GPT-NeoX; rotary_interleaved=False).
#define FLASHCORE_ROTARY_NEOX 1

// Columns 2 i and 2 i + 1 make a pair (GPT-J; rotary_interleaved=True).
#define FLASHCORE_ROTARY_GPTJ 2

// Natural logarithms: FlashAttention, cuDNN, PyTorch, flashcore.
#define FLASHCORE_LSE_NATURAL 0

// Logarithms of base 2: FlashInfer.
#define FLASHCORE_LSE_BASE_2 1

// An append to a KV cache, ready to be run any number of times, by any number of threads at once.
typedef struct flashcore_append_t flashcore_append_t;

// Attention over more keys that continues from an output and an LSE, ready to be run any number of times, by any number of
// threads at once.
typedef struct flashcore_continue_t flashcore_continue_t;

// Attention with a growing KV cache, ready to be run any number of times, by any number of threads at once.
typedef struct flashcore_kvcache_t flashcore_kvcache_t;

// A merge of partial results, ready to be run any number of times, by any number of threads at once.
typedef struct flashcore_merge_t flashcore_merge_t;

// A problem on a device, ready to be run any number of times, by any number of threads at once.
typedef struct flashcore_plan_t flashcore_plan_t;

// Success, or the kind of failure; flashcore_last_error() has the message.
typedef int32_t flashcore_status_t;

// Distances in elements between neighbours of each dimension. Neighbouring columns are always adjacent.
typedef struct flashcore_strides_t {
  // From one batch to the next.
  uint64_t batch;
  // From one head to the next.
  uint64_t head;
  // From one row of the sequence to the next.
  uint64_t row;
} flashcore_strides_t;

// One attention problem: everything about it except the numbers in its tensors. Begin with flashcore_problem_init()
// and change fields.
typedef struct flashcore_problem_t {
  // sizeof(flashcore_problem_t) of the caller.
  uint64_t struct_size;
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
  // FLASHCORE_MASK_*.
  int32_t mask;
  // FLASHCORE_ALIGNMENT_*: where a row stands among the keys, for masks.
  int32_t alignment;
  // FLASHCORE_LAYOUT_*.
  int32_t layout;
  // Keys attended before the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit. A "sliding window of w"
  // that counts the row itself is w - 1 here.
  int64_t window_left;
  // Keys attended after the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit.
  int64_t window_right;
  // score = softcap * tanh(score / softcap); 0 for no softcap.
  float softcap;
  // 1 if there is a slope per query head, subtracted for every position of distance; else 0.
  int32_t alibi;
  // 1 if there is a sink per query head: one more score in the denominator; else 0.
  int32_t sinks;
  // 1 if there is a bias that is added to the scores; else 0.
  int32_t bias;
  // 1 if each batch has a key length of its own; else 0.
  int32_t seqused_k;
  // 1 if the log-sum-exp of each row is wanted; else 0.
  int32_t lse;
  // Must be 0.
  int64_t reserved;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t query_strides;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t key_strides;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t value_strides;
  // For FLASHCORE_LAYOUT_STRIDED.
  struct flashcore_strides_t output_strides;
  // 1 if the query rows of all sequences are packed into one batch of total_q rows (varlen); else 0. Query and output
  // are then tensors of one batch: FLASHCORE_LAYOUT_BSHD is [total_q, head, column].
  int32_t cu_seqlens_q;
  // 1 if the keys of all sequences are packed into one batch of total_k rows (varlen); else 0.
  int32_t cu_seqlens_k;
  // 1 if each sequence has a number of query rows of its own, at most query_length; else 0.
  int32_t seqused_q;
  // 1 if each sequence begins with padding among its keys; else 0.
  int32_t leftpad_k;
  // 1 if each sequence names the batch of the KV cache, or the row of the page table, that it reads; else 0.
  int32_t kv_batch_idx;
  // 1 if key and value are num_pages pages of page_size rows each, which a page table gives to the sequences; else 0.
  // The batch strides of key and value are then those from page to page.
  int32_t page_table;
  // Rows of query and output in all, for cu_seqlens_q; else 0.
  uint64_t total_q;
  // Rows of key and value in all, for cu_seqlens_k; else 0.
  uint64_t total_k;
  // Batches of the KV cache, or rows of the page table, for kv_batch_idx; else 0.
  uint64_t kv_batch;
  // Rows of a page, for page_table; else 0.
  uint64_t page_size;
  // Pages of the cache, for page_table; else 0.
  uint64_t num_pages;
  // Entries of a row of the page table, for page_table; else 0. table_width * page_size must be at least key_length.
  uint64_t table_width;
  // Entries from one row of the page table to the next, for page_table; 0 for table_width.
  uint64_t table_stride;
  // FLASHCORE_LSE_*: the base of the log-sum-exp.
  int32_t lse_base;
  // 1 if the log-sum-exp leaves the sink out: that of the keys alone; else 0.
  int32_t lse_without_sink;
  // The change of each score, an expression like "score + 0.1 * (query - key)", with a terminating zero; null for none.
  // docs/score-mod.md has the language. The text is not needed after the plan is made.
  const char *score_mod;
  // The keys that take part besides those of mask, an expression like "aux_i32[query] == aux_i32[key]"; null for all.
  const char *mask_mod;
  // Entries of the table of floats that score_mod and mask_mod read; 0 if they read none.
  uint64_t aux_f32;
  // Entries of the table of integers that score_mod and mask_mod read; 0 if they read none.
  uint64_t aux_i32;
  // FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of key and value, a KV cache in FP8; 0 for dtype.
  int32_t kv_dtype;
  // FLASHCORE_DTYPE_F16 or FLASHCORE_DTYPE_BF16: the elements of the output where dtype is FLASHCORE_DTYPE_E4M3; else 0.
  int32_t out_dtype;
  // 1 if an FP8 query has a scale; else 0.
  int32_t q_scale;
  // 1 if an FP8 key has a scale; else 0.
  int32_t k_scale;
  // 1 if an FP8 value has a scale; else 0.
  int32_t v_scale;
  // Must be 0.
  int32_t reserved_scales;
} flashcore_problem_t;

// Distances in elements between neighbours of each dimension of a bias; 0 repeats one element.
typedef struct flashcore_bias_strides_t {
  // From one batch to the next.
  uint64_t batch;
  // From one query head to the next.
  uint64_t head;
  // From one query row to the next.
  uint64_t row;
  // From one key to the next.
  uint64_t key;
} flashcore_bias_strides_t;

// Distances in elements between neighbours of each dimension of a scale of an FP8 tensor; 0 repeats one element. All 0 is
// one scale of the tensor, key_head alone one for each KV head.
typedef struct flashcore_scale_strides_t {
  // From one sequence of the batch to the next, wherever its rows lie.
  uint64_t sequence;
  // From one batch of the tensor to the next; of a paged cache, from one page to the next.
  uint64_t batch;
  // From one row of the tensor to the next, in its batch or page.
  uint64_t row;
  // From one KV head to the next.
  uint64_t key_head;
  // From one query head to the next of those that share a KV head; for the query alone.
  uint64_t query_head;
} flashcore_scale_strides_t;

// The scale of an FP8 tensor, which its codes are multiplied by.
typedef struct flashcore_scale_t {
  // The first of the floats.
  const float *data;
  // Their strides.
  struct flashcore_scale_strides_t strides;
} flashcore_scale_t;

// Addresses of everything that a call reads and writes: device memory for a launch, the host's for a run. Set all of it to
// zero first; operands that the problem does not have stay null.
typedef struct flashcore_tensors_t {
  // sizeof(flashcore_tensors_t) of the caller.
  uint64_t struct_size;
  // The query, of the problem's dtype, 16-byte aligned on a GPU.
  const void *query;
  // The key, of the problem's dtype, 16-byte aligned on a GPU.
  const void *key;
  // The value, of the problem's dtype, 16-byte aligned on a GPU.
  const void *value;
  // The output, of the problem's dtype, 16-byte aligned on a GPU.
  void *output;
  // The log-sum-exp (LSE): one float per row, contiguous [batch, query head, query row]; with cu_seqlens_q,
  // [query head, row of all sequences].
  float *lse;
  // Number of keys of each sequence: one uint32_t per batch. On a GPU one that is larger than the problem's key_length
  // counts as that.
  const uint32_t *seqused_k;
  // ALiBi slopes: one float per query head.
  const float *alibi_slopes;
  // Sinks: one float per query head.
  const float *sinks;
  // The bias: floats.
  const float *bias;
  // Strides of the bias.
  struct flashcore_bias_strides_t bias_strides;
  // Floats that score_mod and mask_mod read.
  const float *aux_f32;
  // Integers that score_mod and mask_mod read.
  const int32_t *aux_i32;
  // flashcore_plan_workspace_bytes() bytes, 16-byte aligned, that nobody else uses until the launch has finished, or
  // while a graph of it is executed; null for the workspace of the stream, which a captured launch does not have, and in
  // a run.
  void *workspace;
  // Where the query rows of each sequence begin among all total_q, and where the last ends: batch + 1 uint32_t, the first
  // 0, none below the one before it.
  const uint32_t *cu_seqlens_q;
  // Where the keys of each sequence begin among all total_k, and where the last ends: batch + 1 uint32_t, like
  // cu_seqlens_q.
  const uint32_t *cu_seqlens_k;
  // Number of query rows of each sequence: one uint32_t per batch. Rows after them are neither read nor written.
  const uint32_t *seqused_q;
  // Number of keys at the beginning of each sequence that are padding: one uint32_t per batch. They count in seqused_k.
  const uint32_t *leftpad_k;
  // The batch of the KV cache, or the row of the page table, of each sequence: one uint32_t per batch, below kv_batch.
  const uint32_t *kv_batch_idx;
  // The page table: int32_t, a row of table_width pages for each sequence, or for each of kv_batch. Entries after the last
  // key of a sequence may hold anything.
  const int32_t *page_table;
  // The scale of an FP8 query.
  struct flashcore_scale_t q_scale;
  // The scale of an FP8 key; written by an append that computes scales.
  struct flashcore_scale_t k_scale;
  // The scale of an FP8 value; written by an append that computes scales.
  struct flashcore_scale_t v_scale;
} flashcore_tensors_t;

// Bytes to be read. Null with 0 bytes means that there are none.
typedef struct flashcore_bytes_t {
  // The first byte, aligned for its elements.
  const void *data;
  // Number of bytes.
  uint64_t bytes;
} flashcore_bytes_t;

// The scale of an FP8 tensor in the host's memory.
typedef struct flashcore_scale_bytes_t {
  // The floats.
  struct flashcore_bytes_t data;
  // Their strides.
  struct flashcore_scale_strides_t strides;
} flashcore_scale_bytes_t;

// Everything that is read, in the host's memory. Operands that the problem does not have stay null.
typedef struct flashcore_inputs_t {
  // sizeof(flashcore_inputs_t) of the caller.
  uint64_t struct_size;
  // The query, of the problem's dtype.
  struct flashcore_bytes_t query;
  // The key, of the problem's dtype.
  struct flashcore_bytes_t key;
  // The value, of the problem's dtype.
  struct flashcore_bytes_t value;
  // ALiBi slopes: one float per query head.
  struct flashcore_bytes_t alibi_slopes;
  // Sinks: one float per query head.
  struct flashcore_bytes_t sinks;
  // The bias: floats.
  struct flashcore_bytes_t bias;
  // Strides of the bias.
  struct flashcore_bias_strides_t bias_strides;
  // Number of keys of each sequence: one uint32_t per batch.
  struct flashcore_bytes_t seqused_k;
  // Floats that score_mod and mask_mod read.
  struct flashcore_bytes_t aux_f32;
  // Integers (int32_t) that score_mod and mask_mod read.
  struct flashcore_bytes_t aux_i32;
  // Where the query rows of each sequence begin among all total_q, and where the last ends: batch + 1 uint32_t, the first
  // 0, none below the one before it.
  struct flashcore_bytes_t cu_seqlens_q;
  // Where the keys of each sequence begin among all total_k, and where the last ends: batch + 1 uint32_t, like
  // cu_seqlens_q.
  struct flashcore_bytes_t cu_seqlens_k;
  // Number of query rows of each sequence: one uint32_t per batch. Rows after them are neither read nor written.
  struct flashcore_bytes_t seqused_q;
  // Number of keys at the beginning of each sequence that are padding: one uint32_t per batch. They count in seqused_k.
  struct flashcore_bytes_t leftpad_k;
  // The batch of the KV cache, or the row of the page table, of each sequence: one uint32_t per batch, below kv_batch.
  struct flashcore_bytes_t kv_batch_idx;
  // The page table: int32_t, a row of table_width pages for each sequence, or for each of kv_batch. Entries after the last
  // key of a sequence may hold anything.
  struct flashcore_bytes_t page_table;
  // The scale of an FP8 query.
  struct flashcore_scale_bytes_t q_scale;
  // The scale of an FP8 key.
  struct flashcore_scale_bytes_t k_scale;
  // The scale of an FP8 value.
  struct flashcore_scale_bytes_t v_scale;
} flashcore_inputs_t;

// Bytes to be written. Null with 0 bytes means that there are none.
typedef struct flashcore_mut_bytes_t {
  // The first byte, aligned for its elements.
  void *data;
  // Number of bytes.
  uint64_t bytes;
} flashcore_mut_bytes_t;

// Everything that is written, in the host's memory. None of it may overlap anything else.
typedef struct flashcore_outputs_t {
  // sizeof(flashcore_outputs_t) of the caller.
  uint64_t struct_size;
  // The output, of the problem's dtype.
  struct flashcore_mut_bytes_t output;
  // The log-sum-exp (LSE): one float per row, contiguous [batch, query head, query row]; with cu_seqlens_q,
  // [query head, row of all sequences]. Null if the problem does not want it.
  struct flashcore_mut_bytes_t lse;
} flashcore_outputs_t;

// An append of new keys and values to a paged KV cache: everything about it except the numbers in its tensors. Begin with
// flashcore_append_problem_init() and change fields.
//
// The key of token t goes to row slot % page_size of page slot / page_size, slot being slot_mapping[t]; so does its value.
// Slot -1 skips a token; any other that the cache does not have is an error in the host's memory, and skipped on
// a GPU. No two tokens may have the same slot.
typedef struct flashcore_append_problem_t {
  // sizeof(flashcore_append_problem_t) of the caller.
  uint64_t struct_size;
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
  // FLASHCORE_ROTARY_*: the rotary embedding of query and key.
  int32_t rotary;
  // Columns that are rotated: even, at most head_dim.
  uint64_t rotary_dim;
  // Rows of the tables of cosines and sines. A position outside is an error in the host's memory, and clamped
  // on a GPU.
  uint64_t max_position;
  // Elements from one row of a table to the next; at least rotary_dim / 2.
  uint64_t table_stride;
  // FLASHCORE_DTYPE_*: the elements of the tables, those of the tensors or float.
  int32_t table_dtype;
  // 32 or 64: bits of a position.
  int32_t position_bits;
  // 1 if query and key are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
  int32_t qk_norm;
  // Added to the mean square.
  float norm_eps;
  // Strides of the query; row is from one token to the next, batch is not used.
  struct flashcore_strides_t query_strides;
  // Strides of the query output.
  struct flashcore_strides_t query_output_strides;
  // Strides of the new keys.
  struct flashcore_strides_t key_strides;
  // Strides of the new values.
  struct flashcore_strides_t value_strides;
  // Strides of the key cache; batch is from one page to the next, row from one row of a page to the next.
  struct flashcore_strides_t key_cache_strides;
  // Strides of the value cache.
  struct flashcore_strides_t value_cache_strides;
  // FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of the caches, to which new keys and values are
  // quantised; 0 for dtype.
  int32_t cache_dtype;
  // 1 if keys have a scale in an FP8 cache; else 0.
  int32_t k_scale;
  // 1 if values have a scale in an FP8 cache; else 0.
  int32_t v_scale;
  // 1 if those scales are computed, one for each row and head of the cache, and written; 0 if they are given.
  int32_t compute_scales;
} flashcore_append_problem_t;

// Addresses of device memory: everything that an append reads and writes. Set all of it to zero first; what the problem
// does not have stays null.
typedef struct flashcore_append_tensors_t {
  // sizeof(flashcore_append_tensors_t) of the caller.
  uint64_t struct_size;
  // New keys.
  const void *key;
  // New values.
  const void *value;
  // The key cache.
  void *key_cache;
  // The value cache; it may lie beside the rows of the key cache.
  void *value_cache;
  // Slot of each token.
  const int64_t *slot_mapping;
  // The query.
  const void *query;
  // The query output; it may be the query, with the same strides.
  void *query_output;
  // Position of each token, int32_t or int64_t.
  const void *positions;
  // Cosines, [max_position, rotary_dim / 2].
  const void *cos;
  // Sines, [max_position, rotary_dim / 2].
  const void *sin;
  // Weights of the norm of the query: head_dim elements.
  const void *query_norm;
  // Weights of the norm of the key: head_dim elements.
  const void *key_norm;
  // Tokens of this launch, at most those of the problem; 0 for as many.
  uint64_t tokens;
  // The scale of keys in an FP8 cache; written where scales are computed.
  struct flashcore_scale_t k_scale;
  // The scale of values in an FP8 cache; written where scales are computed.
  struct flashcore_scale_t v_scale;
} flashcore_append_tensors_t;

// Everything that an append reads, in the host's memory. What the problem does not have stays null.
typedef struct flashcore_append_inputs_t {
  // sizeof(flashcore_append_inputs_t) of the caller.
  uint64_t struct_size;
  // New keys.
  struct flashcore_bytes_t key;
  // New values.
  struct flashcore_bytes_t value;
  // Slot of each token: int64_t.
  struct flashcore_bytes_t slot_mapping;
  // The query; null if the query output holds it.
  struct flashcore_bytes_t query;
  // Position of each token, int32_t or int64_t.
  struct flashcore_bytes_t positions;
  // Cosines.
  struct flashcore_bytes_t cos;
  // Sines.
  struct flashcore_bytes_t sin;
  // Weights of the norm of the query.
  struct flashcore_bytes_t query_norm;
  // Weights of the norm of the key.
  struct flashcore_bytes_t key_norm;
  // The scale of keys in an FP8 cache, where it is given.
  struct flashcore_scale_bytes_t k_scale;
  // The scale of values in an FP8 cache, where it is given.
  struct flashcore_scale_bytes_t v_scale;
} flashcore_append_inputs_t;

// The scale of an FP8 tensor in the host's memory, to be written.
typedef struct flashcore_scale_mut_bytes_t {
  // The floats.
  struct flashcore_mut_bytes_t data;
  // Their strides.
  struct flashcore_scale_strides_t strides;
} flashcore_scale_mut_bytes_t;

// Everything that an append writes, in the host's memory. None of it may overlap anything else.
typedef struct flashcore_append_outputs_t {
  // sizeof(flashcore_append_outputs_t) of the caller.
  uint64_t struct_size;
  // The key cache.
  struct flashcore_mut_bytes_t key_cache;
  // The value cache; null if it lies in the memory of the key cache.
  struct flashcore_mut_bytes_t value_cache;
  // Elements from the first of the key cache to the first of the value cache, where that is null.
  uint64_t value_offset;
  // The query output.
  struct flashcore_mut_bytes_t query;
  // The scales of keys in an FP8 cache, where they are computed.
  struct flashcore_scale_mut_bytes_t k_scale;
  // The scales of values in an FP8 cache, where they are computed.
  struct flashcore_scale_mut_bytes_t v_scale;
} flashcore_append_outputs_t;

// The append before attention with a KV cache that grows (flash_attn_with_kvcache): everything about it except the numbers
// in its tensors. Begin with flashcore_kvcache_problem_init() and change fields.
//
// New key i of sequence b goes to row cache_seqlens[b] + i of the sequence, and is rotated by that position, or by
// rotary_seqlens[b] + i; query row i is rotated by the same position with a causal mask or a window, else by that of row 0.
// The query then attends cache_seqlens[b] keys and the new ones, less leftpad_k[b]. Two sequences may share pages of keys
// that they have; rows that are appended must belong to one.
typedef struct flashcore_kvcache_problem_t {
  // sizeof(flashcore_kvcache_problem_t) of the caller.
  uint64_t struct_size;
  // New keys of each sequence; with total_new, the most that a sequence may have.
  uint64_t new_length;
  // Rows of the new keys of all sequences where they are packed into one batch (cu_seqlens_k_new); else 0.
  uint64_t total_new;
  // FLASHCORE_ROTARY_*: the rotary embedding of query and new keys.
  int32_t rotary;
  // 1 if each sequence says where its positions start; 0 for cache_seqlens.
  int32_t rotary_seqlens;
  // Columns that are rotated: even, at most head_dim.
  uint64_t rotary_dim;
  // Rows of the tables of cosines and sines. A position outside is an error in the host's memory, and clamped
  // on a GPU.
  uint64_t max_position;
  // Elements from one row of a table to the next; at least rotary_dim / 2.
  uint64_t table_stride;
  // FLASHCORE_DTYPE_*: the elements of the tables, those of the tensors or float.
  int32_t table_dtype;
  // 1 if query and new keys are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
  int32_t qk_norm;
  // Added to the mean square.
  float norm_eps;
  // Must be 0.
  int32_t reserved;
  // Strides of the new keys.
  struct flashcore_strides_t new_key_strides;
  // Strides of the new values.
  struct flashcore_strides_t new_value_strides;
  // 1 if the scales of new keys and values in an FP8 cache (kv_dtype of the attention) are computed, one for each row and
  // head, and written; 0 if they are given.
  int32_t compute_scales;
  // Must be 0.
  int32_t reserved_scales;
} flashcore_kvcache_problem_t;

// Addresses of device memory: what attention with a growing KV cache has beside a flashcore_tensors_t. Set all of it
// to zero first; what the problem does not have stays null.
typedef struct flashcore_kvcache_tensors_t {
  // sizeof(flashcore_kvcache_tensors_t) of the caller.
  uint64_t struct_size;
  // New keys.
  const void *new_key;
  // New values.
  const void *new_value;
  // Where the new keys of each sequence begin among all total_new, and where the last ends: batch + 1 uint32_t.
  const uint32_t *cu_seqlens_k_new;
  // Position of the first new key and query row of each sequence.
  const uint32_t *rotary_seqlens;
  // Cosines, [max_position, rotary_dim / 2].
  const void *cos;
  // Sines, [max_position, rotary_dim / 2].
  const void *sin;
  // Weights of the norm of the query: head_dim elements.
  const void *query_norm;
  // Weights of the norm of the key: head_dim elements.
  const void *key_norm;
} flashcore_kvcache_tensors_t;

// Tensors that attention with a growing KV cache reads beside a flashcore_inputs_t, in the host's memory. What the
// problem does not have stays null.
typedef struct flashcore_kvcache_inputs_t {
  // sizeof(flashcore_kvcache_inputs_t) of the caller.
  uint64_t struct_size;
  // Where the new keys of each sequence begin among all total_new, and where the last ends: batch + 1 uint32_t.
  struct flashcore_bytes_t cu_seqlens_k_new;
  // Position of the first new key and query row of each sequence: uint32_t.
  struct flashcore_bytes_t rotary_seqlens;
  // Cosines.
  struct flashcore_bytes_t cos;
  // Sines.
  struct flashcore_bytes_t sin;
  // Weights of the norm of the query.
  struct flashcore_bytes_t query_norm;
  // Weights of the norm of the key.
  struct flashcore_bytes_t key_norm;
} flashcore_kvcache_inputs_t;

// The caches, which are read and written, in the host's memory. None of it may overlap anything else.
typedef struct flashcore_kvcaches_t {
  // sizeof(flashcore_kvcaches_t) of the caller.
  uint64_t struct_size;
  // The key cache.
  struct flashcore_mut_bytes_t key_cache;
  // The value cache; null if it lies in the memory of the key cache.
  struct flashcore_mut_bytes_t value_cache;
  // Elements from the first of the key cache to the first of the value cache, where that is null.
  uint64_t value_offset;
  // The scales of the key cache, where those of new keys are computed.
  struct flashcore_scale_mut_bytes_t k_scale;
  // The scales of the value cache, where those of new values are computed.
  struct flashcore_scale_mut_bytes_t v_scale;
} flashcore_kvcaches_t;

// A merge of partial results of attention over disjoint keys: everything about it except the numbers in its tensors.
// Begin with flashcore_merge_problem_init() and change fields.
//
// A part whose log-sum-exp is infinite, of either sign, is empty, and its output is not looked at. A row of which all
// parts are empty gives output 0 and a log-sum-exp of minus infinity.
typedef struct flashcore_merge_problem_t {
  // sizeof(flashcore_merge_problem_t) of the caller.
  uint64_t struct_size;
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
  // Strides of the output of a part; row is from one token to the next, batch is not used.
  struct flashcore_strides_t part_strides;
  // Strides of the log-sum-exp of a part.
  struct flashcore_strides_t part_lse_strides;
  // Strides of the merged output.
  struct flashcore_strides_t output_strides;
  // Strides of the merged log-sum-exp.
  struct flashcore_strides_t lse_strides;
} flashcore_merge_problem_t;

// Addresses of device memory: everything that a merge reads and writes. Set all of it to zero first.
typedef struct flashcore_merge_tensors_t {
  // sizeof(flashcore_merge_tensors_t) of the caller.
  uint64_t struct_size;
  // Output of the first part.
  const void *part;
  // Log-sum-exp of the first part.
  const float *part_lse;
  // Elements from the output of a part to that of the next.
  uint64_t part_stride;
  // Elements from the log-sum-exp of a part to that of the next.
  uint64_t part_lse_stride;
  // The merged output.
  void *output;
  // The merged log-sum-exp; null if the problem does not want it.
  float *lse;
  // Output of the second of two parts, anywhere; null if part_stride says where the others are.
  const void *second_part;
  // Log-sum-exp of the second of two parts.
  const float *second_part_lse;
  // Tokens of this launch, at most those of the problem; 0 for as many.
  uint64_t tokens;
} flashcore_merge_tensors_t;

// Everything that a merge reads, in the host's memory.
typedef struct flashcore_merge_inputs_t {
  // sizeof(flashcore_merge_inputs_t) of the caller.
  uint64_t struct_size;
  // Output of each part: as many as the problem has parts.
  const struct flashcore_bytes_t *part_outputs;
  // Log-sum-exp of each part: floats.
  const struct flashcore_bytes_t *part_lses;
} flashcore_merge_inputs_t;

// Everything that a merge writes, in the host's memory. None of it may overlap anything else.
typedef struct flashcore_merge_outputs_t {
  // sizeof(flashcore_merge_outputs_t) of the caller.
  uint64_t struct_size;
  // The merged output.
  struct flashcore_mut_bytes_t output;
  // The merged log-sum-exp: floats; null if the problem does not want it.
  struct flashcore_mut_bytes_t lse;
} flashcore_merge_outputs_t;

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
// The function writes the fields of version 0.1, up to output_strides, and their size: a program that was compiled with the
// first header has no room for more. In C and C++ a macro of the same name takes its place and writes all fields; other
// languages call flashcore_problem_init_sized().
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_problem_t that can be written.
flashcore_status_t flashcore_problem_init(struct flashcore_problem_t *problem,
                                          uint64_t batch,
                                          uint64_t heads,
                                          uint64_t length,
                                          uint64_t head_dim,
                                          int32_t dtype);

// Like flashcore_problem_init(), with the fields that came after version 0.1: `struct_size` is sizeof(flashcore_problem_t)
// of the caller. Fields that came later are read only if struct_size reaches that far.
//
// # Safety
//
// `problem` must be null, which is an error, or point to `struct_size` bytes that can be written.
flashcore_status_t flashcore_problem_init_sized(struct flashcore_problem_t *problem,
                                                uint64_t struct_size,
                                                uint64_t batch,
                                                uint64_t heads,
                                                uint64_t length,
                                                uint64_t head_dim,
                                                int32_t dtype);

// Makes a plan for a problem on a device. On a GPU this compiles the kernel, or finds it in the cache.
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_problem_t. `plan` must be null, which is an error,
// or point to a pointer that can be written: it becomes the plan, or null if there is none.
flashcore_status_t flashcore_plan_create(const struct flashcore_problem_t *problem,
                                         int32_t device_kind,
                                         int32_t ordinal,
                                         struct flashcore_plan_t **plan);

// Like flashcore_plan_create(), with a GPU kernel config by name: "ampere" or "scalar" for the default of a kernel, one of
// flashcore_configs(), or any other of that form.
//
// # Safety
//
// As for flashcore_plan_create(). `config` must be null, for the default, or point to a text with a terminating zero.
flashcore_status_t flashcore_plan_create_with_config(const struct flashcore_problem_t *problem,
                                                     int32_t device_kind,
                                                     int32_t ordinal,
                                                     const char *config,
                                                     struct flashcore_plan_t **plan);

// Launches a plan for a GPU on a CUDA stream and returns before it has finished: flashcore_plan_launch_tensors() for
// problems that have no operands but these. Others are refused.
//
// # Safety
//
// As for flashcore_plan_launch_tensors().
flashcore_status_t flashcore_plan_launch(const struct flashcore_plan_t *plan,
                                         void *stream,
                                         const void *query,
                                         const void *key,
                                         const void *value,
                                         void *output,
                                         float *lse);

// Launches a plan for a GPU on a CUDA stream and returns before it has finished, with every operand that a problem can
// have.
//
// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
//
// A plan may be launched by any threads on any streams at once, and a launch can be captured into a CUDA graph. Where
// flashcore_plan_workspace_bytes() is not 0 and the launch brings no workspace, it takes that of the stream, which all plans
// share: it is allocated when the stream has none as large, in the place of a smaller one, and from the 33rd stream on in
// the place of another stream's, which waits for the device. A captured launch brings its workspace, or is an error: a graph
// can be executed on any stream, beside anything.
// Nothing else is allocated, and nothing else is waited for.
//
// # Safety
//
// `tensors` must be null, which is an error, or point to a flashcore_tensors_t. Until the launch has finished, and
// whenever a graph with it is executed, the memory that it names must hold the whole tensors, as far as the problem's
// strides reach, and nobody may write the inputs or use the outputs or a workspace that the launch brings. Of the
// executable graphs made from one captured launch, one may be executed at a time. The plan must not be destroyed before
// the stream has finished, or before a graph with the launch is.
flashcore_status_t flashcore_plan_launch_tensors(const struct flashcore_plan_t *plan,
                                                 void *stream,
                                                 const struct flashcore_tensors_t *tensors);

// Reads offsets, lengths and page tables of a launch back from the GPU and checks them, to explain wrong results: a launch
// clamps them, and flashcore_plan_run_host() checks them. FLASHCORE_INVALID_ARGUMENT if anything is wrong, which
// flashcore_last_error() explains.
//
// They are read in the order of the stream, and this waits for them: a debug aid. It is refused while the stream captures a
// graph. With FLASHCORE_CHECK_LENGTHS=1 in the environment every launch does it first.
//
// # Safety
//
// As for flashcore_plan_launch_tensors().
flashcore_status_t flashcore_plan_check_lengths(const struct flashcore_plan_t *plan,
                                                void *stream,
                                                const struct flashcore_tensors_t *tensors);

// Bytes of device memory that the kernels of a launch use among themselves, for split-KV; 0 without it, on the CPU, and if
// it is no plan, which flashcore_last_error() then says.
uint64_t flashcore_plan_workspace_bytes(const struct flashcore_plan_t *plan);

// Computes attention of tensors in the host's memory, and returns when the outputs are there. On a GPU this copies
// everything there and back: convenient, not fast.
//
// # Safety
//
// `inputs` and `outputs` must be null, which is an error, or point to their structs; what those point to must be
// readable, and writable where it is an output, for as many bytes as they say.
flashcore_status_t flashcore_plan_run_host(const struct flashcore_plan_t *plan,
                                           const struct flashcore_inputs_t *inputs,
                                           const struct flashcore_outputs_t *outputs);

// Like flashcore_plan_run_host(), with the struct of a launch: addresses of the host's memory, without numbers of bytes.
//
// # Safety
//
// `tensors` must be null, which is an error, or point to a flashcore_tensors_t. The memory that it names must hold the
// whole tensors, as far as the problem's strides reach; outputs must be writable.
flashcore_status_t flashcore_plan_run_tensors(const struct flashcore_plan_t *plan,
                                              const struct flashcore_tensors_t *tensors);

// Describes a plan: problem, device, kernel, where the kernel came from and how long that took. Null if it is no plan.
// The text is valid until the plan is destroyed.
const char *flashcore_plan_describe(const struct flashcore_plan_t *plan);

// Destroys a plan. Null is nothing to destroy and fine; a plan that was destroyed before is an error.
flashcore_status_t flashcore_plan_destroy(struct flashcore_plan_t *plan);

// Fills the problem of an append: contiguous [token, head, column] and [page, row, head, column], values as wide as keys,
// without rotary embedding and norm.
//
// The function writes the fields up to value_cache_strides, and their size: a program that was compiled with an older
// header has no room for more. In C and C++ a macro of the same name takes its place and writes all fields; other languages
// call flashcore_append_problem_init_sized().
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

// Like flashcore_append_problem_init(), with all fields: `struct_size` is sizeof(flashcore_append_problem_t) of the caller.
//
// # Safety
//
// `problem` must be null, which is an error, or point to `struct_size` bytes that can be written.
flashcore_status_t flashcore_append_problem_init_sized(struct flashcore_append_problem_t *problem,
                                                       uint64_t struct_size,
                                                       uint64_t tokens,
                                                       uint64_t query_heads,
                                                       uint64_t key_heads,
                                                       uint64_t head_dim,
                                                       uint64_t num_pages,
                                                       uint64_t page_size,
                                                       int32_t dtype);

// Makes a plan for an append on a device. On a GPU this compiles the kernel, or finds it in the cache.
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_append_problem_t. `plan` must be null, which is an
// error, or point to a pointer that can be written: it becomes the plan, or null if there is none.
flashcore_status_t flashcore_append_create(const struct flashcore_append_problem_t *problem,
                                           int32_t device_kind,
                                           int32_t ordinal,
                                           struct flashcore_append_t **plan);

// Launches an append on a CUDA stream and returns before it has finished. Nothing is allocated and nothing is waited for;
// a launch can be captured into a CUDA graph.
//
// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
//
// # Safety
//
// `tensors` must be null, which is an error, or point to a flashcore_append_tensors_t. Until the launch has finished, and
// whenever a graph with it is executed, the memory that it names must hold the whole tensors, as far as the problem's
// strides reach, nobody may write the inputs, and nobody may use the query output or the rows of the caches that are
// written. The plan must not be destroyed before the stream has finished, or before a graph with the launch is.
flashcore_status_t flashcore_append_launch(const struct flashcore_append_t *plan,
                                           void *stream,
                                           const struct flashcore_append_tensors_t *tensors);

// Appends tensors in the host's memory, and returns when the caches are written. On a GPU this copies everything there and
// back: convenient, not fast.
//
// # Safety
//
// `inputs` and `outputs` must be null, which is an error, or point to their structs; what those point to must be
// readable, and writable where it is an output, for as many bytes as they say.
flashcore_status_t flashcore_append_run_host(const struct flashcore_append_t *plan,
                                             const struct flashcore_append_inputs_t *inputs,
                                             const struct flashcore_append_outputs_t *outputs);

// Destroys the plan of an append. Null is nothing to destroy and fine; one that was destroyed before is an error.
flashcore_status_t flashcore_append_destroy(struct flashcore_append_t *plan);

// Fills the append before attention: new_length keys for each sequence of the attention, new keys and values contiguous
// [batch, row, head, column], without rotary embedding and norm.
//
// The function writes the fields up to new_value_strides, and their size: a program that was compiled with an older header
// has no room for more. In C and C++ a macro of the same name takes its place and writes all fields; other languages call
// flashcore_kvcache_problem_init_sized().
//
// # Safety
//
// `attention` must be null, which is an error, or point to a flashcore_problem_t. `problem` must be null, which is an
// error, or point to a flashcore_kvcache_problem_t that can be written.
flashcore_status_t flashcore_kvcache_problem_init(struct flashcore_kvcache_problem_t *problem,
                                                  const struct flashcore_problem_t *attention,
                                                  uint64_t new_length);

// Like flashcore_kvcache_problem_init(), with all fields: `struct_size` is sizeof(flashcore_kvcache_problem_t) of the caller.
//
// # Safety
//
// `attention` must be null, which is an error, or point to a flashcore_problem_t. `problem` must be null, which is an
// error, or point to `struct_size` bytes that can be written.
flashcore_status_t flashcore_kvcache_problem_init_sized(struct flashcore_kvcache_problem_t *problem,
                                                        uint64_t struct_size,
                                                        const struct flashcore_problem_t *attention,
                                                        uint64_t new_length);

// Makes a plan for attention with a growing KV cache on a device. Key and value of the attention are the caches, and its
// seqused_k must be 1. On a GPU this compiles the kernels, or finds them in the cache.
//
// # Safety
//
// `attention` and `problem` must be null, which is an error, or point to their structs. `plan` must be null, which is an
// error, or point to a pointer that can be written: it becomes the plan, or null if there is none.
flashcore_status_t flashcore_kvcache_create(const struct flashcore_problem_t *attention,
                                            const struct flashcore_kvcache_problem_t *problem,
                                            int32_t device_kind,
                                            int32_t ordinal,
                                            struct flashcore_kvcache_t **plan);

// Launches append and attention on a CUDA stream and returns before they have finished. Key and value of `attention` are
// the caches, its seqused_k are the rows that each sequence uses before the append (cache_seqlens), and its workspace, if
// any, has flashcore_kvcache_workspace_bytes(). Nothing is waited for; a launch can be captured into a CUDA graph, and
// workspaces are as for flashcore_plan_launch_tensors().
//
// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
//
// # Safety
//
// `attention` and `tensors` must be null, which is an error, or point to their structs. Until the launch has finished, and
// whenever a graph with it is executed, the memory that they name must hold the whole tensors, as far as the problem's
// strides reach, nobody may write the inputs, and nobody may use the outputs, the rows of the caches that are written, or
// a workspace that the launch brings. The plan must not be destroyed before the stream has finished, or before a graph with
// the launch is.
flashcore_status_t flashcore_kvcache_launch(const struct flashcore_kvcache_t *plan,
                                            void *stream,
                                            const struct flashcore_tensors_t *attention,
                                            const struct flashcore_kvcache_tensors_t *tensors);

// Bytes of device memory that the kernels of a launch use among themselves; 0 on the CPU, and if it is no plan, which
// flashcore_last_error() then says.
uint64_t flashcore_kvcache_workspace_bytes(const struct flashcore_kvcache_t *plan);

// Appends and attends tensors in the host's memory, and returns when caches and outputs are written. Key and value of
// `attention` are the new ones, and its seqused_k are the rows that each sequence uses before the append (cache_seqlens).
// Everything is checked first: a sequence without room for its new keys is an error, and nothing is written. On a GPU this
// copies everything there and back: convenient, not fast.
//
// # Safety
//
// The pointers must be null, which is an error, or point to their structs; what those point to must be readable, and
// writable where it is a cache or an output, for as many bytes as they say.
flashcore_status_t flashcore_kvcache_run_host(const struct flashcore_kvcache_t *plan,
                                              const struct flashcore_inputs_t *attention,
                                              const struct flashcore_kvcache_inputs_t *inputs,
                                              const struct flashcore_kvcaches_t *caches,
                                              const struct flashcore_outputs_t *outputs);

// Like flashcore_kvcache_run_host(), with the structs of a launch: addresses of the host's memory, without numbers of bytes.
// As in a launch, key and value of `attention` are the caches, here each in memory of its own.
//
// # Safety
//
// `attention` and `tensors` must be null, which is an error, or point to their structs. The memory that they name must hold
// the whole tensors, as far as the problem's strides reach; caches and outputs must be writable.
flashcore_status_t flashcore_kvcache_run_tensors(const struct flashcore_kvcache_t *plan,
                                                 const struct flashcore_tensors_t *attention,
                                                 const struct flashcore_kvcache_tensors_t *tensors);

// Destroys a plan of attention with a growing KV cache. Null is nothing to destroy and fine; one that was destroyed before
// is an error.
flashcore_status_t flashcore_kvcache_destroy(struct flashcore_kvcache_t *plan);

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

// Makes a plan for a merge on a device. On a GPU this compiles the kernel, or finds it in the cache.
//
// # Safety
//
// `problem` must be null, which is an error, or point to a flashcore_merge_problem_t. `plan` must be null, which is an
// error, or point to a pointer that can be written: it becomes the plan, or null if there is none.
flashcore_status_t flashcore_merge_create(const struct flashcore_merge_problem_t *problem,
                                          int32_t device_kind,
                                          int32_t ordinal,
                                          struct flashcore_merge_t **plan);

// Launches a merge on a CUDA stream and returns before it has finished. Nothing is allocated and nothing is waited for; a
// launch can be captured into a CUDA graph.
//
// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
//
// # Safety
//
// `tensors` must be null, which is an error, or point to a flashcore_merge_tensors_t. Until the launch has finished, and
// whenever a graph with it is executed, the memory that it names must hold the whole tensors, as far as the problem's
// strides reach, and nobody may write the parts or use the outputs. The plan must not be destroyed before the stream has
// finished, or before a graph with the launch is.
flashcore_status_t flashcore_merge_launch(const struct flashcore_merge_t *plan,
                                          void *stream,
                                          const struct flashcore_merge_tensors_t *tensors);

// Merges tensors in the host's memory, and returns when the outputs are there. On a GPU this copies everything there and
// back: convenient, not fast.
//
// # Safety
//
// `inputs` and `outputs` must be null, which is an error, or point to their structs; the arrays of parts must have as many
// entries as the problem has parts, and what all of them point to must be readable, and writable where it is an output,
// for as many bytes as they say.
flashcore_status_t flashcore_merge_run_host(const struct flashcore_merge_t *plan,
                                            const struct flashcore_merge_inputs_t *inputs,
                                            const struct flashcore_merge_outputs_t *outputs);

// Destroys the plan of a merge. Null is nothing to destroy and fine; one that was destroyed before is an error.
flashcore_status_t flashcore_merge_destroy(struct flashcore_merge_t *plan);

// Makes a plan for attention over more keys, merged into an output and an LSE that are given: those of attention over other
// keys, or the start, an output of 0 and an LSE of minus infinity. The problem is that of the new keys; its lse must be 1,
// and its lse_without_sink 0 with sinks. A sink counts each time, so it belongs to one of the plans.
//
// # Safety
//
// As for flashcore_plan_create().
flashcore_status_t flashcore_continue_create(const struct flashcore_problem_t *problem,
                                             int32_t device_kind,
                                             int32_t ordinal,
                                             struct flashcore_continue_t **plan);

// Launches attention and the merge on a CUDA stream and returns before they have finished. tensors.output and tensors.lse
// are read and replaced; rows that no sequence has stay as they are. Otherwise like flashcore_plan_launch_tensors(), with
// the workspace of flashcore_continue_workspace_bytes().
//
// # Safety
//
// As for flashcore_plan_launch_tensors().
flashcore_status_t flashcore_continue_launch(const struct flashcore_continue_t *plan,
                                             void *stream,
                                             const struct flashcore_tensors_t *tensors);

// Bytes of device memory that a launch uses: for the output and LSE of the new keys, and for what attention needs; 0 on the
// CPU, and if it is no plan, which flashcore_last_error() then says.
uint64_t flashcore_continue_workspace_bytes(const struct flashcore_continue_t *plan);

// Attends tensors in the host's memory and merges the result into outputs, which are read and replaced. On a GPU this copies
// everything there and back: convenient, not fast.
//
// # Safety
//
// As for flashcore_plan_run_host(); the outputs are read too.
flashcore_status_t flashcore_continue_run_host(const struct flashcore_continue_t *plan,
                                               const struct flashcore_inputs_t *inputs,
                                               const struct flashcore_outputs_t *outputs);

// Like flashcore_continue_run_host(), with the struct of a launch: addresses of the host's memory, without numbers of bytes.
//
// # Safety
//
// As for flashcore_plan_run_tensors(); the outputs are read too.
flashcore_status_t flashcore_continue_run_tensors(const struct flashcore_continue_t *plan,
                                                  const struct flashcore_tensors_t *tensors);

// Destroys a plan that continues. Null is nothing to destroy and fine; one that was destroyed before is an error.
flashcore_status_t flashcore_continue_destroy(struct flashcore_continue_t *plan);

// The version of the library, like "0.1.0". Never null, valid forever.
const char *flashcore_version(void);

// Names of GPU kernel configs for flashcore_plan_create_with_config(), one per line, tested and measured. Never null, valid
// forever.
const char *flashcore_configs(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLASHCORE_H */


/* flashcore_problem_init() of a program that is compiled with this header fills all fields of its flashcore_problem_t. */
#define flashcore_problem_init(problem, batch, heads, length, head_dim, dtype) \
  flashcore_problem_init_sized(problem, sizeof(flashcore_problem_t), batch, heads, length, head_dim, dtype)
/* So do those of append and kvcache. */
#define flashcore_append_problem_init(problem, tokens, query_heads, key_heads, head_dim, num_pages, page_size, dtype) \
  flashcore_append_problem_init_sized(problem, sizeof(flashcore_append_problem_t), tokens, query_heads, key_heads, \
                                      head_dim, num_pages, page_size, dtype)
#define flashcore_kvcache_problem_init(problem, attention, new_length) \
  flashcore_kvcache_problem_init_sized(problem, sizeof(flashcore_kvcache_problem_t), attention, new_length)
