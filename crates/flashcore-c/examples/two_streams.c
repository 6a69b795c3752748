/*
 * One decoding plan, launched by 8 threads on 2 streams each at once, every stream with tensors of its own: each result
 * must have the bits that the same launch gave when nothing else ran, and that one must agree with the CPU.
 *
 *     scripts/install-c.sh "$PWD/prefix"
 *     cc -std=c11 -Iprefix/include crates/flashcore-c/examples/two_streams.c -Lprefix/lib -lflashcore -pthread -ldl -lm
 *     LD_LIBRARY_PATH=prefix/lib ./a.out [ROUNDS]
 *
 * The driver is opened at run time, so that neither a toolkit nor a driver is needed to build this. Exits with 0 if all is
 * right, 1 if a result is wrong, 2 for wrong arguments, 3 where there is no GPU, 4 if a call fails.
 */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"
#include "flashcore.h"

enum { THREADS = 8, STREAMS = 2, LANES = THREADS * STREAMS };

/* A problem with every tensor that it has, for all lanes. */
typedef struct {
    const char *name;
    uint64_t batch, query_heads, key_heads, query_length, key_length, dim;
    int32_t dtype;
    int32_t alibi, sinks, seqused_k, bias;
} case_t;

static const case_t CASES[] = {
    {"1x32/8x1,30000x128 f16", 1, 32, 8, 1, 30000, 128, FLASHCORE_DTYPE_F16, 0, 0, 0, 0},
    {"2x32/8x1,20000x128 bf16, ALiBi, sinks, seqused_k", 2, 32, 8, 1, 20000, 128, FLASHCORE_DTYPE_BF16, 1, 1, 1, 0},
    {"3x8/2x2,9001x64 f16, ALiBi, sinks, seqused_k, bias", 3, 8, 2, 2, 9001, 64, FLASHCORE_DTYPE_F16, 1, 1, 1, 1},
    {"1x16/16x1,4097x64 f16, sinks", 1, 16, 16, 1, 4097, 64, FLASHCORE_DTYPE_F16, 0, 1, 0, 0},
};

enum { QUERY, KEY, VALUE, SLOPES, SINKS, LENGTHS, BIAS, INPUTS };

/* One stream, and tensors that no other stream has. */
typedef struct {
    void *stream;
    void *host[INPUTS];
    size_t bytes[INPUTS];
    device_address device[INPUTS];
    device_address output, lse, workspace;
    /* What was computed alone, and what comes back each round. */
    void *expected_output, *found_output;
    float *expected_rows, *found_rows;
    void *graph;
} lane_t;

typedef enum { WORKSPACE_OF_THE_STREAM, WORKSPACE_OF_THE_CALLER, GRAPHS, MODES } mode_kind;
static const char *const MODE_NAMES[MODES] = {"workspace of the stream", "workspace of the caller", "graphs"};

static lane_t lanes[LANES];
static flashcore_plan_t *plan;
static size_t output_bytes, row_bytes, workspace_bytes;
static int32_t dtype;
static mode_kind mode;
static int rounds = 1000;

static uint64_t random_state;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* A number within 1 of 0, in bits of the type: exact in all of them. */
static uint16_t random_bits(int32_t type)
{
    /* sign, exponent from 2^-4 to 2^-1, 7 digits */
    uint64_t bits = next_random() >> 20;
    unsigned sign = bits & 1, exponent = bits >> 1 & 3, digits = bits >> 3 & 127;
    if (type == FLASHCORE_DTYPE_F16)
        return (uint16_t)(sign << 15 | (11 + exponent) << 10 | digits << 3);
    return (uint16_t)(sign << 15 | (123 + exponent) << 7 | digits);
}

