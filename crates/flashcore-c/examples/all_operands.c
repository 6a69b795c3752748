/*
 * Every operand that a launch can have, from C: each problem is computed on the CPU by addresses and by bytes, which must
 * give the same bits, and then launched on the first GPU with the same struct, with a workspace of the plan and one of the
 * caller, which must agree with the CPU.
 *
 *     scripts/install-c.sh "$PWD/prefix"
 *     cc -std=c11 -Iprefix/include crates/flashcore-c/examples/all_operands.c -Lprefix/lib -lflashcore -ldl -lm
 *     LD_LIBRARY_PATH=prefix/lib ./a.out
 *
 * Exits with 0 if all is right, 1 if a result is wrong or an operand was not tried, 3 if there is no GPU and the CPU is
 * right, 4 if a call fails.
 */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"
#include "flashcore.h"

enum { BATCH = 3, HEADS = 4, KEY_HEADS = 2, QUERIES = 37, KEYS = 300, DIM = 64, PAGE = 16, FURTHEST = 20 };
enum { POISON = 0x3A }; /* 0.78 in half precision: what is not written stays so in all memories */

/* Where an operand is in the structs; `inputs` is 0 for outputs. */
typedef struct {
    const char *name;
    size_t tensors, inputs;
} operand_t;

#define INPUT(name) {#name, offsetof(flashcore_tensors_t, name), offsetof(flashcore_inputs_t, name)}
#define OUTPUT(name) {#name, offsetof(flashcore_tensors_t, name), 0}
static const operand_t OPERANDS[] = {
    INPUT(query),        INPUT(key),          INPUT(value),     OUTPUT(output),   OUTPUT(lse),       INPUT(cu_seqlens_q),
    INPUT(cu_seqlens_k), INPUT(seqused_q),    INPUT(seqused_k), INPUT(leftpad_k), INPUT(kv_batch_idx), INPUT(page_table),
    INPUT(alibi_slopes), INPUT(sinks),        INPUT(aux_f32),   INPUT(aux_i32),   INPUT(bias),       INPUT(q_scale),
    INPUT(k_scale),      INPUT(v_scale),
};
enum { COUNT = sizeof OPERANDS / sizeof OPERANDS[0] };
enum { QUERY, KEY, VALUE, OUTPUT_OF, LSE, CU_Q, CU_K, USED_Q, USED_K, LEFTPAD, KV_BATCH, PAGES, SLOPES, SINKS, AUX_F32, AUX_I32, BIAS, Q_SCALE, K_SCALE, V_SCALE };
enum { SCALES = 3 };
/* A new operand is a new field: it must be tried here. */
_Static_assert(sizeof(flashcore_tensors_t) == 8 * (1 + COUNT + 4 + 1 + 5 * SCALES), "an operand is missing in this program");

typedef struct {
    flashcore_problem_t problem;
    void *host[COUNT];
    size_t bytes[COUNT];
    flashcore_bias_strides_t bias_strides;
    flashcore_scale_strides_t scale_strides[SCALES];
} case_t;

static int tried[COUNT];
static uint32_t state = 99;

