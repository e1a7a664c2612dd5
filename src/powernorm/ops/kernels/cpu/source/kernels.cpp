// All operations for one instruction set; compiled once for each (building.py), with POWERNORM_ISA
// its name.
#include "batch.h"
#include "power.h"
#include "running.h"

namespace POWERNORM_ISA {

template <class T>
int token_norm(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  const PowernormTask& task = *given;
  const int64_t n = task.features, blocks = count_blocks(task.tokens);
  const int threads = static_cast<int>(task.threads);
  FeatureVectors<A> vectors(n, 2);
  if (!vectors.ok()) return kNoMemory;
  const bool affine = task.weight || task.bias;
  if (affine) {
    const View<A> weight = weight_of<A>(task), bias = bias_of<A>(task);
    for (int64_t c = 0; c < n; ++c) {
      vectors[0][c] = weight[c];
      vectors[1][c] = bias[c];
    }
  }
  const TokenForward<T> rows{task, affine ? vectors[0] : nullptr, affine ? vectors[1] : nullptr};
  in_parallel(threads, [&](int thread) {
    const Range range = share_of(blocks, thread, threads);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const BlockRows block(nullptr, i, task.tokens);
      for_rows(block.valid, block.num_valid, rows);
    }
    finish_streams();
  });
  return kDone;
}

template <class T>
int token_norm_backward(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  const PowernormTask& task = *given;
  const int64_t n = task.features, blocks = count_blocks(task.tokens);
  const int threads = static_cast<int>(task.threads);
  const bool affine = task.grad_weight != nullptr;
  FeatureVectors<A> vectors(n, 1);
  ProductMemory<A> memory(affine ? n : 0, threads);
  if (!vectors.ok() || !memory.ok()) return kNoMemory;
  const View<A> weight = weight_of<A>(task);
  for (int64_t c = 0; affine && c < n; ++c) vectors[0][c] = weight[c];
  const BackwardPass<T> pass{task, nullptr, nullptr, nullptr, nullptr};
  const TokenBackward<T> rows{task, affine ? vectors[0] : nullptr, pass};
  in_parallel(threads, [&](int thread) {
    ProductSums<A> sums = memory.of(thread);
    const Range range = share_of(blocks, thread, threads);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const BlockRows block(nullptr, i, task.tokens);
      for_rows(block.valid, block.num_valid,
               [&](auto count, const int64_t* which) { rows(count, which, &sums); });
      if (affine) pass.flush(sums, sums.product);
    }
    finish_streams();
  });
  if (!affine) return kDone;
  add_threads(memory, n, threads);
  const ProductSums<A> sums = memory.of(0);
  for (int64_t c = 0; c < n; ++c) {
    static_cast<A*>(task.grad_weight)[c] = static_cast<A>(sums.product[c]);
    static_cast<A*>(task.grad_bias)[c] = static_cast<A>(sums.grad[c]);
  }
  return kDone;
}

// Leaves the request to write past the cache standing only where the addresses allow it: vectors
// begin anew with every group.
template <int (*F)(const PowernormTask*), class T>
int checked(const PowernormTask* given) {
  PowernormTask task = *given;
  const void* output = task.grad_x ? task.grad_x : task.y;
  const int64_t size = task.groups ? task.features / task.groups : task.features;
  if (!can_stream<T>(output, size)) task.flags &= ~static_cast<int64_t>(kStream);
  return F(&task);
}

#define POWERNORM_TYPES(f) {checked<f<float>, float>, checked<f<bfloat16>, bfloat16>, checked<f<double>, double>}
#define POWERNORM_TEXT(x) #x
#define POWERNORM_NAME(x) POWERNORM_TEXT(x)
#define POWERNORM_JOIN(a, b) a##b
#define POWERNORM_TABLE(isa) POWERNORM_JOIN(powernorm_table_, isa)

}  // namespace POWERNORM_ISA

extern "C" const PowernormTable* POWERNORM_TABLE(POWERNORM_ISA)(void) {
  using namespace POWERNORM_ISA;
  static const PowernormTable table = {
      POWERNORM_NAME(POWERNORM_ISA),
      {POWERNORM_TYPES(batch_norm), POWERNORM_TYPES(batch_norm_backward),
       POWERNORM_TYPES(power_norm), POWERNORM_TYPES(power_norm_backward),
       POWERNORM_TYPES(token_norm), POWERNORM_TYPES(token_norm_backward),
       POWERNORM_TYPES(static_norm), POWERNORM_TYPES(static_norm_backward)},
      {run_update<float>, run_update<double>}};
  return &table;
}
