/*
 * Every operand of attention from C: each problem is computed on the CPU, and then launched on the first GPU with the same
 * list of tensors, with the workspace of the stream and one of the caller, which must agree with the CPU.
 *
 *     scripts/install-c.sh "$PWD/prefix"
 *     cc -std=c11 -Iprefix/include crates/flashcore-c/examples/all_operands.c -Lprefix/lib -lflashcore -ldl -lm
 *     LD_LIBRARY_PATH=prefix/lib ./a.out
 *
 * Exits with 0 if all is right, 1 if a result is wrong or an operand was not tried, 3 if there is no GPU and the CPU is
 * right, 4 if a call fails.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"
#include "flashcore.h"

enum { BATCH = 3, HEADS = 4, KEY_HEADS = 2, QUERIES = 37, KEYS = 300, DIM = 64, PAGE = 16, FURTHEST = 20 };
enum { POISON = 0x3A }; /* 0.78 in half precision: what is not written stays so in all memories */

/* An operand as a tensor of a call, by the number that is its place here. */
static const int32_t OPERANDS[] = {
    FLASHCORE_QUERY,        FLASHCORE_KEY,          FLASHCORE_VALUE,     FLASHCORE_OUTPUT,    FLASHCORE_LSE,
    FLASHCORE_CU_SEQLENS_Q, FLASHCORE_CU_SEQLENS_K, FLASHCORE_SEQUSED_Q, FLASHCORE_SEQUSED_K, FLASHCORE_LEFTPAD_K,
    FLASHCORE_KV_BATCH_IDX, FLASHCORE_PAGE_TABLE,   FLASHCORE_ALIBI_SLOPES, FLASHCORE_SINKS,  FLASHCORE_AUX_F32,
    FLASHCORE_AUX_I32,      FLASHCORE_BIAS,         FLASHCORE_Q_SCALE,   FLASHCORE_K_SCALE,   FLASHCORE_V_SCALE,
};
enum { COUNT = sizeof OPERANDS / sizeof OPERANDS[0] };
enum { QUERY, KEY, VALUE, OUTPUT_OF, LSE, CU_Q, CU_K, USED_Q, USED_K, LEFTPAD, KV_BATCH, PAGES, SLOPES, SINKS, AUX_F32, AUX_I32, BIAS, Q_SCALE, K_SCALE, V_SCALE };
/* The operands of attention come first: a new one must be tried here. */
_Static_assert(FLASHCORE_NEW_KEY == COUNT + 1, "an operand is missing in this program");

