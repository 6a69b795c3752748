/*
 * Decoding with a paged KV cache: each call appends one key and value to each of three sequences, rotated by their
 * positions, and attends. The keys of a sequence lie in pages anywhere in the cache. Checked against plain loops over a
 * history that is kept beside it. The first GPU if there is one, else the CPU.
 *
 *     scripts/install-c.sh "$PWD/prefix"
 *     cc -Iprefix/include crates/flashcore-c/examples/decode.c -Lprefix/lib -lflashcore -lm
 *     LD_LIBRARY_PATH=prefix/lib ./a.out
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "flashcore.h"

enum {
    BATCH = 3,
    HEADS = 4,
    KEY_HEADS = 2,
    DIM = 16,
    PAGE = 8,
    PAGES_OF_A_SEQUENCE = 5,
    PAGES = BATCH * PAGES_OF_A_SEQUENCE + 2,
    LONGEST = PAGE * PAGES_OF_A_SEQUENCE,
    STEPS = 20
};

static float query[BATCH][1][HEADS][DIM], new_key[BATCH][1][KEY_HEADS][DIM], new_value[BATCH][1][KEY_HEADS][DIM];
static float output[BATCH][1][HEADS][DIM];
static float key_cache[PAGES][PAGE][KEY_HEADS][DIM], value_cache[PAGES][PAGE][KEY_HEADS][DIM];
static int32_t page_table[BATCH][PAGES_OF_A_SEQUENCE];
static uint32_t lengths[BATCH] = {0, 3, 17};
static float cosines[LONGEST][DIM / 2], sines[LONGEST][DIM / 2];
/* The same keys, rotated, and values, one after the other. */
static double keys[BATCH][LONGEST][KEY_HEADS][DIM], values[BATCH][LONGEST][KEY_HEADS][DIM];

static uint32_t state = 7;

static float next(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static void fill(float *numbers, size_t bytes)
{
    for (size_t index = 0; index < bytes / sizeof(float); index++)
        numbers[index] = next();
}

/* Columns i and i + DIM / 2 make a pair. */
static void rotate(const float *from, uint32_t position, double *to)
{
    for (int i = 0; i < DIM / 2; i++) {
        double c = cosines[position][i], s = sines[position][i];
        to[i] = from[i] * c - from[i + DIM / 2] * s;
        to[i + DIM / 2] = from[i + DIM / 2] * c + from[i] * s;
    }
}

/* The largest error of the output, with `count` keys before the new one in each sequence. */
static double largest_error(double scale)
{
    double largest = 0;
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++) {
            int k = h / (HEADS / KEY_HEADS);
            double rotated[DIM], sum = 0, expected[DIM] = {0};
            rotate(query[b][0][h], lengths[b], rotated);
            for (uint32_t j = 0; j <= lengths[b]; j++) {
                double score = 0;
                for (int c = 0; c < DIM; c++)
                    score += rotated[c] * keys[b][j][k][c];
                double weight = exp(score * scale);
                sum += weight;
                for (int c = 0; c < DIM; c++)
                    expected[c] += weight * values[b][j][k][c];
            }
            for (int c = 0; c < DIM; c++)
                largest = fmax(largest, fabs(output[b][0][h][c] - expected[c] / sum));
        }
    return largest;
}

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, flashcore_last_error());
    return 1;
}