static uint32_t next(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static void *allocate(case_t *c, int operand, size_t bytes)
{
    c->bytes[operand] = bytes;
    c->host[operand] = malloc(bytes);
    if (!c->host[operand])
        fail("malloc", 0);
    return c->host[operand];
}

/* Numbers between -1 and 1 in half precision. */
static void halves(case_t *c, int operand, size_t count)
{
    uint16_t *numbers = allocate(c, operand, 2 * count);
    for (size_t index = 0; index < count; index++) {
        uint32_t bits = next();
        numbers[index] = (uint16_t)((bits & 1) << 15 | (11 + (bits >> 1 & 3)) << 10 | (bits >> 3 & 1023));
    }
}

static void floats(case_t *c, int operand, size_t count)
{
    float *numbers = allocate(c, operand, 4 * count);
    for (size_t index = 0; index < count; index++)
        numbers[index] = (float)next() / 8388608.0f - 1.0f;
}

/* Codes of numbers between -1 and 1. */
static void codes(case_t *c, int operand)
{
    size_t count = c->bytes[operand] / 2;
    free(c->host[operand]);
    uint8_t *numbers = allocate(c, operand, count);
    for (size_t index = 0; index < count; index++) {
        uint32_t bits = next();
        numbers[index] = (uint8_t)((bits & 1) << 7 | (4 + (bits >> 1 & 1)) << 3 | (bits >> 3 & 7));
    }
}

/* Scales from 1/2 to 3/2. */
static void scales(case_t *c, int operand, size_t count, flashcore_scale_strides_t strides)
{
    floats(c, operand, count);
    for (size_t index = 0; index < count; index++)
        ((float *)c->host[operand])[index] = 1.0f + 0.5f * ((float *)c->host[operand])[index];
    c->scale_strides[operand - Q_SCALE] = strides;
}

static void integers(case_t *c, int operand, size_t count, const uint32_t *values)
{
    memcpy(allocate(c, operand, 4 * count), values, 4 * count);
}

/* A problem of [batch, row, head, column] in half precision with a log-sum-exp, and its tensors. */
static case_t begin(uint64_t query_rows, uint64_t key_rows, uint64_t query_length, uint64_t batches)
{
    case_t c;
    memset(&c, 0, sizeof c);
    check("init", flashcore_problem_init(&c.problem, BATCH, HEADS, query_length, DIM, FLASHCORE_DTYPE_F16));
    c.problem.key_heads = KEY_HEADS;
    c.problem.key_length = KEYS;
    c.problem.layout = FLASHCORE_LAYOUT_BSHD;
    c.problem.lse = 1;
    halves(&c, QUERY, query_rows * HEADS * DIM);
    halves(&c, KEY, batches * key_rows * KEY_HEADS * DIM);
    halves(&c, VALUE, batches * key_rows * KEY_HEADS * DIM);
    allocate(&c, OUTPUT_OF, 2 * query_rows * HEADS * DIM);
    allocate(&c, LSE, 4 * query_rows * HEADS);
    return c;
}

static case_t of_scores(void)
{
    case_t c = begin(BATCH * QUERIES, KEYS, QUERIES, BATCH);
    c.problem.mask = FLASHCORE_MASK_CAUSAL;
    c.problem.alibi = c.problem.sinks = c.problem.seqused_k = 1;
    floats(&c, SLOPES, HEADS);
    for (int head = 0; head < HEADS; head++)
        ((float *)c.host[SLOPES])[head] *= 0.02f;
    floats(&c, SINKS, HEADS);
    integers(&c, USED_K, BATCH, (uint32_t[]){KEYS, 129, 77});
    return c;
}

static case_t of_bias(void)
{
    case_t c = begin(BATCH * QUERIES, KEYS, QUERIES, BATCH);
    c.problem.bias = 1;
    floats(&c, BIAS, HEADS * QUERIES * KEYS);
    c.bias_strides = (flashcore_bias_strides_t){0, QUERIES * KEYS, KEYS, 1};
    return c;
}

static case_t of_expressions(void)
{
    case_t c = begin(BATCH * KEYS, KEYS, KEYS, BATCH);
    static char score_mod[64];
    snprintf(score_mod, sizeof score_mod, "relative(%d)", FURTHEST);
    c.problem.score_mod = score_mod;
    c.problem.mask_mod = "documents && query >= key";
    c.problem.aux_f32 = HEADS * (2 * FURTHEST + 1);
    c.problem.aux_i32 = KEYS;
    floats(&c, AUX_F32, c.problem.aux_f32);
    uint32_t documents[KEYS];
    for (uint32_t position = 0; position < KEYS; position++)
        documents[position] = position / 110;
    integers(&c, AUX_I32, KEYS, documents);
    return c;
}

static case_t of_packed_rows(void)
{
    enum { TOTAL_Q = 80, TOTAL_K = 500 };
    case_t c = begin(TOTAL_Q, TOTAL_K, QUERIES, 1);
    c.problem.mask = FLASHCORE_MASK_CAUSAL;
    c.problem.cu_seqlens_q = c.problem.cu_seqlens_k = c.problem.seqused_q = 1;
    c.problem.total_q = TOTAL_Q;
    c.problem.total_k = TOTAL_K;
    integers(&c, CU_Q, BATCH + 1, (uint32_t[]){0, 37, 50, 80});
    integers(&c, CU_K, BATCH + 1, (uint32_t[]){0, 211, 300, 500});
    integers(&c, USED_Q, BATCH, (uint32_t[]){37, 9, 30});
    return c;
}

static case_t of_a_cache(void)
{
    enum { CACHE = 5 };
    case_t c = begin(BATCH * QUERIES, KEYS, QUERIES, CACHE);
    c.problem.mask = FLASHCORE_MASK_CAUSAL;
    c.problem.seqused_k = c.problem.leftpad_k = c.problem.kv_batch_idx = 1;
    c.problem.kv_batch = CACHE;
    integers(&c, USED_K, BATCH, (uint32_t[]){KEYS, 211, 50});
    integers(&c, LEFTPAD, BATCH, (uint32_t[]){0, 17, 3});
    integers(&c, KV_BATCH, BATCH, (uint32_t[]){4, 0, 2});
    return c;
}

static case_t of_pages(void)
{
    enum { WIDTH = (KEYS + PAGE - 1) / PAGE, NUMBER = BATCH * WIDTH + 3 };
    case_t c = begin(BATCH, PAGE, 1, NUMBER);
    c.problem.seqused_k = c.problem.page_table = 1;
    c.problem.page_size = PAGE;
    c.problem.num_pages = NUMBER;
    c.problem.table_width = WIDTH;
    integers(&c, USED_K, BATCH, (uint32_t[]){KEYS, 211, 50});
    uint32_t pages[BATCH * WIDTH];
    for (uint32_t index = 0; index < BATCH * WIDTH; index++)
        pages[index] = (7 * index + 5) % NUMBER;
    integers(&c, PAGES, BATCH * WIDTH, pages);
    return c;
}

static case_t of_a_cache_of_8_bits(void)
{
    case_t c = begin(BATCH * QUERIES, KEYS, QUERIES, BATCH);
    c.problem.mask = FLASHCORE_MASK_CAUSAL;
    c.problem.kv_dtype = FLASHCORE_DTYPE_E4M3;
    c.problem.k_scale = c.problem.v_scale = 1;
    codes(&c, KEY);
    codes(&c, VALUE);
    scales(&c, K_SCALE, KEY_HEADS, (flashcore_scale_strides_t){0, 0, 0, 1, 0});
    scales(&c, V_SCALE, BATCH * KEYS * KEY_HEADS, (flashcore_scale_strides_t){0, KEYS * KEY_HEADS, KEY_HEADS, 1, 0});
    return c;
}

static case_t of_8_bits(void)
{
    case_t c = begin(BATCH * QUERIES, KEYS, QUERIES, BATCH);
    c.problem.dtype = c.problem.kv_dtype = FLASHCORE_DTYPE_E4M3;
    c.problem.out_dtype = FLASHCORE_DTYPE_F16;
    c.problem.q_scale = c.problem.k_scale = c.problem.v_scale = 1;
    for (int operand = QUERY; operand <= VALUE; operand++)
        codes(&c, operand);
    for (int operand = Q_SCALE; operand <= V_SCALE; operand++)
        scales(&c, operand, BATCH * KEY_HEADS, (flashcore_scale_strides_t){KEY_HEADS, 0, 0, 1, 0});
    return c;
}

/* Gives every operand that the problem has its address. */
static flashcore_tensors_t tensors_at(const case_t *c, void *const *addresses)
{
    flashcore_tensors_t tensors;
    memset(&tensors, 0, sizeof tensors);
    tensors.struct_size = sizeof tensors;
    tensors.bias_strides = c->bias_strides;
    for (int operand = 0; operand < COUNT; operand++)
        if (c->bytes[operand])
            memcpy((char *)&tensors + OPERANDS[operand].tensors, &addresses[operand], sizeof(void *));
    tensors.q_scale.strides = c->scale_strides[0];
    tensors.k_scale.strides = c->scale_strides[1];
    tensors.v_scale.strides = c->scale_strides[2];
    return tensors;
}

static double half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, digits = bits & 1023;
    double value = exponent == 0 ? ldexp(digits, -24) : exponent == 31 ? NAN : ldexp(digits + 1024, exponent - 25);
    return bits >> 15 ? -value : value;
}

