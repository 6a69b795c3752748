/*
 * flashcore for C++17, over flashcore.h and nothing else: plans that destroy themselves, exceptions with the library's words,
 * and containers in the place of addresses with numbers of bytes.
 *
 *     flashcore::AttentionProblem problem(batch, heads, length, head_dim, FLASHCORE_DTYPE_F32);
 *     problem.mask = FLASHCORE_MASK_CAUSAL;
 *     flashcore::Plan plan(problem, flashcore::Device::best());
 *     flashcore::Tensors tensors;                        // std::vector, std::array, arrays, anything with data() and size()
 *     tensors.set(FLASHCORE_QUERY, query).set(FLASHCORE_KEY, key).set(FLASHCORE_VALUE, value);
 *     tensors.set(FLASHCORE_OUTPUT, output);
 *     plan.run(tensors);
 *
 * Structs derive from those of flashcore.h, whose comments say what each field is. Plans may be moved, not copied, and used
 * by many threads at once.
 */
#ifndef FLASHCORE_HPP
#define FLASHCORE_HPP

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "flashcore.h"

namespace flashcore {

/* A call that failed: what() has the words of the library, status() the kind of failure, FLASHCORE_INVALID_ARGUMENT and so on. */
class Error : public std::runtime_error {
public:
  Error(flashcore_status_t status, const std::string &words) : std::runtime_error(words), status_(status) {}
  flashcore_status_t status() const noexcept { return status_; }
  const char *status_name() const noexcept { return flashcore_status_name(status_); }

private:
  flashcore_status_t status_;
};

/* Throws an Error unless the status is FLASHCORE_OK. */
inline void check(flashcore_status_t status)
{
  if (status != FLASHCORE_OK)
    throw Error(status, flashcore_last_error());
}

/* The version of the library, like "0.1.0"; FLASHCORE_VERSION is that of the header. */
inline const char *version() noexcept { return flashcore_version(); }

/* Where a plan computes. */
struct Device {
  int32_t kind;
  int32_t ordinal;

  static Device cpu() noexcept { return {FLASHCORE_DEVICE_CPU, 0}; }
  static Device cuda(int32_t ordinal = 0) noexcept { return {FLASHCORE_DEVICE_CUDA, ordinal}; }
  /* The first GPU that can be used, else the CPU. */
  static Device best() noexcept { return {FLASHCORE_DEVICE_BEST, 0}; }
};

/* FLASHCORE_DTYPE_* of a type of C++. Specialize it for a type of 16 or 8 bits. */
template <class T>
struct DType {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "say the dtype: there is none of this type");
  static constexpr int32_t value = sizeof(T) == 4 ? FLASHCORE_DTYPE_I32 : FLASHCORE_DTYPE_I64;
};

template <>
struct DType<float> {
  static constexpr int32_t value = FLASHCORE_DTYPE_F32;
};

template <>
struct DType<double> {
  static constexpr int32_t value = FLASHCORE_DTYPE_F64;
};

/* The tensors of a call, which must live as long as it. */
class Tensors {
public:
  /* The tensor of an operand, in the place of one that was set before. */
  Tensors &set(int32_t operand, int32_t dtype, const void *data, std::size_t bytes,
               std::initializer_list<uint64_t> strides = {})
  {
    for (flashcore_tensor_t &tensor : tensors_)
      if (tensor.operand == operand) {
        tensor = make(operand, dtype, data, bytes, strides);
        return *this;
      }
    return add(operand, dtype, data, bytes, strides);
  }

  template <class Container>
  Tensors &set(int32_t operand, const Container &container, std::initializer_list<uint64_t> strides = {})
  {
    using T = std::remove_cv_t<std::remove_reference_t<decltype(*std::data(container))>>;
    return set(operand, DType<T>::value, std::data(container), std::size(container) * sizeof(T), strides);
  }

  /* One more tensor of an operand: the next part of a merge. */
  Tensors &add(int32_t operand, int32_t dtype, const void *data, std::size_t bytes,
               std::initializer_list<uint64_t> strides = {})
  {
    tensors_.push_back(make(operand, dtype, data, bytes, strides));
    return *this;
  }

  const flashcore_tensor_t *data() const noexcept { return tensors_.data(); }
  std::size_t size() const noexcept { return tensors_.size(); }

private:
  static flashcore_tensor_t make(int32_t operand, int32_t dtype, const void *data, std::size_t bytes,
                                 std::initializer_list<uint64_t> strides)
  {
    flashcore_tensor_t tensor = {operand, dtype, const_cast<void *>(data), bytes, {}};
    std::size_t index = 0;
    for (uint64_t stride : strides) {
      if (index == std::size(tensor.strides))
        throw Error(FLASHCORE_INVALID_ARGUMENT, "a tensor has at most 5 strides");
      tensor.strides[index++] = stride;
    }
    return tensor;
  }

  std::vector<flashcore_tensor_t> tensors_;
};

/* The texts of the expressions of a problem. */
struct Expressions {
  std::string score_mod, mask_mod;

