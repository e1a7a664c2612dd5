// One pass over the tokens on the way forward: statistics of the features, the affine map, or both.
#pragma once

#include "rows.h"

namespace POWERNORM_ISA {

enum class Pass { kPrepare, kMoments, kSquares, kScale, kScaleAndSquares };

constexpr bool writes(Pass pass) { return pass == Pass::kScale || pass == Pass::kScaleAndSquares; }

// Sums over the valid tokens of one thread, in double, fed by short sums in the token's accumulator.
template <class A>
struct FeatureSums {
  double count;
  double* mean;    // of the tokens so far
  double* square;  // centred (moments) or plain sum of squares
  A* shift;        // what the short sums are taken about: the mean so far, rounded
  A* first;        // short sums of (h - shift), and of its square
  A* second;
};

template <class T>
struct ForwardPass {
  using A = typename Accumulator<T>::type;

  const PowernormTask& task;
  const A *center, *slope, *offset;  // y = (h - center) * slope + offset
  bool fresh;                        // first pass: add the residual, compute the scales

  const T* row_of(const void* data, int64_t stride, int64_t t) const {
    return static_cast<const T*>(data) + t * stride;
  }

  // Adds the residual and computes GroupScaling's factors.
  template <int R>
  void prepare(RowCount<R> count, const int64_t* rows) const {
    const int64_t size = task.features / task.groups;
    for (int64_t g = 0; g < task.groups; ++g) {
      RowSum<A> squares[R];
      for_features<A>(g * size, (g + 1) * size, [&](auto lanes, int64_t c) {
        using L = decltype(lanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          ask_for(row_of(task.x, task.x_stride, count.next[r]) + c, false);
          auto h = L::load(row_of(task.x, task.x_stride, rows[r]) + c);
          if (task.residual) {
            h = h + L::load(row_of(task.residual, task.residual_stride, rows[r]) + c);
            T* total = static_cast<T*>(task.total) + rows[r] * task.features + c;
            L::store(total, h);
            h = L::load(total);
          }
          squares[r].add(lanes, h * h);
        }
      });
      for (int r = 0; r < R; ++r) {
        A mean = squares[r].total() / static_cast<A>(size);
        static_cast<A*>(task.scales)[rows[r] * task.groups + g] =
            1 / sqrt(mean + static_cast<A>(task.eps));
      }
    }
  }

  template <Pass P, bool Grouped, bool Add, int R>
  void run(RowCount<R> count, const int64_t* rows, FeatureSums<A>* sums) const {
    const bool from_total = task.residual && !Add;
    const bool streams = has(task, kStream);
    const T *x[R], *ahead[R], *residual[R];
    T *y[R], *total[R];
    for (int r = 0; r < R; ++r) {
      const void* source = from_total ? task.total : task.x;
      const int64_t stride = from_total ? task.features : task.x_stride;
      x[r] = row_of(source, stride, rows[r]);
      ahead[r] = row_of(source, stride, count.next[r]);
      residual[r] = Add ? row_of(task.residual, task.residual_stride, rows[r]) : nullptr;
      total[r] = Add ? static_cast<T*>(task.total) + rows[r] * task.features : nullptr;
      y[r] = writes(P) ? static_cast<T*>(task.y) + rows[r] * task.features : nullptr;
    }
    // In registers: the compiler must think that a store could change a pointer in memory.
    A* const shift = sums ? sums->shift : nullptr;
    A* const firsts = sums ? sums->first : nullptr;
    A* const seconds = sums ? sums->second : nullptr;
    const A *const center = this->center, *const slope = this->slope, *const offset = this->offset;
    const int64_t groups = Grouped ? task.groups : 1;
    const int64_t size = task.features / groups;
    for (int64_t g = 0; g < groups; ++g) {
      A s[R];
      for (int r = 0; r < R; ++r) {
        s[r] = Grouped ? static_cast<const A*>(task.scales)[rows[r] * groups + g] : A(1);
      }
      for_features<A>(g * size, (g + 1) * size, [&](auto lanes, int64_t c) {
        using L = decltype(lanes);
        using V = typename L::value;
        V middle{}, steep{}, above{}, first{}, second{};
        if constexpr (P == Pass::kMoments) {
          middle = L::load(shift + c);
          first = L::load(firsts + c);
        }
        if constexpr (P != Pass::kPrepare && P != Pass::kScale) second = L::load(seconds + c);
        if constexpr (writes(P)) {
          middle = L::load(center + c);
          steep = L::load(slope + c);
          above = L::load(offset + c);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          if constexpr (!Grouped) ask_for(ahead[r] + c, writes(P) && streams);
          V h = L::load(x[r] + c);
          if constexpr (Add) {
            h = rounded<T>(lanes, h + L::load(residual[r] + c));
            L::store(total[r] + c, h);
          }
          if constexpr (Grouped) h = h * s[r];
          V d = h - middle;
          if constexpr (P == Pass::kMoments) {
            first += d;
            second += d * d;
          }
          if constexpr (P == Pass::kSquares || P == Pass::kScaleAndSquares) second += h * h;
          if constexpr (writes(P)) put(lanes, y[r] + c, d * steep + above, streams);
        }
        if constexpr (P == Pass::kMoments) L::store(firsts + c, first);
        if constexpr (P != Pass::kPrepare && P != Pass::kScale) L::store(seconds + c, second);
      });
    }
  }

