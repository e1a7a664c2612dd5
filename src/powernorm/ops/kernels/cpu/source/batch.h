// BatchNorm, PowerNormV (without a mean) and BatchRenorm (with limits): batch statistics.
#pragma once

#include "features.h"

namespace POWERNORM_ISA {

// Rows of `statistics`.
enum { kMean, kVar, kScaleRow, kRatio, kShift, kCount };

// Rows of `sums`, in double: n; Σx², or Σx, squared deviations from the mean, n times its square.
enum { kTokens, kSquares, kTotal = kSquares, kWithin, kRaised };

// Mean, variance and count of all tokens into the statistics, the sums into `sums`.
template <class T>
int measure_batch(const PowernormTask& task, typename Accumulator<T>::type* statistics) {
  using A = typename Accumulator<T>::type;
  const int64_t n = task.features;
  const bool centered = has(task, kCentered);
  SumsMemory<A> memory(n, static_cast<int>(task.threads));
  if (!memory.ok()) return kNoMemory;
  ForwardPass<T> pass{task, nullptr, nullptr, nullptr, true};
  FeatureSums<A> sums{};
  if (centered) {
    run_pass<Pass::kMoments>(pass, false, &memory, &sums);
  } else {
    run_pass<Pass::kSquares>(pass, false, &memory, &sums);
  }
  const double count = sums.count, size = count < 1 ? 1 : count;
  for (int64_t c = 0; c < n; ++c) {
    const double mean = centered ? sums.mean[c] : 0;
    task.sums[kTokens * n + c] = count;
    if (centered) {
      task.sums[kTotal * n + c] = mean * count;
      task.sums[kRaised * n + c] = mean * (mean * count);
    }
    task.sums[(centered ? kWithin : kSquares) * n + c] = sums.square[c];
    statistics[kMean * n + c] = static_cast<A>(mean);
    statistics[kVar * n + c] = static_cast<A>(sums.square[c] / size);
    statistics[kCount * n + c] = static_cast<A>(count);
  }
  return kDone;
}

// The same from the sums of all processes, merged.
template <class A>
void read_sums(const PowernormTask& task, A* statistics) {
  const int64_t n = task.features;
  const bool centered = has(task, kCentered);
  for (int64_t c = 0; c < n; ++c) {
    const double count = task.sums[kTokens * n + c], size = count < 1 ? 1 : count;
    const double mean = centered ? task.sums[kTotal * n + c] / size : 0;
    const double squares = task.sums[(centered ? kWithin : kSquares) * n + c];
    statistics[kMean * n + c] = static_cast<A>(mean);
    statistics[kVar * n + c] = static_cast<A>(squares / size);
    statistics[kCount * n + c] = static_cast<A>(count);
  }
}

template <class A>
void complete_statistics(const PowernormTask& task, A* statistics) {
  const int64_t n = task.features;
  const bool centered = has(task, kCentered);
  const A* running_mean = static_cast<const A*>(task.mean);
  const A* running_var = static_cast<const A*>(task.var);
  const A* limits = static_cast<const A*>(task.limits);
  const A eps = static_cast<A>(task.eps);
  for (int64_t c = 0; c < n; ++c) {
    A &mean = statistics[kMean * n + c], &var = statistics[kVar * n + c];
    if (!(statistics[kCount * n + c] > 0)) {
      mean = centered ? running_mean[c] : 0;
      var = running_var[c];
    }
    if (!centered) mean = 0;
    statistics[kScaleRow * n + c] = reciprocal_root(var, task);
    A r = 1, d = 0;
    if (limits) {
      const A running_std = sqrt(running_var[c] + eps);
      r = clamp<A>(A(sqrt(var + eps)) / running_std, 1 / limits[0], limits[0]);
      d = clamp<A>((mean - running_mean[c]) / running_std, -limits[1], limits[1]);
    }
    statistics[kRatio * n + c] = r;
    statistics[kShift * n + c] = d;
  }
}

template <class T>
int batch_norm(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  const PowernormTask& task = *given;
  const int64_t n = task.features;
  A* statistics = static_cast<A*>(task.statistics);
  if (has(task, kMeasure)) {
    const int status = measure_batch<T>(task, statistics);
    if (status != kDone || !has(task, kFinish)) return status;
  } else {
    read_sums(task, statistics);
  }
  complete_statistics(task, statistics);
  FeatureVectors<A> vectors(n, 2);
  if (!vectors.ok()) return kNoMemory;
  A *slope = vectors[0], *offset = vectors[1];
  const View<A> weight = weight_of<A>(task), bias = bias_of<A>(task);
  for (int64_t c = 0; c < n; ++c) {
    slope[c] = statistics[kScaleRow * n + c] * statistics[kRatio * n + c] * weight[c];
    offset[c] = bias[c] + statistics[kShift * n + c] * weight[c];
  }
  ForwardPass<T> pass{task, statistics + kMean * n, slope, offset, false};
  // Backwards: the rows that the first pass saw last are still in the cache.
  run_pass<Pass::kScale>(pass, true, nullptr, nullptr);
  return kDone;
}

// Rows of the backward's `sums`.
enum { kGrad, kProduct, kGradMean, kGradVar };

template <class T>
int measure_batch_backward(const PowernormTask& task, const BackwardPass<T>& pass, double* sums) {
  using A = typename Accumulator<T>::type;
  const int64_t n = task.features;
  const A* statistics = static_cast<const A*>(task.statistics);
  const A* grads = static_cast<const A*>(task.grad_statistics);
  ProductMemory<A> memory(n, static_cast<int>(task.threads));
  if (!memory.ok()) return kNoMemory;
  run_pass<Back::kSums>(pass, false, &memory);
  const ProductSums<A> totals = memory.of(0);
  const View<A> weight = weight_of<A>(task);
  for (int64_t c = 0; c < n; ++c) {
    const double r = statistics[kRatio * n + c], d = statistics[kShift * n + c];
    const double product =
        (totals.product[c] + totals.padded_product[c]) * statistics[kScaleRow * n + c];
    sums[kGrad * n + c] = weight[c] * r * totals.grad[c];
    sums[kProduct * n + c] = weight[c] * r * product;
    sums[kGradMean * n + c] = grads ? grads[c] : A(0);
    sums[kGradVar * n + c] = grads ? grads[n + c] : A(0);
    static_cast<A*>(task.grad_weight)[c] = static_cast<A>(product * r + d * totals.grad[c]);
    static_cast<A*>(task.grad_bias)[c] = static_cast<A>(totals.grad[c]);
  }
  return kDone;
}

template <class T>
int batch_norm_backward(const PowernormTask* given) {
  using A = typename Accumulator<T>::type;
  const PowernormTask& task = *given;
  const int64_t n = task.features;
  const A* statistics = static_cast<const A*>(task.statistics);
  FeatureVectors<A> vectors(n, 3);
  Scratch<double> own(4 * n);
  if (!vectors.ok() || !own.data) return kNoMemory;
  A *direct = vectors[0], *slope = vectors[1], *offset = vectors[2];
  BackwardPass<T> pass{task, statistics + kMean * n, direct, slope, offset};
  double* sums = task.sums ? task.sums : own.data;
  if (has(task, kMeasure)) {
    const int status = measure_batch_backward<T>(task, pass, sums);
    if (status != kDone || !has(task, kFinish)) return status;
  }
  const View<A> weight = weight_of<A>(task);
  for (int64_t c = 0; c < n; ++c) {
    const double count = statistics[kCount * n + c], rstd = statistics[kScaleRow * n + c];
    double through_root = rstd * rstd * sums[kProduct * n + c];
    if (has(task, kFloor) && statistics[kVar * n + c] < task.eps) through_root = 0;
    direct[c] = static_cast<A>(weight[c] * statistics[kRatio * n + c] * rstd);
    // Without a token the running statistics were used: the direct path is all.
    if (!(count > 0)) continue;
    slope[c] = static_cast<A>((2 * sums[kGradVar * n + c] - through_root) / count);
    if (has(task, kCentered)) {
      offset[c] = static_cast<A>((sums[kGradMean * n + c] - rstd * sums[kGrad * n + c]) / count);
    }
  }
  run_pass<Back::kGradient>(pass, true, nullptr);
  return kDone;
}

}  // namespace POWERNORM_ISA