/* The largest difference of outputs and rows; NaN if one is NaN. */
static double difference(const case_t *c, const void *output, const void *lse)
{
    double largest = 0;
    for (size_t index = 0; index < c->bytes[OUTPUT_OF] / 2; index++) {
        double found = half(((const uint16_t *)output)[index]), expected = half(((uint16_t *)c->host[OUTPUT_OF])[index]);
        if (!(fabs(found - expected) <= largest))
            largest = fabs(found - expected);
    }
    for (size_t index = 0; index < c->bytes[LSE] / 4; index++) {
        double found = ((const float *)lse)[index], expected = ((float *)c->host[LSE])[index];
        if (found != expected && !(fabs(found - expected) <= largest))
            largest = fabs(found - expected);
    }
    return largest;
}

/* On the CPU by addresses, which stays in `host`, and by bytes; true if the bits are the same. */
static int run_on_cpu(case_t *c)
{
    flashcore_plan_t *plan;
    check("create on the CPU", flashcore_plan_create(&c->problem, FLASHCORE_DEVICE_CPU, 0, &plan));
    memset(c->host[OUTPUT_OF], POISON, c->bytes[OUTPUT_OF]);
    memset(c->host[LSE], POISON, c->bytes[LSE]);
    flashcore_tensors_t tensors = tensors_at(c, c->host);
    check("run by addresses", flashcore_plan_run_tensors(plan, &tensors));

    flashcore_inputs_t inputs;
    memset(&inputs, 0, sizeof inputs);
    inputs.struct_size = sizeof inputs;
    inputs.bias_strides = c->bias_strides;
    inputs.q_scale.strides = c->scale_strides[0];
    inputs.k_scale.strides = c->scale_strides[1];
    inputs.v_scale.strides = c->scale_strides[2];
    for (int operand = 0; operand < COUNT; operand++)
        if (OPERANDS[operand].inputs && c->bytes[operand]) {
            flashcore_bytes_t bytes = {c->host[operand], c->bytes[operand]};
            memcpy((char *)&inputs + OPERANDS[operand].inputs, &bytes, sizeof bytes);
        }
    void *output = malloc(c->bytes[OUTPUT_OF]), *lse = malloc(c->bytes[LSE]);
    if (!output || !lse)
        fail("malloc", 0);
    memset(output, POISON, c->bytes[OUTPUT_OF]);
    memset(lse, POISON, c->bytes[LSE]);
    flashcore_outputs_t outputs = {sizeof outputs, {output, c->bytes[OUTPUT_OF]}, {lse, c->bytes[LSE]}};
    check("run by bytes", flashcore_plan_run_host(plan, &inputs, &outputs));
    int is_same = !memcmp(output, c->host[OUTPUT_OF], c->bytes[OUTPUT_OF]) && !memcmp(lse, c->host[LSE], c->bytes[LSE]);
    free(output);
    free(lse);
    check("destroy", flashcore_plan_destroy(plan));
    return is_same;
}