typedef struct {
    flashcore_attention_problem_t problem;
    void *host[COUNT];
    size_t bytes[COUNT];
    uint64_t strides[COUNT][5];
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
static void scales(case_t *c, int operand, size_t count, const uint64_t *strides)
{
    floats(c, operand, count);
    for (size_t index = 0; index < count; index++)
        ((float *)c->host[operand])[index] = 1.0f + 0.5f * ((float *)c->host[operand])[index];
    memcpy(c->strides[operand], strides, sizeof c->strides[operand]);
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
    check("init", flashcore_attention_problem_init(&c.problem, BATCH, HEADS, query_length, DIM, FLASHCORE_DTYPE_F16));
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
    memcpy(c.strides[BIAS], (uint64_t[5]){0, QUERIES * KEYS, KEYS, 1}, sizeof c.strides[BIAS]);
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
    scales(&c, K_SCALE, KEY_HEADS, (uint64_t[5]){0, 0, 0, 1, 0});
    scales(&c, V_SCALE, BATCH * KEYS * KEY_HEADS, (uint64_t[5]){0, KEYS * KEY_HEADS, KEY_HEADS, 1, 0});
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
        scales(&c, operand, BATCH * KEY_HEADS, (uint64_t[5]){KEY_HEADS, 0, 0, 1, 0});
    return c;
}

/* The type of the elements of an operand. */
static int32_t type_of(const case_t *c, int operand)
{
    if (operand == QUERY)
        return c->problem.dtype;
    if (operand == KEY || operand == VALUE)
        return c->problem.kv_dtype ? c->problem.kv_dtype : c->problem.dtype;
    if (operand == OUTPUT_OF)
        return c->problem.out_dtype ? c->problem.out_dtype : c->problem.dtype;
    int is_integer = (operand >= CU_Q && operand <= PAGES) || operand == AUX_I32;
    return is_integer ? FLASHCORE_DTYPE_I32 : FLASHCORE_DTYPE_F32;
}

/* Every operand that the problem has, at its address; their number. */
static uint64_t list(const case_t *c, void *const *addresses, flashcore_tensor_t *tensors)
{
    uint64_t count = 0;
    for (int operand = 0; operand < COUNT; operand++)
        if (c->bytes[operand]) {
            flashcore_tensor_t *tensor = &tensors[count++];
            *tensor = (flashcore_tensor_t){OPERANDS[operand], type_of(c, operand), addresses[operand], c->bytes[operand], {0}};
            memcpy(tensor->strides, c->strides[operand], sizeof tensor->strides);
        }
    return count;
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

/* On the CPU, which stays in `host`. */
static void run_on_cpu(case_t *c)
{
    flashcore_plan_t *plan;
    flashcore_tensor_t tensors[COUNT];
    check("create on the CPU", flashcore_plan_create(&c->problem.base, FLASHCORE_DEVICE_CPU, 0, NULL, &plan));
    memset(c->host[OUTPUT_OF], POISON, c->bytes[OUTPUT_OF]);
    memset(c->host[LSE], POISON, c->bytes[LSE]);
    check("run", flashcore_run(plan, tensors, list(c, c->host, tensors)));
    check("destroy", flashcore_plan_destroy(plan));
}

/* On the GPU, with the workspace of the plan and with one of the caller: the larger difference. A GPU that has no kernel for
 * a query of 8 bits refuses it, with the reason. */
static double run_on_gpu(const case_t *c)
{
    flashcore_plan_t *plan;
    int code = flashcore_plan_create(&c->problem.base, FLASHCORE_DEVICE_CUDA, 0, NULL, &plan);
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
    flashcore_tensor_t tensors[COUNT + 1];
    uint64_t count = list(c, addresses, tensors), workspace_bytes = flashcore_plan_workspace_bytes(plan);
    device_address workspace = 0;
    if (workspace_bytes)
        check("cuMemAlloc", driver.cuMemAlloc_v2(&workspace, workspace_bytes));
    tensors[count] = (flashcore_tensor_t){FLASHCORE_WORKSPACE, 0, (void *)(uintptr_t)workspace, workspace_bytes, {0}};
    void *output = malloc(c->bytes[OUTPUT_OF]), *lse = malloc(c->bytes[LSE]);
    if (!output || !lse)
        fail("malloc", 0);
    double largest = 0;
    for (int brings = 0; brings <= (workspace != 0); brings++) {
        device_address written[] = {(device_address)(uintptr_t)addresses[OUTPUT_OF],
                                    (device_address)(uintptr_t)addresses[LSE]};
        check("cuMemsetD8Async", driver.cuMemsetD8Async(written[0], POISON, c->bytes[OUTPUT_OF], stream));
        check("cuMemsetD8Async", driver.cuMemsetD8Async(written[1], POISON, c->bytes[LSE], stream));
        check("launch", flashcore_launch(plan, stream, tensors, count + (uint64_t)brings));
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
        run_on_cpu(&c);
        /* Half precision of outputs up to 1, of weights, and of sums in another order. */
        double found = has_gpu ? run_on_gpu(&c) : 0, allowed = 4e-3;
        /* Weights of 8 bits, which the CPU does not round. */
        if (c.problem.dtype == FLASHCORE_DTYPE_E4M3)
            allowed = 4e-2;
        int is_right = found <= allowed;
        wrong += !is_right;
        if (has_gpu)
            printf("%s: largest difference %g%s\n", CASES[index].name, found, is_right ? "" : ", WRONG");
        else
            printf("%s: on the CPU\n", CASES[index].name);
        for (int operand = 0; operand < COUNT; operand++) {
            tried[operand] |= c.bytes[operand] > 0;
            free(c.host[operand]);
        }
    }
    for (int operand = 0; operand < COUNT; operand++)
        if (!tried[operand]) {
            printf("operand %d was not tried\n", OPERANDS[operand]);
            wrong++;
        }
    printf("%d operands, %d wrong\n", COUNT, wrong);
    return wrong ? 1 : has_gpu ? 0 : 3;
}
