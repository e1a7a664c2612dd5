// PowerNorm by running statistics, and the same map with constants (evaluation).
#pragma once

#include "features.h"

namespace POWERNORM_ISA {

// Rows of PowerNorm's `statistics`.
enum { kForwardScale, kBackwardScale, kGradientMoment };

inline bool needs_batch(const PowernormTask& task) {
  return has(task, kUseBatch) || has(task, kReleased) || task.max_ratio > 0;
}

template <class A>
void store_squares(const PowernormTask& task, const FeatureSums<A>& sums) {
  for (int64_t c = 0; c < task.features; ++c) {
    task.sums[c] = sums.count;
    task.sums[task.features + c] = sums.square[c];
  }
}

// The second moment that the forward uses, and the one that divides the gradient.
template <class A>
void choose_moments(const PowernormTask& task, int64_t c, A& used, A& for_gradient) {
  const A running = static_cast<const A*>(task.var)[c];
  used = for_gradient = running;
  if (!needs_batch(task)) return;
  const double count = task.sums[c];
  const A batch = count > 0 ? static_cast<A>(task.sums[task.features + c] / count) : running;
  const A bound = static_cast<A>(task.max_ratio * task.max_ratio);
  if (has(task, kUseBatch)) {
    used = batch;
  } else if (task.max_ratio > 0) {
    used = clamp<A>(running, batch / bound, batch * bound);
  }
  for_gradient = has(task, kReleased) ? batch : used;
}

template <class T>
int power_norm(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  const PowernormTask& task = *given;
  const int64_t n = task.features;
  const bool two_passes = needs_batch(task);
  FeatureVectors<A> vectors(n, 3);
  SumsMemory<A> memory(n, static_cast<int>(task.threads));
  if (!vectors.ok() || !memory.ok()) return kNoMemory;
  A *center = vectors[0], *slope = vectors[1], *offset = vectors[2];
  ForwardPass<T> pass{task, center, slope, offset, true};
  FeatureSums<A> sums{};
  if (two_passes && has(task, kMeasure)) {
    run_pass<Pass::kSquares>(pass, false, &memory, &sums);
    store_squares(task, sums);
    if (!has(task, kFinish)) return kDone;
  }
  A* statistics = static_cast<A*>(task.statistics);
  const View<A> weight = weight_of<A>(task), bias = bias_of<A>(task);
  const A *running = static_cast<const A*>(task.var), eps = static_cast<A>(task.eps);
  A *forward = statistics + kForwardScale * n, *backward = statistics + kBackwardScale * n;
  memcpy(statistics + kGradientMoment * n, task.gradient_moment, n * sizeof(A));
  if (two_passes) {
    for (int64_t c = 0; c < n; ++c) choose_moments(task, c, forward[c], backward[c]);
    for (int64_t c = 0; c < n; ++c) backward[c] = 1 / root(backward[c] + eps);
    for (int64_t c = 0; c < n; ++c) forward[c] = 1 / root(forward[c] + eps);
  } else {
    for (int64_t c = 0; c < n; ++c) forward[c] = 1 / root(running[c] + eps);
    memcpy(backward, forward, n * sizeof(A));
  }
  for (int64_t c = 0; c < n; ++c) {
    slope[c] = forward[c] * weight[c];
    offset[c] = bias[c];
  }
  if (two_passes) {
    pass.fresh = false;
    run_pass<Pass::kScale>(pass, true, nullptr, nullptr);
  } else {
    run_pass<Pass::kScaleAndSquares>(pass, false, &memory, &sums);
    store_squares(task, sums);
  }
  return kDone;
}

// Sum of squares over all positions, padding too, for the released variant.
template <class T>
int square_all(const PowernormTask& task, double* squares) {
  using A = typename Accumulator<T>::type;
  SumsMemory<A> memory(task.features, static_cast<int>(task.threads));
  if (!memory.ok()) return kNoMemory;
  FeatureSums<A> sums{};
  run_pass<Pass::kSquares>(ForwardPass<T>{task, nullptr, nullptr, nullptr, false}, false, &memory,
                           &sums);
  memcpy(squares, sums.square, task.features * sizeof(double));
  return kDone;
}

template <class T>
int power_norm_backward(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  PowernormTask task = *given;
  const int64_t n = task.features;
  const bool released = has(task, kReleased);
  if (released) task.mask = nullptr;
  FeatureVectors<A> vectors(n, 4);
  ProductMemory<A> memory(n, static_cast<int>(task.threads));
  Scratch<double> squares(n);
  if (!vectors.ok() || !memory.ok() || !squares.data) return kNoMemory;
  A *center = vectors[0], *direct = vectors[1], *slope = vectors[2], *offset = vectors[3];
  const A* statistics = static_cast<const A*>(task.statistics);
  const View<A> weight = weight_of<A>(task);
  for (int64_t c = 0; c < n; ++c) {
    const A rstd = statistics[c], backward_rstd = statistics[kBackwardScale * n + c];
    direct[c] = weight[c] * backward_rstd;
    slope[c] = -statistics[kGradientMoment * n + c] * rstd * backward_rstd;
    squares.data[c] = task.sums[n + c];
  }
  if (released) {
    const int status = square_all<T>(task, squares.data);
    if (status != kDone) return status;
  }
  run_pass<Back::kGradientAndSums>(BackwardPass<T>{task, center, direct, slope, offset}, false,
                                   &memory);
  const ProductSums<A> sums = memory.of(0);
  for (int64_t c = 0; c < n; ++c) {
    const double rstd = statistics[c];
    task.carried[c] = task.sums[c];
    task.carried[n + c] = task.sums[n + c];
    task.carried[2 * n + c] = released ? static_cast<double>(task.tokens) : task.sums[c];
    task.carried[3 * n + c] = rstd * rstd * squares.data[c];
    task.carried[4 * n + c] = weight[c] * rstd * sums.product[c];
    static_cast<A*>(task.grad_weight)[c] =
        static_cast<A>(rstd * (sums.product[c] + sums.padded_product[c]));
    static_cast<A*>(task.grad_bias)[c] = static_cast<A>(sums.grad[c]);
  }
  return kDone;
}

template <class T>
int static_norm(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  const PowernormTask& task = *given;
  const int64_t n = task.features;
  FeatureVectors<A> vectors(n, 2);
  if (!vectors.ok()) return kNoMemory;
  A *slope = vectors[0], *offset = vectors[1];
  A* statistics = static_cast<A*>(task.statistics);
  const View<A> weight = weight_of<A>(task), bias = bias_of<A>(task);
  const View<A> mean = {static_cast<const A*>(task.mean), 0};
  for (int64_t c = 0; c < n; ++c) {
    const A rstd = reciprocal_root(static_cast<const A*>(task.var)[c], task);
    statistics[c] = mean[c];
    statistics[n + c] = rstd;
    slope[c] = rstd * weight[c];
    offset[c] = bias[c];
  }
  run_pass<Pass::kScale>(ForwardPass<T>{task, statistics, slope, offset, true}, false, nullptr,
                         nullptr);
  return kDone;
}

// The pass over all tokens; with a mask of all of them, as padding that may hold anything.
template <class T>
void static_gradients(const PowernormTask& task, const typename Accumulator<T>::type* direct,
                      const typename Accumulator<T>::type* zeros,
                      ProductMemory<typename Accumulator<T>::type>* memory) {
  using A = typename Accumulator<T>::type;
  const A* statistics = static_cast<const A*>(task.statistics);
  run_pass<Back::kGradientAndSums>(BackwardPass<T>{task, statistics, direct, zeros, zeros}, false,
                                   memory);
}

inline bool all_finite(const double* values, int64_t size) {
  double gap = 0;
  for (int64_t i = 0; i < size; ++i) gap += values[i] - values[i];
  return gap == 0;
}

template <class T>
int static_norm_backward(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  PowernormTask task = *given;
  const int64_t n = task.features;
  const int threads = static_cast<int>(task.threads);
  FeatureVectors<A> vectors(n, 2);
  ProductMemory<A> memory(n, threads);
  if (!vectors.ok() || !memory.ok()) return kNoMemory;
  A *direct = vectors[0], *zeros = vectors[1];
  const A* statistics = static_cast<const A*>(task.statistics);
  const View<A> weight = weight_of<A>(task);
  for (int64_t c = 0; c < n; ++c) direct[c] = weight[c] * statistics[n + c];
  static_gradients<T>(task, direct, zeros, &memory);
  const ProductSums<A> sums = memory.of(0);
  const double* products = sums.product;
  if (!all_finite(products, n)) {
    // Some token is not finite. No mask says which are padding: where no gradient arrives none
    // leaves.
    Scratch<uint8_t> mask(task.tokens);
    if (!mask.data) return kNoMemory;
    memset(mask.data, 1, task.tokens);
    task.mask = mask.data;
    memory.clear();
    static_gradients<T>(task, direct, zeros, &memory);
    products = sums.padded_product;
  }
  for (int64_t c = 0; c < n; ++c) {
    static_cast<A*>(task.grad_weight)[c] = static_cast<A>(statistics[n + c] * products[c]);
    static_cast<A*>(task.grad_bias)[c] = static_cast<A>(sums.grad[c]);
  }
  return kDone;
}

}  // namespace POWERNORM_ISA