static float to_float(int32_t type, uint16_t bits)
{
    uint32_t wide;
    float value;
    if (type == FLASHCORE_DTYPE_F16) {
        int exponent = bits >> 10 & 31, digits = bits & 1023;
        value = exponent == 0    ? ldexpf((float)digits, -24)
                : exponent == 31 ? NAN
                                 : ldexpf((float)(digits + 1024), exponent - 25);
        return bits >> 15 ? -value : value;
    }
    wide = (uint32_t)bits << 16;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static void make_inputs(const case_t *problem, lane_t *lane, int number)
{
    random_state = 0x9E3779B97F4A7C15u * (uint64_t)(number + 1);
    size_t queries = problem->batch * problem->query_heads * problem->query_length * problem->dim;
    size_t keys = problem->batch * problem->key_heads * problem->key_length * problem->dim;
    size_t counts[INPUTS] = {queries, keys, keys, 0, 0, 0, 0};
    lane->bytes[SLOPES] = problem->alibi ? 4 * problem->query_heads : 0;
    lane->bytes[SINKS] = problem->sinks ? 4 * problem->query_heads : 0;
    lane->bytes[LENGTHS] = problem->seqused_k ? 4 * problem->batch : 0;
    lane->bytes[BIAS] = problem->bias ? 4 * problem->key_length : 0;
    for (int tensor = 0; tensor < INPUTS; tensor++) {
        if (tensor <= VALUE)
            lane->bytes[tensor] = 2 * counts[tensor];
        lane->host[tensor] = NULL;
        lane->device[tensor] = 0;
        if (lane->bytes[tensor] == 0)
            continue;
        void *data = malloc(lane->bytes[tensor]);
        if (!data)
            fail("malloc", 0);
        if (tensor <= VALUE)
            for (size_t index = 0; index < counts[tensor]; index++)
                ((uint16_t *)data)[index] = random_bits(problem->dtype);
        else if (tensor == LENGTHS)
            for (size_t index = 0; index < problem->batch; index++)
                ((uint32_t *)data)[index] = (uint32_t)(problem->key_length - next_random() % (problem->key_length / 2));
        else
            for (size_t index = 0; index < lane->bytes[tensor] / 4; index++) {
                float value = (float)(next_random() % 1000) / 1000.0f;
                ((float *)data)[index] = tensor == SLOPES ? value * 0.01f : value * 4.0f - 2.0f;
            }
        lane->host[tensor] = data;
        check("cuMemAlloc", driver.cuMemAlloc_v2(&lane->device[tensor], lane->bytes[tensor]));
        check("cuMemcpyHtoD", driver.cuMemcpyHtoD_v2(lane->device[tensor], data, lane->bytes[tensor]));
    }
}

/* The tensors of a lane, at addresses of the device or of the host. */
static uint64_t list(const lane_t *lane, void *const *inputs, void *output, void *rows, flashcore_tensor_t *tensors)
{
    static const int32_t operands[INPUTS] = {FLASHCORE_QUERY, FLASHCORE_KEY,       FLASHCORE_VALUE, FLASHCORE_ALIBI_SLOPES,
                                             FLASHCORE_SINKS, FLASHCORE_SEQUSED_K, FLASHCORE_BIAS};
    uint64_t count = 0;
    for (int tensor = 0; tensor < INPUTS; tensor++)
        if (lane->bytes[tensor]) {
            int32_t type = tensor <= VALUE ? dtype : tensor == LENGTHS ? FLASHCORE_DTYPE_I32 : FLASHCORE_DTYPE_F32;
            tensors[count] = (flashcore_tensor_t){operands[tensor], type, inputs[tensor], lane->bytes[tensor], {0}};
            tensors[count++].strides[3] = tensor == BIAS; /* from one key to the next */
        }
    tensors[count++] = (flashcore_tensor_t){FLASHCORE_OUTPUT, dtype, output, output_bytes, {0}};
    tensors[count++] = (flashcore_tensor_t){FLASHCORE_LSE, FLASHCORE_DTYPE_F32, rows, row_bytes, {0}};
    return count;
}

static void *address(device_address value)
{
    return (void *)(uintptr_t)value;
}

static int launch(lane_t *lane)
{
    flashcore_tensor_t tensors[INPUTS + 3];
    void *inputs[INPUTS];
    for (int tensor = 0; tensor < INPUTS; tensor++)
        inputs[tensor] = address(lane->device[tensor]);
    uint64_t count = list(lane, inputs, address(lane->output), address(lane->lse), tensors);
    /* A captured launch is refused without one. */
    if (mode != WORKSPACE_OF_THE_STREAM)
        tensors[count++] = (flashcore_tensor_t){FLASHCORE_WORKSPACE, 0, address(lane->workspace), workspace_bytes, {0}};
    return flashcore_launch(plan, lane->stream, tensors, count);
}

/* Puts one round on the stream of a lane. */
static void begin_round(lane_t *lane)
{
    check("cuMemsetD8Async", driver.cuMemsetD8Async(lane->output, 0xFF, output_bytes, lane->stream));
    check("cuMemsetD8Async", driver.cuMemsetD8Async(lane->lse, 0xFF, row_bytes, lane->stream));
    if (mode == GRAPHS)
        check("cuGraphLaunch", driver.cuGraphLaunch(lane->graph, lane->stream));
    else
        check("flashcore_launch", launch(lane));
    check("cuMemcpyDtoHAsync",
          driver.cuMemcpyDtoHAsync_v2(lane->found_output, lane->output, output_bytes, lane->stream));
    check("cuMemcpyDtoHAsync",
          driver.cuMemcpyDtoHAsync_v2(lane->found_rows, lane->lse, row_bytes, lane->stream));
}

/* Waits for the round; 1 if the result has other bits than the one that was computed alone. */
static int end_round(lane_t *lane)
{
    check("cuStreamSynchronize", driver.cuStreamSynchronize(lane->stream));
    return memcmp(lane->found_output, lane->expected_output, output_bytes) != 0 ||
           memcmp(lane->found_rows, lane->expected_rows, row_bytes) != 0;
}

static void *run_thread(void *argument)
{
    size_t thread = (size_t)(uintptr_t)argument, wrong = 0;
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context));
    for (int round = 0; round < rounds; round++) {
        for (int stream = 0; stream < STREAMS; stream++)
            begin_round(&lanes[thread * STREAMS + (size_t)stream]);
        for (int stream = 0; stream < STREAMS; stream++)
            wrong += (size_t)end_round(&lanes[thread * STREAMS + (size_t)stream]);
    }
    return (void *)(uintptr_t)wrong;
}