/* On the GPU, with the workspace of the plan and with one of the caller: the larger difference. A GPU that has no kernel for
 * a query of 8 bits refuses it, with the reason. */
static double run_on_gpu(const case_t *c)
{
    flashcore_plan_t *plan;
    int code = flashcore_plan_create(&c->problem, FLASHCORE_DEVICE_CUDA, 0, &plan);
    if (code == FLASHCORE_UNSUPPORTED && c->problem.dtype == FLASHCORE_DTYPE_E4M3) {
        printf("not on this GPU: %s\n", flashcore_last_error());
        return 0;
    }
    check("create on the GPU", code);
    void *stream, *addresses[COUNT] = {NULL};
    check("cuStreamCreate", driver.cuStreamCreate(&stream, 1));
    for (int operand = 0; operand < COUNT; operand++)
        if (c->bytes[operand]) {
            device_address address;
            check("cuMemAlloc", driver.cuMemAlloc_v2(&address, c->bytes[operand]));
            check("cuMemcpyHtoD", driver.cuMemcpyHtoD_v2(address, c->host[operand], c->bytes[operand]));
            addresses[operand] = (void *)(uintptr_t)address;
        }
    flashcore_tensors_t tensors = tensors_at(c, addresses);
    device_address workspace = 0;
    if (flashcore_plan_workspace_bytes(plan))
        check("cuMemAlloc", driver.cuMemAlloc_v2(&workspace, flashcore_plan_workspace_bytes(plan)));
    void *output = malloc(c->bytes[OUTPUT_OF]), *lse = malloc(c->bytes[LSE]);
    if (!output || !lse)
        fail("malloc", 0);
    double largest = 0;
    for (int brings = 0; brings <= (workspace != 0); brings++) {
        device_address written[] = {(device_address)(uintptr_t)tensors.output, (device_address)(uintptr_t)tensors.lse};
        check("cuMemsetD8Async", driver.cuMemsetD8Async(written[0], POISON, c->bytes[OUTPUT_OF], stream));
        check("cuMemsetD8Async", driver.cuMemsetD8Async(written[1], POISON, c->bytes[LSE], stream));
        tensors.workspace = brings ? (void *)(uintptr_t)workspace : NULL;
        check("launch", flashcore_plan_launch_tensors(plan, stream, &tensors));
        check("cuStreamSynchronize", driver.cuStreamSynchronize(stream));
        check("cuMemcpyDtoH", driver.cuMemcpyDtoH_v2(output, written[0], c->bytes[OUTPUT_OF]));
        check("cuMemcpyDtoH", driver.cuMemcpyDtoH_v2(lse, written[1], c->bytes[LSE]));
        double found = difference(c, output, lse);
        if (!(found <= largest))
            largest = found;
    }
    free(output);
    free(lse);
    for (int operand = 0; operand < COUNT; operand++)
        if (addresses[operand])
            check("cuMemFree", driver.cuMemFree_v2((device_address)(uintptr_t)addresses[operand]));
    if (workspace)
        check("cuMemFree", driver.cuMemFree_v2(workspace));
    check("cuStreamDestroy", driver.cuStreamDestroy_v2(stream));
    check("destroy", flashcore_plan_destroy(plan));
    return largest;
}