  // The same after what the first pass has to do.
  template <Pass P, int R>
  void dispatch(RowCount<R> count, const int64_t* rows, FeatureSums<A>* sums) const {
    if (task.groups) {
      if (fresh) prepare(count, rows);
      if constexpr (P != Pass::kPrepare) run<P, true, false>(count, rows, sums);
    } else if (task.residual && fresh) {
      run<P, false, true>(count, rows, sums);
    } else if constexpr (P != Pass::kPrepare) {
      run<P, false, false>(count, rows, sums);
    }
  }

  // h of one row as it is normalised, for the first shift.
  void start_shift(int64_t row, FeatureSums<A>& sums) const {
    dispatch<Pass::kPrepare>(RowCount<1>{&row}, &row, nullptr);
    const T* h = task.residual ? static_cast<const T*>(task.total) + row * task.features
                               : row_of(task.x, task.x_stride, row);
    const int64_t size = task.groups ? task.features / task.groups : 1;
    for (int64_t c = 0; c < task.features; ++c) {
      A s = task.groups ? static_cast<const A*>(task.scales)[row * task.groups + c / size] : A(1);
      sums.shift[c] = Single<A>::load(h + c) * s;
    }
  }

  // Takes the short sums of n more tokens into the long ones.
  void flush(FeatureSums<A>& sums, int n, bool moments) const {
    const double share = moments ? n / (sums.count + n) : 0;
    for (int64_t c = 0; c < task.features; ++c) {
      double second = sums.second[c];
      if (moments) {
        double first = sums.first[c];
        double within = second - first * first / n;
        double delta = sums.shift[c] + first / n - sums.mean[c];
        // Not `max`: a NaN shall stay.
        sums.square[c] += (within < 0 ? 0 : within) + delta * delta * sums.count * share;
        sums.mean[c] += delta * share;
        sums.shift[c] = static_cast<A>(sums.mean[c]);
        sums.first[c] = 0;
      } else {
        sums.square[c] += second;
      }
      sums.second[c] = 0;
    }
    sums.count += n;
  }

  // Valid rows by pass P, padding by what of it concerns padding; a thread's share of the blocks.
  template <Pass P>
  void blocks(Range range, bool backwards, FeatureSums<A>* sums) const {
    constexpr Pass kPadding = writes(P) ? Pass::kScale : Pass::kPrepare;
    constexpr bool kSums = P != Pass::kScale;
    for (int64_t i = range.begin; i < range.end; ++i) {
      BlockRows rows(task.mask, backwards ? range.end - 1 - (i - range.begin) : i, task.tokens);
      if (P == Pass::kMoments && rows.num_valid && sums->count == 0) {
        start_shift(rows.valid[0], *sums);
      }
      for_rows(rows.valid, rows.num_valid, [&](auto count, const int64_t* which) {
        dispatch<P>(count, which, sums);
      });
      for_rows(rows.padding, rows.num_padding, [&](auto count, const int64_t* which) {
        dispatch<kPadding>(count, which, nullptr);
      });
      if (kSums && rows.num_valid) flush(*sums, rows.num_valid, P == Pass::kMoments);
    }
  }
};

// Memory of one call's sums, for each thread.
template <class A>
struct SumsMemory {
  Scratch<double> wide;
  Scratch<A> narrow;
  Scratch<double> counts;
  int64_t features;

  SumsMemory(int64_t features, int threads)
      : wide(2 * features * threads),
        narrow(3 * features * threads),
        counts(threads),
        features(features) {
    if (!ok()) return;
    memset(wide.data, 0, 2 * features * threads * sizeof(double));
    memset(narrow.data, 0, 3 * features * threads * sizeof(A));
  }
  bool ok() const { return wide.data && narrow.data && counts.data; }
  FeatureSums<A> of(int thread) const {
    double* w = wide.data + 2 * features * thread;
    A* n = narrow.data + 3 * features * thread;
    return {0, w, w + features, n, n + features, n + 2 * features};
  }
};

// Merges two sets of tokens (Chan et al.): `into` takes what `from` has.
template <class A>
inline void merge(FeatureSums<A>& into, const FeatureSums<A>& from, int64_t features, bool moments) {
  if (from.count == 0) return;
  const double share = from.count / (into.count + from.count);
  for (int64_t c = 0; c < features; ++c) {
    double delta = from.mean[c] - into.mean[c];
    into.square[c] += from.square[c] + (moments ? delta * delta * into.count * share : 0);
    into.mean[c] += delta * share;
  }
  into.count += from.count;
}

// Runs a pass over all tokens; where it sums, `result` has the sums of all threads afterwards.
template <Pass P, class T>
inline void run_pass(const ForwardPass<T>& pass, bool backwards,
                     SumsMemory<typename Accumulator<T>::type>* memory,
                     FeatureSums<typename Accumulator<T>::type>* result) {
  using A = typename Accumulator<T>::type;
  const int threads = static_cast<int>(pass.task.threads);
  const int64_t blocks = count_blocks(pass.task.tokens);
  in_parallel(threads, [&](int thread) {
    FeatureSums<A> sums{};
    if (memory) sums = memory->of(thread);
    pass.template blocks<P>(share_of(blocks, thread, threads), backwards, &sums);
    finish_streams();
    if (memory) memory->counts.data[thread] = sums.count;
  });
  if (!memory) return;
  *result = memory->of(0);
  result->count = memory->counts.data[0];
  for (int thread = 1; thread < threads; ++thread) {
    FeatureSums<A> part = memory->of(thread);
    part.count = memory->counts.data[thread];
    merge(*result, part, pass.task.features, P == Pass::kMoments);
  }
}

}  // namespace POWERNORM_ISA