/* What the CPU makes of the tensors of a lane; 1 if the GPU made something else. */
static int differs_from_cpu(const case_t *given, const flashcore_attention_problem_t *problem, const lane_t *lane)
{
    flashcore_plan_t *on_cpu;
    check("a plan for the CPU", flashcore_plan_create(&problem->base, FLASHCORE_DEVICE_CPU, 0, NULL, &on_cpu));
    uint16_t *output = malloc(output_bytes);
    float *rows = malloc(row_bytes);
    if (!output || !rows)
        fail("malloc", 0);
    flashcore_tensor_t tensors[INPUTS + 2];
    uint64_t count = list(lane, lane->host, output, rows, tensors);
    check("flashcore_run", flashcore_run(on_cpu, tensors, count));

    /* Both round outputs, and weights, to 16 bits: a few roundoffs of the largest output. */
    double roundoff = given->dtype == FLASHCORE_DTYPE_F16 ? 1.0 / 2048 : 1.0 / 256;
    double largest = 0, worst = 0, worst_row = 0;
    const uint16_t *found = lane->expected_output;
    for (size_t index = 0; index < output_bytes / 2; index++)
        largest = fmax(largest, fabs(to_float(given->dtype, output[index])));
    for (size_t index = 0; index < output_bytes / 2; index++) {
        double error = fabs((double)to_float(given->dtype, output[index]) - to_float(given->dtype, found[index]));
        worst = isnan(error) ? INFINITY : fmax(worst, error);
    }
    for (size_t index = 0; index < row_bytes / 4; index++) {
        double error = fabs((double)rows[index] - lane->expected_rows[index]);
        worst_row = isnan(error) ? INFINITY : fmax(worst_row, error);
    }
    int is_wrong = !(worst <= 4 * roundoff * largest) || !(worst_row <= 1e-3);
    if (is_wrong)
        printf("the GPU differs from the CPU by %g where outputs are up to %g, and by %g in the log-sum-exp\n", worst,
               largest, worst_row);
    free(output);
    free(rows);
    check("flashcore_plan_destroy", flashcore_plan_destroy(on_cpu));
    return is_wrong;
}

