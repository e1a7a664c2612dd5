// One pass over the tokens on the way back: sums of products, the input's gradient, or both.
//
// With h what was normalised, d = h - center and gy the gradient of the output:
//   gradient of h:  t = gy * direct + d * slope + offset   (valid tokens; padding: gy * direct)
//   sums:           sum of gy, and of gy * d, of valid tokens and of padding apart
// and back through GroupScaling, x = h / s: gradient of x = s * (t - h * mean_group(t * h)).
#pragma once

#include "forward.h"

namespace POWERNORM_ISA {

// Rows that a pass looks at twice while they are in the second cache.
constexpr int kNear = 8;

enum class Back { kSums, kGradient, kGradientAndSums };

// Long sums (double) and short ones, of one thread.
template <class A>
struct ProductSums {
  double *grad, *product, *padded_product;
  A *short_grad, *short_product;
};

template <class A>
struct ProductMemory {
  Scratch<double> wide;
  Scratch<A> narrow;
  int64_t features, threads;

  ProductMemory(int64_t features, int threads)
      : wide(3 * features * threads),
        narrow(2 * features * threads),
        features(features),
        threads(threads) {
    if (ok()) clear();
  }
  void clear() {
    memset(wide.data, 0, 3 * features * threads * sizeof(double));
    memset(narrow.data, 0, 2 * features * threads * sizeof(A));
  }
  bool ok() const { return wide.data && narrow.data; }
  ProductSums<A> of(int thread) const {
    double* w = wide.data + 3 * features * thread;
    A* n = narrow.data + 2 * features * thread;
    return {w, w + features, w + 2 * features, n, n + features};
  }
};

// All threads' sums into the first one's.
template <class A>
inline void add_threads(const ProductMemory<A>& memory, int64_t features, int threads) {
  const int64_t size = 3 * features;
  for (int thread = 1; thread < threads; ++thread) {
    for (int64_t i = 0; i < size; ++i) memory.wide.data[i] += memory.wide.data[size * thread + i];
  }
}

template <class T>
struct BackwardPass {
  using A = typename Accumulator<T>::type;

  const PowernormTask& task;
  const A *center, *direct, *slope, *offset;

  template <int R>
  struct RowPointers {
    const T *x[R], *grad_y[R], *grad_total[R];
    T* grad_x[R];
  };

  template <int R>
  RowPointers<R> pointers(const int64_t* rows) const {
    RowPointers<R> p;
    for (int r = 0; r < R; ++r) {
      p.x[r] = static_cast<const T*>(task.x) + rows[r] * task.x_stride;
      p.grad_y[r] = static_cast<const T*>(task.grad_y) + rows[r] * task.grad_y_stride;
      p.grad_total[r] =
          task.grad_total
              ? static_cast<const T*>(task.grad_total) + rows[r] * task.grad_total_stride
              : nullptr;
      p.grad_x[r] = task.grad_x ? static_cast<T*>(task.grad_x) + rows[r] * task.features : nullptr;
    }
    return p;
  }

  template <Back P, bool Padding, bool Grouped, bool Stream, int R>
  void run(RowCount<R> count, const int64_t* rows, ProductSums<A>* sums) const {
    constexpr bool kSums = P != Back::kGradient, kWrites = P != Back::kSums;
    const RowPointers<R> p = pointers<R>(rows), ahead = pointers<R>(count.next);
    const bool streams = has(task, kStream);
    const A *const center = this->center, *const direct = this->direct;
    const A *const slope = this->slope, *const offset = this->offset;
    A* const grads = kSums ? sums->short_grad : nullptr;
    A* const products = kSums ? sums->short_product : nullptr;
    const int64_t groups = Grouped ? task.groups : 1;
    const int64_t size = task.features / groups;
    for (int64_t g = 0; g < groups; ++g) {
      A s[R];
      RowSum<A> along[R];
      for (int r = 0; r < R; ++r) {
        s[r] = Grouped ? static_cast<const A*>(task.scales)[rows[r] * groups + g] : A(1);
      }
      for_features<A>(g * size, (g + 1) * size, [&](auto lanes, int64_t c) {
        using L = decltype(lanes);
        using V = typename L::value;
        const V zero{};
        V middle = L::load(center + c), straight{}, steep{}, above{}, grad{}, product{};
        if constexpr (kWrites) straight = L::load(direct + c);
        if constexpr (kWrites && !Padding) {
          steep = L::load(slope + c);
          above = L::load(offset + c);
        }
        if constexpr (kSums) {
          grad = L::load(grads + c);
          product = L::load(products + c);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          ask_for(ahead.x[r] + c, kWrites && streams && R > 1);
          ask_for(ahead.grad_y[r] + c, kWrites && streams && R > 1);
          V h = L::load(p.x[r] + c), gy = L::load(p.grad_y[r] + c);
          if constexpr (Grouped) h = h * s[r];
          V d = h - middle;
          if constexpr (kSums) {
            grad += gy;
            V gd = gy * d;
            // Padding may hold anything; it counts only where the loss looks at it.
            if constexpr (Padding) gd = (gy != zero) ? gd : zero;
            product += gd;
          }
          if constexpr (kWrites) {
            V t = gy * straight;
            if constexpr (!Padding) t += d * steep + above;
            if constexpr (Grouped) {
              V th = t * h;
              if constexpr (Padding) th = (t != zero) ? th : zero;
              along[r].add(lanes, th);
            } else {
              if constexpr (Stream) t += L::load(p.grad_total[r] + c);
              put(lanes, p.grad_x[r] + c, t, streams);
            }
          }
        }
        if constexpr (kSums) {
          L::store(grads + c, grad);
          L::store(products + c, product);
        }
      });
      if constexpr (Grouped && kWrites) {
        A mean[R];
        for (int r = 0; r < R; ++r) mean[r] = along[r].total() / static_cast<A>(size);
        through_scaling<Padding, Stream>(RowCount<R>{}, p, s, mean, g * size, (g + 1) * size);
      }
    }
  }

