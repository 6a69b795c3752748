/*
 * Attention of [batch, row, head, column] tensors in the host's memory, checked against plain loops, and a few calls
 * that are wrong.
 *
 *     scripts/install-c.sh "$PWD/prefix"
 *     cc -Iprefix/include crates/flashcore-c/examples/attend.c -Lprefix/lib -lflashcore -lm
 *     LD_LIBRARY_PATH=prefix/lib ./a.out
 */
#include <math.h>
#include <stdio.h>

#include "flashcore.h"

enum { BATCH = 2, HEADS = 4, KEY_HEADS = 2, QUERIES = 5, KEYS = 7, DIM = 8 };

static float query[BATCH][QUERIES][HEADS][DIM];
static float key[BATCH][KEYS][KEY_HEADS][DIM];
static float value[BATCH][KEYS][KEY_HEADS][DIM];
static float output[BATCH][QUERIES][HEADS][DIM];
static float lse[BATCH][HEADS][QUERIES];

/* The largest error of the output and of the log-sum-exp. */
static double largest_error(double scale)
{
    double largest = 0;
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < QUERIES; i++) {
                int k = h / (HEADS / KEY_HEADS);
                double sum = 0, expected[DIM] = {0};
                /* Causal, the last query beside the last key. */
                for (int j = 0; j <= i + KEYS - QUERIES; j++) {
                    double score = 0;
                    for (int c = 0; c < DIM; c++)
                        score += (double)query[b][i][h][c] * key[b][j][k][c];
                    double weight = exp(score * scale);
                    sum += weight;
                    for (int c = 0; c < DIM; c++)
                        expected[c] += weight * value[b][j][k][c];
                }
                for (int c = 0; c < DIM; c++)
                    largest = fmax(largest, fabs(output[b][i][h][c] - expected[c] / sum));
                largest = fmax(largest, fabs(lse[b][h][i] - log(sum)));
            }
    return largest;
}

static void fill(float *numbers, size_t bytes, float step)
{
    for (size_t index = 0; index < bytes / sizeof(float); index++)
        numbers[index] = sinf(step * (float)index);
}

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, flashcore_last_error());
    return 1;
}

int main(void)
{
    fill(&query[0][0][0][0], sizeof query, 0.7f);
    fill(&key[0][0][0][0], sizeof key, 1.1f);
    fill(&value[0][0][0][0], sizeof value, 0.3f);

    flashcore_attention_problem_t problem;
    if (flashcore_attention_problem_init(&problem, BATCH, HEADS, QUERIES, DIM, FLASHCORE_DTYPE_F32) != FLASHCORE_OK)
        return fail("init");
    problem.key_heads = KEY_HEADS;
    problem.key_length = KEYS;
    problem.mask = FLASHCORE_MASK_CAUSAL;
    problem.layout = FLASHCORE_LAYOUT_BSHD;
    problem.lse = 1;

    flashcore_plan_t *plan;
    if (flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_CPU, 0, NULL, &plan) != FLASHCORE_OK)
        return fail("create");
    printf("flashcore %s: %s\n", flashcore_version(), flashcore_plan_describe(plan));

    flashcore_tensor_t tensors[] = {
        {FLASHCORE_QUERY, FLASHCORE_DTYPE_F32, query, sizeof query, {0}},
        {FLASHCORE_KEY, FLASHCORE_DTYPE_F32, key, sizeof key, {0}},
        {FLASHCORE_VALUE, FLASHCORE_DTYPE_F32, value, sizeof value, {0}},
        {FLASHCORE_OUTPUT, FLASHCORE_DTYPE_F32, output, sizeof output, {0}},
        {FLASHCORE_LSE, FLASHCORE_DTYPE_F32, lse, sizeof lse, {0}},
    };
    if (flashcore_run(plan, tensors, 5) != FLASHCORE_OK)
        return fail("run");
    double error = largest_error(problem.scale);
    printf("largest error %g\n", error);
    if (!(error < 1e-5))
        return 1;

    /* Wrong calls are told what is wrong. */
    tensors[1].bytes -= 4;
    if (flashcore_run(plan, tensors, 5) != FLASHCORE_INVALID_ARGUMENT)
        return 1;
    printf("%s\n", flashcore_last_error());
    if (flashcore_launch(plan, NULL, tensors, 5) != FLASHCORE_UNSUPPORTED)
        return 1;
    printf("%s\n", flashcore_last_error());
    if (flashcore_plan_destroy(plan) != FLASHCORE_OK || flashcore_plan_destroy(plan) != FLASHCORE_INVALID_PLAN)
        return 1;
    printf("%s: %s\n", flashcore_status_name(FLASHCORE_INVALID_PLAN), flashcore_last_error());
    return 0;
}
