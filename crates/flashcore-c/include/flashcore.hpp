/*
 * flashcore for C++17, over flashcore.h and nothing else: plans that destroy themselves, exceptions with the library's words,
 * and views of containers in the place of addresses with numbers of bytes.
 *
 *     flashcore::Problem problem(batch, heads, length, head_dim, FLASHCORE_DTYPE_F32);
 *     problem.mask = FLASHCORE_MASK_CAUSAL;
 *     flashcore::Inputs inputs(query, key, value);       // std::vector, std::array, arrays, anything with data() and size()
 *     flashcore::Outputs outputs(output);
 *     flashcore::Plan plan(problem, flashcore::Device::best());
 *     plan.run(inputs, outputs);
 *
 * Structs derive from those of flashcore.h, whose comments say what each field is. Plans may be moved, not copied, and used
 * by many threads at once.
 */
#ifndef FLASHCORE_HPP
#define FLASHCORE_HPP

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

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

/* A view of elements next to each other: a std::span of C++17, made from anything with data() and size(), or an array. */
template <class T>
class View {
public:
  constexpr View() noexcept = default;
  constexpr View(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
  template <class Container,
            class = std::enable_if_t<
                std::is_convertible_v<decltype(std::data(std::declval<Container &>())), T *> &&
                sizeof(*std::data(std::declval<Container &>())) == sizeof(T)>>
  constexpr View(Container &container) noexcept : data_(std::data(container)), size_(std::size(container)) {}

  constexpr T *data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }

private:
  T *data_ = nullptr;
  std::size_t size_ = 0;
};

/* The bytes of a container that is read. */
template <class Container>
flashcore_bytes_t bytes(const Container &container) noexcept
{
  return {std::data(container), std::size(container) * sizeof(*std::data(container))};
}

template <class T>
flashcore_bytes_t bytes(const T *data, std::size_t size) noexcept
{
  return {data, size * sizeof(T)};
}

/* The bytes of a container that is written. */
template <class Container>
flashcore_mut_bytes_t mut_bytes(Container &container) noexcept
{
  return {std::data(container), std::size(container) * sizeof(*std::data(container))};
}

template <class T>
flashcore_mut_bytes_t mut_bytes(T *data, std::size_t size) noexcept
{
  return {data, size * sizeof(T)};
}

/* One attention problem: fields of flashcore_problem_t, and the texts of its expressions. */
struct Problem : flashcore_problem_t {
  Problem(uint64_t batch, uint64_t heads, uint64_t length, uint64_t head_dim, int32_t dtype) : flashcore_problem_t()
  {
    check(flashcore_problem_init_sized(this, sizeof(flashcore_problem_t), batch, heads, length, head_dim, dtype));
  }

  /* The change of each score, like "score + 0.1 * (query - key)". */
  Problem &set_score_mod(std::string text)
  {
    score_mod_text = std::move(text);
    return *this;
  }

  /* The keys that take part, like "aux_i32[query] == aux_i32[key]". */
  Problem &set_mask_mod(std::string text)
  {
    mask_mod_text = std::move(text);
    return *this;
  }

  /* The struct of C; its texts are those of this value. */
  flashcore_problem_t native() const noexcept
  {
    flashcore_problem_t problem = *this;
    if (!score_mod_text.empty())
      problem.score_mod = score_mod_text.c_str();
    if (!mask_mod_text.empty())
      problem.mask_mod = mask_mod_text.c_str();
    return problem;
  }

private:
  std::string score_mod_text, mask_mod_text;
};

/* A struct of zeros that says its size. */
template <class Struct>
struct Sized : Struct {
  Sized() noexcept : Struct() { this->struct_size = sizeof(Struct); }
};

/* Addresses of all operands: of device memory for a launch, of the host's for a run. */
struct Tensors : Sized<flashcore_tensors_t> {
  Tensors() = default;
  Tensors(const void *query_at, const void *key_at, const void *value_at, void *output_at) noexcept
  {
    query = query_at;
    key = key_at;
    value = value_at;
    output = output_at;
  }
};