int main(void)
{
    for (int position = 0; position < LONGEST; position++)
        for (int i = 0; i < DIM / 2; i++) {
            double angle = position * pow(10000.0, -2.0 * i / DIM);
            cosines[position][i] = (float)cos(angle);
            sines[position][i] = (float)sin(angle);
        }
    /* Pages in no order, rows that nobody has written poisoned. */
    for (int b = 0; b < BATCH; b++)
        for (int page = 0; page < PAGES_OF_A_SEQUENCE; page++)
            page_table[b][page] = (5 * (b * PAGES_OF_A_SEQUENCE + page) + 3) % PAGES;
    memset(key_cache, 0xFF, sizeof key_cache);
    memset(value_cache, 0xFF, sizeof value_cache);
    for (int b = 0; b < BATCH; b++)
        for (uint32_t j = 0; j < lengths[b]; j++)
            for (int k = 0; k < KEY_HEADS; k++)
                for (int c = 0; c < DIM; c++) {
                    int page = page_table[b][j / PAGE];
                    keys[b][j][k][c] = key_cache[page][j % PAGE][k][c] = next();
                    values[b][j][k][c] = value_cache[page][j % PAGE][k][c] = next();
                }

    flashcore_attention_problem_t attention;
    if (flashcore_attention_problem_init(&attention, BATCH, HEADS, 1, DIM, FLASHCORE_DTYPE_F32) != FLASHCORE_OK)
        return fail("init");
    attention.key_heads = KEY_HEADS;
    attention.key_length = LONGEST;
    attention.layout = FLASHCORE_LAYOUT_BSHD;
    attention.mask = FLASHCORE_MASK_CAUSAL;
    attention.seqused_k = 1;
    attention.page_table = 1;
    attention.page_size = PAGE;
    attention.num_pages = PAGES;
    attention.table_width = PAGES_OF_A_SEQUENCE;

    flashcore_kvcache_problem_t problem;
    if (flashcore_kvcache_problem_init(&problem, &attention, 1) != FLASHCORE_OK)
        return fail("init of the append");
    problem.rotary.style = FLASHCORE_ROTARY_NEOX;
    problem.rotary.dim = DIM;
    problem.rotary.max_position = LONGEST;
    problem.rotary.table_stride = DIM / 2;

    flashcore_plan_t *plan;
    if (flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_BEST, 0, NULL, &plan) != FLASHCORE_OK)
        return fail("create");

    const flashcore_tensor_t tensors[] = {
        {FLASHCORE_QUERY, FLASHCORE_DTYPE_F32, query, sizeof query, {0}},
        {FLASHCORE_NEW_KEY, FLASHCORE_DTYPE_F32, new_key, sizeof new_key, {0}},
        {FLASHCORE_NEW_VALUE, FLASHCORE_DTYPE_F32, new_value, sizeof new_value, {0}},
        {FLASHCORE_KEY_CACHE, FLASHCORE_DTYPE_F32, key_cache, sizeof key_cache, {0}},
        {FLASHCORE_VALUE_CACHE, FLASHCORE_DTYPE_F32, value_cache, sizeof value_cache, {0}},
        {FLASHCORE_SEQUSED_K, FLASHCORE_DTYPE_I32, lengths, sizeof lengths, {0}},
        {FLASHCORE_PAGE_TABLE, FLASHCORE_DTYPE_I32, page_table, sizeof page_table, {0}},
        {FLASHCORE_COS, FLASHCORE_DTYPE_F32, cosines, sizeof cosines, {0}},
        {FLASHCORE_SIN, FLASHCORE_DTYPE_F32, sines, sizeof sines, {0}},
        {FLASHCORE_OUTPUT, FLASHCORE_DTYPE_F32, output, sizeof output, {0}},
    };
    const uint64_t count = sizeof tensors / sizeof tensors[0];

    double largest = 0;
    for (int step = 0; step < STEPS; step++) {
        fill(&query[0][0][0][0], sizeof query);
        fill(&new_key[0][0][0][0], sizeof new_key);
        fill(&new_value[0][0][0][0], sizeof new_value);
        memset(output, 0xFF, sizeof output);
        if (flashcore_run(plan, tensors, count) != FLASHCORE_OK)
            return fail("run");
        for (int b = 0; b < BATCH; b++)
            for (int k = 0; k < KEY_HEADS; k++) {
                rotate(new_key[b][0][k], lengths[b], keys[b][lengths[b]][k]);
                for (int c = 0; c < DIM; c++)
                    values[b][lengths[b]][k][c] = new_value[b][0][k][c];
            }
        largest = fmax(largest, largest_error(attention.scale));
        for (int b = 0; b < BATCH; b++)
            lengths[b]++;
    }
    printf("flashcore %s: %d steps, lengths %u %u %u, largest error %g\n", flashcore_version(), STEPS, lengths[0],
           lengths[1], lengths[2], largest);
    if (!(largest < 1e-5))
        return 1;

    /* A sequence without room for its new key is told so, and nothing is written. */
    lengths[1] = LONGEST;
    if (flashcore_run(plan, tensors, count) != FLASHCORE_INVALID_ARGUMENT)
        return 1;
    printf("%s\n", flashcore_last_error());
    return flashcore_plan_destroy(plan) == FLASHCORE_OK ? 0 : 1;
}
