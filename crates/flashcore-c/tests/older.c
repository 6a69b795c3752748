/*
 * A program of version 0.1: its structs are those of the first header, written out here, shorter than those of today.
 * The library is the one of today.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { uint64_t batch, head, row; } old_strides_t;

typedef struct {
    uint64_t struct_size, batch, query_heads, key_heads, query_length, key_length, head_dim, value_dim;
    double scale;
    int32_t dtype, mask, alignment, layout;
    int64_t window_left, window_right;
    float softcap;
    int32_t alibi, sinks, bias, seqused_k, lse;
    int64_t reserved;
    old_strides_t query_strides, key_strides, value_strides, output_strides;
} old_problem_t;

typedef struct { const void *data; uint64_t bytes; } old_bytes_t;
typedef struct { uint64_t struct_size; old_bytes_t query, key, value; } old_inputs_t;
typedef struct { uint64_t struct_size; old_bytes_t output; } old_outputs_t;
typedef struct {
    uint64_t struct_size;
    const void *query, *key, *value;
    void *output;
} old_tensors_t;

extern int32_t flashcore_problem_init(old_problem_t *, uint64_t, uint64_t, uint64_t, uint64_t, int32_t);
extern int32_t flashcore_plan_create(const old_problem_t *, int32_t, int32_t, void **);
extern int32_t flashcore_plan_run_host(const void *, const old_inputs_t *, const old_outputs_t *);
extern int32_t flashcore_plan_launch_tensors(const void *, void *, const old_tensors_t *);
extern int32_t flashcore_plan_run_tensors(const void *, const old_tensors_t *);
extern int32_t flashcore_plan_destroy(void *);
extern const char *flashcore_last_error(void);

#define REQUIRE(condition)                                                                  \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            printf("line %d: %s: %s\n", __LINE__, #condition, flashcore_last_error());     \
            return 1;                                                                       \
        }                                                                                   \
    } while (0)

int main(void)
{
    /* Whatever lies after the struct is not the library's: neither written nor read. */
    struct {
        old_problem_t problem;
        unsigned char after[256];
    } memory;
    memset(&memory, 0xA5, sizeof memory);
    REQUIRE(sizeof(old_problem_t) == 232);
    REQUIRE(flashcore_problem_init(&memory.problem, 1, 1, 2, 1, 2) == 0);
    REQUIRE(memory.problem.struct_size == sizeof memory.problem);
    for (size_t index = 0; index < sizeof memory.after; index++)
        REQUIRE(memory.after[index] == 0xA5);
    memory.problem.mask = 1;

    void *plan;
    REQUIRE(flashcore_plan_create(&memory.problem, 0, 0, &plan) == 0);
    float zeros[2] = {0, 0}, value[2] = {1, 2}, output[2] = {-1, -1};
    old_inputs_t inputs = {sizeof inputs, {zeros, sizeof zeros}, {zeros, sizeof zeros}, {value, sizeof value}};
    old_outputs_t outputs = {sizeof outputs, {output, sizeof output}};
    REQUIRE(flashcore_plan_run_host(plan, &inputs, &outputs) == 0);
    REQUIRE(output[0] == 1 && output[1] == 1.5f);
    old_tensors_t tensors = {sizeof tensors, zeros, zeros, value, output};
    output[0] = output[1] = -1;
    REQUIRE(flashcore_plan_run_tensors(plan, &tensors) == 0);
    REQUIRE(output[0] == 1 && output[1] == 1.5f);
    /* Read and understood, and refused for being on the CPU: FLASHCORE_UNSUPPORTED. */
    REQUIRE(flashcore_plan_launch_tensors(plan, NULL, &tensors) == 2);
    REQUIRE(flashcore_plan_destroy(plan) == 0);
    puts("an older program computes");
    return 0;
}