/* What is read, with numbers of bytes, which are checked. */
struct Inputs : Sized<flashcore_inputs_t> {
  Inputs() = default;
  template <class Query, class Key, class Value>
  Inputs(const Query &query_of, const Key &key_of, const Value &value_of) noexcept
  {
    query = bytes(query_of);
    key = bytes(key_of);
    value = bytes(value_of);
  }
};

/* What is written. */
struct Outputs : Sized<flashcore_outputs_t> {
  Outputs() = default;
  template <class Output>
  explicit Outputs(Output &output_of) noexcept
  {
    output = mut_bytes(output_of);
  }
  template <class Output, class Lse>
  Outputs(Output &output_of, Lse &lse_of) noexcept
  {
    output = mut_bytes(output_of);
    lse = mut_bytes(lse_of);
  }
};

using AppendTensors = Sized<flashcore_append_tensors_t>;
using AppendInputs = Sized<flashcore_append_inputs_t>;
using AppendOutputs = Sized<flashcore_append_outputs_t>;
using KvCacheTensors = Sized<flashcore_kvcache_tensors_t>;
using KvCacheInputs = Sized<flashcore_kvcache_inputs_t>;
using KvCaches = Sized<flashcore_kvcaches_t>;
using MergeTensors = Sized<flashcore_merge_tensors_t>;
using MergeInputs = Sized<flashcore_merge_inputs_t>;
using MergeOutputs = Sized<flashcore_merge_outputs_t>;

/* Owner of a plan of C. */
template <class Plan, flashcore_status_t (*destroy)(Plan *)>
class Handle {
public:
  Handle() noexcept = default;
  explicit Handle(Plan *plan) noexcept : plan_(plan) {}
  Handle(Handle &&other) noexcept : plan_(std::exchange(other.plan_, nullptr)) {}
  Handle &operator=(Handle &&other) noexcept
  {
    std::swap(plan_, other.plan_);
    return *this;
  }
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;
  ~Handle() { destroy(plan_); } // null is nothing to destroy

  Plan *get() const noexcept { return plan_; }

private:
  Plan *plan_ = nullptr;
};

/* Attention, ready to be run any number of times. */
class Plan : public Handle<flashcore_plan_t, flashcore_plan_destroy> {
public:
  /* `config` names a GPU kernel config, one of flashcore_configs(). */
  explicit Plan(const Problem &problem, Device device = Device::best(), const char *config = nullptr)
      : Handle(create(problem, device, config))
  {
  }

  void run(const Inputs &inputs, const Outputs &outputs) const
  {
    check(flashcore_plan_run_host(get(), &inputs, &outputs));
  }
  void run(const Tensors &tensors) const { check(flashcore_plan_run_tensors(get(), &tensors)); }
  /* `stream` is a CUstream or cudaStream_t; null is the default stream. Returns before the launch has finished. */
  void launch(const Tensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_plan_launch_tensors(get(), stream, &tensors));
  }
  void check_lengths(const Tensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_plan_check_lengths(get(), stream, &tensors));
  }
  std::uint64_t workspace_bytes() const noexcept { return flashcore_plan_workspace_bytes(get()); }
  std::string describe() const
  {
    const char *text = flashcore_plan_describe(get());
    if (!text)
      throw Error(FLASHCORE_INVALID_PLAN, flashcore_last_error());
    return text;
  }

private:
  static flashcore_plan_t *create(const Problem &problem, Device device, const char *config)
  {
    flashcore_plan_t *plan = nullptr;
    const flashcore_problem_t native = problem.native();
    check(flashcore_plan_create_with_config(&native, device.kind, device.ordinal, config, &plan));
    return plan;
  }
};

/* Attention over more keys, merged into an output and an LSE that are given. */
class Continue : public Handle<flashcore_continue_t, flashcore_continue_destroy> {
public:
  explicit Continue(const Problem &problem, Device device = Device::best()) : Handle(create(problem, device)) {}

  void run(const Inputs &inputs, const Outputs &outputs) const
  {
    check(flashcore_continue_run_host(get(), &inputs, &outputs));
  }
  void run(const Tensors &tensors) const { check(flashcore_continue_run_tensors(get(), &tensors)); }
  void launch(const Tensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_continue_launch(get(), stream, &tensors));
  }
  std::uint64_t workspace_bytes() const noexcept { return flashcore_continue_workspace_bytes(get()); }

