// The header and the library from C++: one row that attends two keys, by a plan that owns itself.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "flashcore.h"

#if FLASHCORE_VERSION_NUMBER < 100
#error "the header is older than the first version"
#endif

static_assert(sizeof(flashcore_tensor_t) == 64, "an operand and its type, an address, a length, five strides");

namespace {

struct Destroy {
    void operator()(flashcore_plan_t *plan) const { flashcore_plan_destroy(plan); }
};

} // namespace

int main()
{
    if (std::strcmp(flashcore_version(), FLASHCORE_VERSION) != 0)
        return 1;
    flashcore_attention_problem_t problem;
    if (flashcore_attention_problem_init(&problem, 1, 1, 2, 1, FLASHCORE_DTYPE_F32) != FLASHCORE_OK)
        return 1;
    problem.query_length = 1;
    flashcore_plan_t *made = nullptr;
    if (flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_CPU, 0, nullptr, &made) != FLASHCORE_OK)
        return 1;
    const std::unique_ptr<flashcore_plan_t, Destroy> plan(made);

    float query[1] = {0.0F}, key[2] = {1.0F, 2.0F}, value[2] = {10.0F, 20.0F}, output[1] = {0.0F};
    const flashcore_tensor_t tensors[] = {
        {FLASHCORE_QUERY, FLASHCORE_DTYPE_F32, query, sizeof query, {}},
        {FLASHCORE_KEY, FLASHCORE_DTYPE_F32, key, sizeof key, {}},
        {FLASHCORE_VALUE, FLASHCORE_DTYPE_F32, value, sizeof value, {}},
        {FLASHCORE_OUTPUT, FLASHCORE_DTYPE_F32, output, sizeof output, {}},
    };
    if (flashcore_run(plan.get(), tensors, 4) != FLASHCORE_OK)
        return 1;
    if (flashcore_launch(plan.get(), nullptr, tensors, 4) != FLASHCORE_UNSUPPORTED)
        return 1;
    std::printf("flashcore %s: %g\n", flashcore_version(), static_cast<double>(output[0]));
    return std::fabs(output[0] - 15.0F) < 1e-6F ? 0 : 1;
}