int main(void)
{
    static const struct {
        const char *name;
        case_t (*make)(void);
    } CASES[] = {
        {"ALiBi, sinks, lengths of keys", of_scores}, {"bias", of_bias},
        {"score_mod, mask_mod", of_expressions},      {"packed rows and keys", of_packed_rows},
        {"batches of a cache, left padding", of_a_cache}, {"pages", of_pages},
        {"a cache of 8 bits", of_a_cache_of_8_bits},  {"a query of 8 bits", of_8_bits},
    };
    int has_gpu = open_driver(), wrong = 0;
    for (size_t index = 0; index < sizeof CASES / sizeof CASES[0]; index++) {
        case_t c = CASES[index].make();
        int is_same = run_on_cpu(&c);
        /* Half precision of outputs up to 1, of weights, and of sums in another order. */
        double found = has_gpu ? run_on_gpu(&c) : 0, allowed = 4e-3;
        /* Weights of 8 bits, which the CPU does not round. */
        if (c.problem.dtype == FLASHCORE_DTYPE_E4M3)
            allowed = 4e-2;
        int is_right = is_same && found <= allowed;
        wrong += !is_right;
        if (has_gpu)
            printf("%s: largest difference %g%s\n", CASES[index].name, found, is_right ? "" : ", WRONG");
        else
            printf("%s: on the CPU by addresses and by bytes%s\n", CASES[index].name, is_right ? "" : ", WRONG");
        for (int operand = 0; operand < COUNT; operand++) {
            tried[operand] |= c.bytes[operand] > 0;
            free(c.host[operand]);
        }
    }
    for (int operand = 0; operand < COUNT; operand++)
        if (!tried[operand]) {
            printf("%s was not tried\n", OPERANDS[operand].name);
            wrong++;
        }
    printf("%d operands, %d wrong\n", COUNT, wrong);
    return wrong ? 1 : has_gpu ? 0 : 3;
}