  // Second look at a row that is still in the nearest cache: t again, then back through the scale.
  template <bool Padding, bool Stream, int R>
  void through_scaling(RowCount<R>, const RowPointers<R>& p, const A* s, const A* mean,
                       int64_t begin, int64_t end) const {
    const A *const center = this->center, *const direct = this->direct;
    const A *const slope = this->slope, *const offset = this->offset;
    for_features<A>(begin, end, [&](auto lanes, int64_t c) {
      using L = decltype(lanes);
      using V = typename L::value;
      const V zero{}, straight = L::load(direct + c);
      V middle{}, steep{}, above{};
      if constexpr (!Padding) {
        middle = L::load(center + c);
        steep = L::load(slope + c);
        above = L::load(offset + c);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        V h = L::load(p.x[r] + c) * s[r];
        V t = L::load(p.grad_y[r] + c) * straight;
        if constexpr (!Padding) t += (h - middle) * steep + above;
        V back = (t - h * mean[r]) * s[r];
        if constexpr (Padding) {
          // Where no gradient arrives none leaves, whatever the padding holds.
          const V moved = (t != zero) ? back : zero;
          back = mean[r] != 0 ? back : moved;
        }
        if constexpr (Stream) back += L::load(p.grad_total[r] + c);
        put(lanes, p.grad_x[r] + c, back, has(task, kStream));
      }
    });
  }

  template <Back P, bool Padding, int R>
  void dispatch(RowCount<R> count, const int64_t* rows, ProductSums<A>* sums) const {
    const bool stream = task.grad_total && P != Back::kSums;
    if (task.groups) {
      if (stream) {
        run<P, Padding, true, true>(count, rows, sums);
      } else {
        run<P, Padding, true, false>(count, rows, sums);
      }
    } else if (stream) {
      run<P, Padding, false, true>(count, rows, sums);
    } else {
      run<P, Padding, false, false>(count, rows, sums);
    }
  }

  void flush(ProductSums<A>& sums, double* product) const {
    for (int64_t c = 0; c < task.features; ++c) {
      sums.grad[c] += sums.short_grad[c];
      product[c] += sums.short_product[c];
      sums.short_grad[c] = sums.short_product[c] = 0;
    }
  }

  template <Back P, bool Padding>
  void pass_over(const int64_t* rows, int count, ProductSums<A>* sums, bool one_by_one) const {
    for_rows(
        rows, count,
        [&](auto number, const int64_t* which) { dispatch<P, Padding>(number, which, sums); },
        one_by_one);
  }

  template <Back P, bool Padding>
  void some_rows(const int64_t* rows, int count, ProductSums<A>* sums) const {
    // Beyond the caches: reading and writing in turn, a few rows at a time that stay near, runs
    // better than three streams at once.
    if (P == Back::kGradientAndSums && !task.groups && has(task, kStream)) {
      for (int i = 0; i < count; i += kNear) {
        const int near = i + kNear < count ? kNear : count - i;
        pass_over<Back::kSums, Padding>(rows + i, near, sums, false);
        pass_over<Back::kGradient, Padding>(rows + i, near, sums, false);
      }
    } else {
      // Where all comes from memory eight streams at once are slower than two (measured: 8 %).
      const bool one_by_one =
          P != Back::kGradientAndSums && !task.groups && has(task, kStream) && has(task, kFar);
      pass_over<P, Padding>(rows, count, sums, one_by_one);
    }
  }

  template <Back P>
  void blocks(Range range, bool backwards, ProductSums<A>* sums) const {
    for (int64_t i = range.begin; i < range.end; ++i) {
      BlockRows rows(task.mask, backwards ? range.end - 1 - (i - range.begin) : i, task.tokens);
      some_rows<P, false>(rows.valid, rows.num_valid, sums);
      if (P != Back::kGradient && rows.num_valid) flush(*sums, sums->product);
      some_rows<P, true>(rows.padding, rows.num_padding, sums);
      if (P != Back::kGradient && rows.num_padding) flush(*sums, sums->padded_product);
    }
  }
};

template <Back P, class T>
inline void run_pass(const BackwardPass<T>& pass, bool backwards,
                     ProductMemory<typename Accumulator<T>::type>* memory) {
  using A = typename Accumulator<T>::type;
  const int threads = static_cast<int>(pass.task.threads);
  const int64_t blocks = count_blocks(pass.task.tokens);
  in_parallel(threads, [&](int thread) {
    ProductSums<A> sums{};
    if (memory) sums = memory->of(thread);
    pass.template blocks<P>(share_of(blocks, thread, threads), backwards, &sums);
    finish_streams();
  });
  if (memory) add_threads(*memory, pass.task.features, threads);
}

}  // namespace POWERNORM_ISA