/* Everything of one problem. Returns how many results were wrong. */
static size_t run_case(const case_t *given)
{
    flashcore_attention_problem_t problem;
    check("init", flashcore_attention_problem_init(&problem, given->batch, given->query_heads,
                                                           given->query_length, given->dim, given->dtype));
    problem.key_heads = given->key_heads;
    problem.key_length = given->key_length;
    problem.alibi = given->alibi;
    problem.sinks = given->sinks;
    problem.seqused_k = given->seqused_k;
    problem.bias = given->bias;
    problem.lse = 1;
    int status = flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_CUDA, 0, NULL, &plan);
    if (status == FLASHCORE_NO_DEVICE) {
        printf("no GPU: %s\n", flashcore_last_error());
        exit(3);
    }
    check("flashcore_plan_create", status);
    workspace_bytes = flashcore_plan_workspace_bytes(plan);
    dtype = given->dtype;
    printf("%s\n  %s\n  workspace of %zu bytes\n", given->name, flashcore_plan_describe(plan), workspace_bytes);
    output_bytes = 2 * given->batch * given->query_heads * given->query_length * given->dim;
    row_bytes = 4 * given->batch * given->query_heads * given->query_length;

    size_t wrong = 0;
    for (int number = 0; number < LANES; number++) {
        lane_t *lane = &lanes[number];
        make_inputs(given, lane, number);
        check("cuStreamCreate", driver.cuStreamCreate(&lane->stream, 1 /* not held up by the default stream */));
        check("cuMemAlloc", driver.cuMemAlloc_v2(&lane->output, output_bytes));
        check("cuMemAlloc", driver.cuMemAlloc_v2(&lane->lse, row_bytes));
        check("cuMemAlloc", driver.cuMemAlloc_v2(&lane->workspace, workspace_bytes + 16));
        check("cuMemAllocHost", driver.cuMemAllocHost_v2(&lane->found_output, output_bytes));
        check("cuMemAllocHost", driver.cuMemAllocHost_v2((void **)&lane->found_rows, row_bytes));
        lane->expected_output = malloc(output_bytes);
        lane->expected_rows = malloc(row_bytes);
        if (!lane->expected_output || !lane->expected_rows)
            fail("malloc", 0);
        /* Alone: the stream is waited for before the next lane begins. */
        mode = WORKSPACE_OF_THE_STREAM;
        begin_round(lane);
        check("cuStreamSynchronize", driver.cuStreamSynchronize(lane->stream));
        memcpy(lane->expected_output, lane->found_output, output_bytes);
        memcpy(lane->expected_rows, lane->found_rows, row_bytes);
        wrong += (size_t)differs_from_cpu(given, &problem, lane);
        /* For the rounds of graphs, with the workspace of the lane. */
        void *graph;
        mode = GRAPHS;
        check("cuStreamBeginCapture", driver.cuStreamBeginCapture_v2(lane->stream, 1 /* of this thread */));
        check("flashcore_launch", launch(lane));
        check("cuStreamEndCapture", driver.cuStreamEndCapture(lane->stream, &graph));
        check("cuGraphInstantiate", driver.cuGraphInstantiateWithFlags(&lane->graph, graph, 0));
        check("cuGraphDestroy", driver.cuGraphDestroy(graph));
    }
    printf("  alone: %d results, %zu differ from those of the CPU\n", LANES, wrong);

    for (int kind = 0; kind < MODES; kind++) {
        mode = (mode_kind)kind;
        pthread_t threads[THREADS];
        for (size_t thread = 0; thread < THREADS; thread++)
            check("pthread_create", pthread_create(&threads[thread], NULL, run_thread, (void *)(uintptr_t)thread));
        size_t of_mode = 0;
        for (int thread = 0; thread < THREADS; thread++) {
            void *result;
            check("pthread_join", pthread_join(threads[thread], &result));
            of_mode += (size_t)(uintptr_t)result;
        }
        printf("  %s: %d rounds on %d streams of %d threads, %zu wrong\n", MODE_NAMES[kind], rounds, LANES, THREADS,
               of_mode);
        wrong += of_mode;
    }

    for (int number = 0; number < LANES; number++) {
        lane_t *lane = &lanes[number];
        check("cuGraphExecDestroy", driver.cuGraphExecDestroy(lane->graph));
        check("cuStreamDestroy", driver.cuStreamDestroy_v2(lane->stream));
        for (int tensor = 0; tensor < INPUTS; tensor++) {
            if (lane->device[tensor])
                check("cuMemFree", driver.cuMemFree_v2(lane->device[tensor]));
            free(lane->host[tensor]);
        }
        check("cuMemFree", driver.cuMemFree_v2(lane->output));
        check("cuMemFree", driver.cuMemFree_v2(lane->lse));
        check("cuMemFree", driver.cuMemFree_v2(lane->workspace));
        check("cuMemFreeHost", driver.cuMemFreeHost(lane->found_output));
        check("cuMemFreeHost", driver.cuMemFreeHost(lane->found_rows));
        free(lane->expected_output);
        free(lane->expected_rows);
    }
    check("cuCtxSynchronize", driver.cuCtxSynchronize());
    check("flashcore_plan_destroy", flashcore_plan_destroy(plan));
    return wrong;
}

int main(int count, char **words)
{
    if (count > 2 || (count == 2 && (rounds = atoi(words[1])) < 1)) {
        fprintf(stderr, "usage: %s [ROUNDS]\n", words[0]);
        return 2;
    }
    if (!open_driver())
        return 3;
    size_t wrong = 0;
    for (size_t index = 0; index < sizeof CASES / sizeof CASES[0]; index++)
        wrong += run_case(&CASES[index]);
    printf("%d rounds of each, %zu wrong\n", rounds, wrong);
    return wrong ? 1 : 0;
}
