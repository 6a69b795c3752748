// The header and the library from C++: one row that attends two keys, by a plan that owns itself.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "flashcore.h"

#if FLASHCORE_VERSION_NUMBER < 100
#error "the header is older than the first version"
#endif

static_assert(sizeof(flashcore_outputs_t) == 40, "a size and twice an address and a length");

namespace {

struct Destroy {
    void operator()(flashcore_plan_t *plan) const { flashcore_plan_destroy(plan); }
};

} // namespace

int main()
{
    if (std::strcmp(flashcore_version(), FLASHCORE_VERSION) != 0)
        return 1;
    flashcore_problem_t problem;
    if (flashcore_problem_init(&problem, 1, 1, 2, 1, FLASHCORE_DTYPE_F32) != FLASHCORE_OK)
        return 1;
    problem.query_length = 1;
    flashcore_plan_t *made = nullptr;
    if (flashcore_plan_create(&problem, FLASHCORE_DEVICE_CPU, 0, &made) != FLASHCORE_OK)
        return 1;
    const std::unique_ptr<flashcore_plan_t, Destroy> plan(made);

    const float query[1] = {0.0F}, key[2] = {1.0F, 2.0F}, value[2] = {10.0F, 20.0F};
    float output[1] = {0.0F};
    flashcore_inputs_t inputs = {};
    inputs.struct_size = sizeof inputs;
    inputs.query = {query, sizeof query};
    inputs.key = {key, sizeof key};
    inputs.value = {value, sizeof value};
    flashcore_outputs_t outputs = {};
    outputs.struct_size = sizeof outputs;
    outputs.output = {output, sizeof output};
    if (flashcore_plan_run_host(plan.get(), &inputs, &outputs) != FLASHCORE_OK)
        return 1;

    flashcore_device_tensors_t tensors = {};
    tensors.struct_size = sizeof tensors;
    if (flashcore_plan_launch_tensors(plan.get(), nullptr, &tensors) != FLASHCORE_UNSUPPORTED)
        return 1;
    std::printf("flashcore %s: %g\n", flashcore_version(), static_cast<double>(output[0]));
    return std::fabs(output[0] - 15.0F) < 1e-6F ? 0 : 1;
}