private:
  static flashcore_continue_t *create(const Problem &problem, Device device)
  {
    flashcore_continue_t *plan = nullptr;
    const flashcore_problem_t native = problem.native();
    check(flashcore_continue_create(&native, device.kind, device.ordinal, &plan));
    return plan;
  }
};

/* The append before attention with a growing KV cache. */
struct KvCacheProblem : flashcore_kvcache_problem_t {
  KvCacheProblem(const Problem &attention, uint64_t new_keys) : flashcore_kvcache_problem_t()
  {
    const flashcore_problem_t native = attention.native();
    check(flashcore_kvcache_problem_init(this, &native, new_keys));
  }
};

/* Append and attention in one call (flash_attn_with_kvcache). */
class KvCache : public Handle<flashcore_kvcache_t, flashcore_kvcache_destroy> {
public:
  KvCache(const Problem &attention, const KvCacheProblem &problem, Device device = Device::best())
      : Handle(create(attention, problem, device))
  {
  }

  void run(const Inputs &attention, const KvCacheInputs &inputs, const KvCaches &caches, const Outputs &outputs) const
  {
    check(flashcore_kvcache_run_host(get(), &attention, &inputs, &caches, &outputs));
  }
  void run(const Tensors &attention, const KvCacheTensors &tensors) const
  {
    check(flashcore_kvcache_run_tensors(get(), &attention, &tensors));
  }
  void launch(const Tensors &attention, const KvCacheTensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_kvcache_launch(get(), stream, &attention, &tensors));
  }
  std::uint64_t workspace_bytes() const noexcept { return flashcore_kvcache_workspace_bytes(get()); }

private:
  static flashcore_kvcache_t *create(const Problem &attention, const KvCacheProblem &problem, Device device)
  {
    flashcore_kvcache_t *plan = nullptr;
    const flashcore_problem_t native = attention.native();
    check(flashcore_kvcache_create(&native, &problem, device.kind, device.ordinal, &plan));
    return plan;
  }
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
};

class Append : public Handle<flashcore_append_t, flashcore_append_destroy> {
public:
  explicit Append(const AppendProblem &problem, Device device = Device::best()) : Handle(create(problem, device)) {}

  void run(const AppendInputs &inputs, const AppendOutputs &outputs) const
  {
    check(flashcore_append_run_host(get(), &inputs, &outputs));
  }
  void launch(const AppendTensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_append_launch(get(), stream, &tensors));
  }

private:
  static flashcore_append_t *create(const AppendProblem &problem, Device device)
  {
    flashcore_append_t *plan = nullptr;
    check(flashcore_append_create(&problem, device.kind, device.ordinal, &plan));
    return plan;
  }
};

/* A merge of partial results by their log-sum-exp. */
struct MergeProblem : flashcore_merge_problem_t {
  MergeProblem(uint64_t part_count, uint64_t token_count, uint64_t head_count, uint64_t columns, int32_t type)
      : flashcore_merge_problem_t()
  {
    check(flashcore_merge_problem_init(this, part_count, token_count, head_count, columns, type));
  }
};

class Merge : public Handle<flashcore_merge_t, flashcore_merge_destroy> {
public:
  explicit Merge(const MergeProblem &problem, Device device = Device::best()) : Handle(create(problem, device)) {}

  void run(const MergeInputs &inputs, const MergeOutputs &outputs) const
  {
    check(flashcore_merge_run_host(get(), &inputs, &outputs));
  }
  void launch(const MergeTensors &tensors, void *stream = nullptr) const
  {
    check(flashcore_merge_launch(get(), stream, &tensors));
  }

private:
  static flashcore_merge_t *create(const MergeProblem &problem, Device device)
  {
    flashcore_merge_t *plan = nullptr;
    check(flashcore_merge_create(&problem, device.kind, device.ordinal, &plan));
    return plan;
  }
};

} // namespace flashcore

#endif // FLASHCORE_HPP
