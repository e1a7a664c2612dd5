// Running statistics by the sums over a batch, a feature at a time: as in ops/running_stats.py.
#pragma once

#include "lanes.h"
#include "tasks.h"

namespace POWERNORM_ISA {

// Share of Σ n μ² below which the spread between uses is rounding error.
constexpr double kRounding = 32 * 0x1p-52;

template <class B>
struct Running {
  const PowernormUpdate& update;
  const double* sums;  // (rows, features); the first row is the number of tokens

  template <class V>
  static bool finite(V v) {
    return v - v == 0;
  }

  // The new value of a buffer, and whether it is finite: else the buffer stays as it was.
  static B moved(B old, double value, double weight, int& nonfinite) {
    const double gap = value - old;
    // From the nearer end: old + gap would lose a value that is small beside the old one.
    const double mixed = weight < 0.5 ? old + weight * gap : value - (1 - weight) * gap;
    // Finite in the buffer's own type, which may be the narrower one.
    const B narrow = static_cast<B>(mixed);
    const bool good = finite(value) & finite(narrow);
    nonfinite |= !good;
    return good ? narrow : old;
  }

  int mean_and_var(double size, double weight) const {
    const int64_t n = update.features;
    const double *total = sums + n, *within = total + n, *raised = within + n;
    B* const __restrict mean = static_cast<B*>(update.first);
    B* const __restrict var = static_cast<B*>(update.second);
    const double share = 1 / size;
    const double var_share = update.unbiased && size > 1 ? 1 / (size - 1) : share;
    int nonfinite = 0;
    for (int64_t c = 0; c < n; ++c) {
      const double center = total[c] * share, between = raised[c] - center * total[c];
      const double squares = within[c] + (between > kRounding * raised[c] ? between : 0.0);
      mean[c] = moved(mean[c], center, weight, nonfinite);
      var[c] = moved(var[c], squares * var_share, weight, nonfinite);
    }
    return nonfinite;
  }

  int second_moment(double size, double weight) const {
    const double* squares = sums + update.features;
    B* const __restrict second = static_cast<B*>(update.second);
    const double share = 1 / size;
    int nonfinite = 0;
    for (int64_t c = 0; c < update.features; ++c) {
      second[c] = moved(second[c], squares[c] * share, weight, nonfinite);
    }
    return nonfinite;
  }

  int power(double size, double weight) const {
    const int64_t n = update.features;
    const double* squares = sums + n;
    const double *normalized = sums + 3 * n, *products = sums + 4 * n;
    B* const __restrict first = static_cast<B*>(update.first);
    B* const __restrict second = static_cast<B*>(update.second);
    const double share = 1 / size, gradient_size = sums[2 * n];
    const double gradient_share = 1 / (gradient_size < 1 ? 1 : gradient_size);
    const double momentum = update.backward_momentum * gradient_share;
    const double least = update.floored ? 0.0 : -HUGE_VAL;
    int nonfinite = 0;
    for (int64_t c = 0; c < n; ++c) {
      double factor = 1 - momentum * normalized[c];
      factor = factor < least ? least : factor;  // NaN stays NaN
      const double value = first[c] * factor + momentum * products[c];
      second[c] = moved(second[c], squares[c] * share, weight, nonfinite);
      first[c] = moved(first[c], value, 1, nonfinite);
    }
    return nonfinite;
  }

  void run() const {
    const double count = sums[0];
    if (!(count > 0)) return;
    double weight = update.momentum;
    if (update.average) {
      // Batches that were left out take no part, or the start value would stay in the average.
      const int64_t number =
          *update.num_batches_tracked + 2 - update.average - *update.num_nonfinite_batches;
      const double share = 1.0 / static_cast<double>(number < 1 ? 1 : number);
      weight = share < weight ? weight : share;
    }
    int nonfinite = 0;
    switch (update.kind) {
      case kMeanAndVar:
        nonfinite = mean_and_var(count, weight);
        break;
      case kSecondMoment:
        nonfinite = second_moment(count, weight);
        break;
      default:
        nonfinite = power(count, weight);
    }
    *update.num_batches_tracked += 1;
    *update.num_nonfinite_batches += nonfinite != 0;
  }
};

template <class B>
void run_update(const PowernormUpdate* update, const double* sums) {
  Running<B>{*update, sums}.run();
}

}  // namespace POWERNORM_ISA
