/* Forked children compute with a plan of the parent's and with one of their own, also when the parent's threads were
   computing, creating and destroying plans at the time. tests/programs.rs compiles and runs it. */

#define _POSIX_C_SOURCE 200809L

#include "flashcore.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 4, LENGTH = 256, DIM = 64, SIZE = HEADS * LENGTH * DIM, ROUNDS = 20, PATIENCE = 60 };

static float query[SIZE], key[SIZE], value[SIZE], expected[SIZE];
static volatile int is_done;

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, flashcore_last_error());
    return 0;
}

static flashcore_plan_t *make(void)
{
    flashcore_attention_problem_t problem;
    flashcore_plan_t *plan = NULL;
    if (flashcore_attention_problem_init(&problem, 1, HEADS, LENGTH, DIM, FLASHCORE_DTYPE_F32) != FLASHCORE_OK ||
        flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_CPU, 0, NULL, &plan) != FLASHCORE_OK)
        fail("create");
    return plan;
}

static int run(const flashcore_plan_t *plan, float *output)
{
    const flashcore_tensor_t tensors[] = {
        {FLASHCORE_QUERY, FLASHCORE_DTYPE_F32, query, sizeof query, {0}},
        {FLASHCORE_KEY, FLASHCORE_DTYPE_F32, key, sizeof key, {0}},
        {FLASHCORE_VALUE, FLASHCORE_DTYPE_F32, value, sizeof value, {0}},
        {FLASHCORE_OUTPUT, FLASHCORE_DTYPE_F32, output, sizeof query, {0}},
    };
    return flashcore_run(plan, tensors, 4) == FLASHCORE_OK || fail("run");
}

static int computes(const flashcore_plan_t *plan)
{
    static _Thread_local float output[SIZE];
    return plan && run(plan, output) && memcmp(output, expected, sizeof output) == 0;
}

/* Whether a child, which an alarm ends if it hangs, computes with both plans. */
static int child_computes(const flashcore_plan_t *plan)
{
    pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE);
        flashcore_plan_t *own = make();
        _exit(!(computes(plan) && computes(own) && flashcore_plan_destroy(own) == FLASHCORE_OK));
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "status %d of the child\n", status);
        return 0;
    }
    return 1;
}

static void *compute(void *plan)
{
    while (!is_done)
        if (!computes(plan))
            return plan;
    return NULL;
}

static void *churn(void *plan)
{
    while (!is_done)
        if (flashcore_plan_destroy(make()) != FLASHCORE_OK)
            return plan;
    return NULL;
}

int main(void)
{
    for (int index = 0; index < SIZE; index++) {
        query[index] = (float)(index % 13) / 13;
        key[index] = (float)(index % 7) / 7;
        value[index] = (float)(index % 5);
    }
    flashcore_plan_t *plan = make();
    if (!plan || !run(plan, expected) || !child_computes(plan))
        return 1;

    pthread_t threads[3];
    void *(*const bodies[3])(void *) = {compute, churn, churn};
    int is_right = 1;
    for (int index = 0; index < 3; index++)
        is_right &= pthread_create(&threads[index], NULL, bodies[index], plan) == 0;
    for (int round = 0; round < ROUNDS && is_right; round++)
        is_right &= child_computes(plan);
    is_done = 1;
    for (int index = 0; index < 3; index++) {
        void *failed = plan;
        is_right &= pthread_join(threads[index], &failed) == 0 && failed == NULL;
    }
    puts(is_right ? "forked children compute" : "wrong");
    return !is_right;
}