  /* Puts them into a struct of C, which they must outlive. */
  void put(flashcore_attention_problem_t &problem) const noexcept
  {
    if (!score_mod.empty())
      problem.score_mod = score_mod.c_str();
    if (!mask_mod.empty())
      problem.mask_mod = mask_mod.c_str();
  }
};

/* Attention: fields of flashcore_attention_problem_t, and the texts of its expressions. */
struct AttentionProblem : flashcore_attention_problem_t {
  AttentionProblem(uint64_t batch, uint64_t heads, uint64_t length, uint64_t head_dim, int32_t dtype)
      : flashcore_attention_problem_t()
  {
    check(flashcore_attention_problem_init(this, batch, heads, length, head_dim, dtype));
  }

  /* The change of each score, like "score + 0.1 * (query - key)". */
  AttentionProblem &set_score_mod(std::string text)
  {
    expressions.score_mod = std::move(text);
    return *this;
  }

  /* The keys that take part, like "aux_i32[query] == aux_i32[key]". */
  AttentionProblem &set_mask_mod(std::string text)
  {
    expressions.mask_mod = std::move(text);
    return *this;
  }

  /* Attention that continues from an output and an LSE. */
  AttentionProblem &set_continue()
  {
    base.operation = FLASHCORE_OPERATION_CONTINUE;
    return *this;
  }

  /* The struct of C; its texts are those of this value. */
  flashcore_attention_problem_t native() const noexcept
  {
    flashcore_attention_problem_t problem = *this;
    expressions.put(problem);
    return problem;
  }

  Expressions expressions;
};

/* Append and attention in one call (flash_attn_with_kvcache). */
struct KvCacheProblem : flashcore_kvcache_problem_t {
  KvCacheProblem(const AttentionProblem &attention, uint64_t new_keys)
      : flashcore_kvcache_problem_t(), expressions(attention.expressions)
  {
    check(flashcore_kvcache_problem_init(this, &attention, new_keys));
  }

  flashcore_kvcache_problem_t native() const noexcept
  {
    flashcore_kvcache_problem_t problem = *this;
    expressions.put(problem.attention);
    return problem;
  }

  Expressions expressions;
};

/* The append of tokens to a paged KV cache by slots. */
struct AppendProblem : flashcore_append_problem_t {
  AppendProblem(uint64_t token_count, uint64_t query_head_count, uint64_t key_head_count, uint64_t columns,
                uint64_t page_count, uint64_t rows_of_a_page, int32_t type)
      : flashcore_append_problem_t()
  {
    check(flashcore_append_problem_init(this, token_count, query_head_count, key_head_count, columns, page_count,
                                        rows_of_a_page, type));
  }

  flashcore_append_problem_t native() const noexcept { return *this; }
};

/* A merge of partial results by their log-sum-exp. */
struct MergeProblem : flashcore_merge_problem_t {
  MergeProblem(uint64_t part_count, uint64_t token_count, uint64_t head_count, uint64_t columns, int32_t type)
      : flashcore_merge_problem_t()
  {
    check(flashcore_merge_problem_init(this, part_count, token_count, head_count, columns, type));
  }

  flashcore_merge_problem_t native() const noexcept { return *this; }
};

/* A problem on a device, ready to be run any number of times. */
class Plan {
public:
  /* `config` names a GPU kernel config, one of flashcore_configs(). */
  template <class Problem>
  explicit Plan(const Problem &problem, Device device = Device::best(), const char *config = nullptr)
  {
    const auto native = problem.native();
    check(flashcore_plan_create(&native.base, device.kind, device.ordinal, config, &plan_));
  }
  Plan(Plan &&other) noexcept : plan_(std::exchange(other.plan_, nullptr)) {}
  Plan &operator=(Plan &&other) noexcept
  {
    std::swap(plan_, other.plan_);
    return *this;
  }
  Plan(const Plan &) = delete;
  Plan &operator=(const Plan &) = delete;
  ~Plan() { flashcore_plan_destroy(plan_); } // null is nothing to destroy

  flashcore_plan_t *get() const noexcept { return plan_; }

  void run(const Tensors &tensors) const { check(flashcore_run(plan_, tensors.data(), tensors.size())); }
  /* `stream` is a CUstream or cudaStream_t; null is the default stream. Returns before the launch has finished. */
  void launch(const Tensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_launch(plan_, stream, tensors.data(), tensors.size()));
  }
  /* Checks the lengths, pages and slots of a launch. */
  void check_launch(const Tensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_check(plan_, stream, tensors.data(), tensors.size()));
  }
  std::uint64_t workspace_bytes() const noexcept { return flashcore_plan_workspace_bytes(plan_); }
  std::string describe() const
  {
    const char *text = flashcore_plan_describe(plan_);
    if (!text)
      throw Error(FLASHCORE_INVALID_PLAN, flashcore_last_error());
    return text;
  }

private:
  flashcore_plan_t *plan_ = nullptr;
};

} // namespace flashcore

#endif // FLASHCORE_HPP
