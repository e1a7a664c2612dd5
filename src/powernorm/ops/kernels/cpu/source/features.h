// What the operations share that is done once per feature: small vectors and their memory.
#pragma once

#include "token.h"

namespace POWERNORM_ISA {

// Vectors of one call, (count, features), zero at the start.
template <class A>
struct FeatureVectors {
  Scratch<A> memory;
  int64_t features;

  FeatureVectors(int64_t features, int count) : memory(features * count), features(features) {
    if (memory.data) memset(memory.data, 0, features * count * sizeof(A));
  }
  bool ok() const { return memory.data != nullptr; }
  A* operator[](int i) const { return memory.data + i * features; }
};

template <class A>
struct View {
  const A* data;
  A absent;
  A operator[](int64_t c) const { return data ? data[c] : absent; }
};

template <class A>
inline View<A> weight_of(const PowernormTask& task) {
  return {static_cast<const A*>(task.weight), 1};
}

template <class A>
inline View<A> bias_of(const PowernormTask& task) {
  return {static_cast<const A*>(task.bias), 0};
}

// In the type itself: the compiler makes vectors of it.
inline float root(float v) { return __builtin_sqrtf(v); }
inline double root(double v) { return __builtin_sqrt(v); }

template <class A>
inline A reciprocal_root(A second_moment, const PowernormTask& task) {
  const A eps = static_cast<A>(task.eps);
  if (has(task, kFloor)) return 1 / root(second_moment < eps ? eps : second_moment);
  return 1 / root(second_moment + eps);
}

template <class A>
inline A clamp(A v, A low, A high) {
  return v < low ? low : (v > high ? high : v);  // NaN stays NaN
}

}  // namespace POWERNORM_ISA
