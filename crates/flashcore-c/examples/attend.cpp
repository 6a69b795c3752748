/*
 * Attention with a score_mod and a mask_mod from C++17, on the first GPU if there is one, else on the CPU; checked against
 * plain loops.
 *
 *     scripts/install-c.sh "$PWD/prefix"
 *     c++ -std=c++17 -Iprefix/include crates/flashcore-c/examples/attend.cpp -Lprefix/lib -lflashcore
 *     LD_LIBRARY_PATH=prefix/lib ./a.out
 */
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <utility>
#include <vector>

#include "flashcore.hpp"

namespace {

constexpr std::size_t HEADS = 2, LENGTH = 203, DIM = 16;

/* Numbers between -1 and 1 without a pattern. */
std::vector<float> random(unsigned seed, std::size_t count)
{
  std::vector<float> numbers(count);
  for (float &number : numbers) {
    seed = seed * 1664525u + 1013904223u;
    number = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return numbers;
}

} // namespace

int main()
try {
  std::printf("flashcore %s, header %s\n", flashcore::version(), FLASHCORE_VERSION);
  const auto query = random(1, HEADS * LENGTH * DIM), key = random(2, HEADS * LENGTH * DIM),
             value = random(3, HEADS * LENGTH * DIM);
  std::vector<float> output(HEADS * LENGTH * DIM), lse(HEADS * LENGTH);
  const std::vector<float> slopes = {0.02f, -0.01f};
  std::vector<int32_t> document(LENGTH);
  for (std::size_t position = 0; position < LENGTH; position++)
    document[position] = static_cast<int32_t>(position / 70);

  flashcore::AttentionProblem problem(1, HEADS, LENGTH, DIM, FLASHCORE_DTYPE_F32);
  problem.lse = 1;
  problem.set_score_mod("score + aux_f32[head] * (query - key)").set_mask_mod("documents && query >= key");
  problem.aux_f32 = slopes.size();
  problem.aux_i32 = document.size();

  flashcore::Plan plan(problem, flashcore::Device::best());
  std::printf("%s\n", plan.describe().c_str());
  flashcore::Tensors tensors;
  tensors.set(FLASHCORE_QUERY, query).set(FLASHCORE_KEY, key).set(FLASHCORE_VALUE, value);
  tensors.set(FLASHCORE_AUX_F32, slopes).set(FLASHCORE_AUX_I32, document);
  tensors.set(FLASHCORE_OUTPUT, output).set(FLASHCORE_LSE, lse);
  plan.run(tensors);

  double largest = 0;
  for (std::size_t head = 0; head < HEADS; head++)
    for (std::size_t row = 0; row < LENGTH; row++) {
      const auto at = [head](const std::vector<float> &tensor, std::size_t of, std::size_t column) {
        return static_cast<double>(tensor[(head * LENGTH + of) * DIM + column]);
      };
      double sum = 0, expected[DIM] = {};
      for (std::size_t other = 0; other <= row; other++) {
        if (document[other] != document[row])
          continue;
        double score = 0;
        for (std::size_t column = 0; column < DIM; column++)
          score += at(query, row, column) * at(key, other, column);
        const double weight = std::exp(score * problem.scale + slopes[head] * static_cast<double>(row - other));
        sum += weight;
        for (std::size_t column = 0; column < DIM; column++)
          expected[column] += weight * at(value, other, column);
      }
      for (std::size_t column = 0; column < DIM; column++)
        largest = std::max(largest, std::fabs(at(output, row, column) - expected[column] / sum));
      largest = std::max(largest, std::fabs(lse[head * LENGTH + row] - std::log(sum)));
    }
  std::printf("largest error %g\n", largest);
  if (!(largest < 1e-4))
    return 1;

  /* A plan that moved gives the same, in other memory. */
  std::vector<float> again(output.size()), again_lse(lse.size());
  flashcore::Plan moved = std::move(plan);
  moved.run(tensors.set(FLASHCORE_OUTPUT, again).set(FLASHCORE_LSE, again_lse));
  if (again != output || again_lse != lse)
    return 1;

  /* What is wrong is an exception with the words of the library. */
  try {
    flashcore::Plan wrong(problem.set_score_mod("score + distances"));
    return 1;
  } catch (const flashcore::Error &error) {
    std::printf("%s: %.60s...\n", error.status_name(), error.what());
  }
  return 0;
} catch (const flashcore::Error &error) {
  std::fprintf(stderr, "%s: %s\n", error.status_name(), error.what());
  return 1;
}
