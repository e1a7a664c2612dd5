// Norms of a token by its own features: LayerNorm without a mean over tokens, RMSNorm, AdaNorm, …
//
//   y = (h - mean) / std per token and group;  z = scale * y * (1 - k y);  out = z * weight + bias
#pragma once

#include "backward.h"

namespace POWERNORM_ISA {

template <class T>
struct TokenForward {
  using A = typename Accumulator<T>::type;

  const PowernormTask& task;
  const A *weight, *bias;  // both or neither

  template <int R>
  void operator()(RowCount<R> count, const int64_t* rows) const {
    const T *h[R], *ahead[R];
    for (int r = 0; r < R; ++r) {
      ahead[r] = static_cast<const T*>(task.x) + count.next[r] * task.x_stride;
      h[r] = task.residual ? static_cast<const T*>(task.total) + rows[r] * task.features
                           : static_cast<const T*>(task.x) + rows[r] * task.x_stride;
    }
    if (task.residual) add(count, rows);
    const int64_t size = task.features / task.groups;
    for (int64_t g = 0; g < task.groups; ++g) {
      A mean[R], scale[R];
      measure(count, h, ahead, g * size, (g + 1) * size, mean, scale);
      A* means = static_cast<A*>(task.scales) + g;
      A* scales = means + task.tokens * task.groups;
      for (int r = 0; r < R; ++r) {
        means[rows[r] * task.groups] = mean[r];
        scales[rows[r] * task.groups] = scale[r];
      }
      if (task.k != 0 || task.scale != 1) {
        weight ? write<true, true>(count, rows, h, g * size, (g + 1) * size, mean, scale)
               : write<true, false>(count, rows, h, g * size, (g + 1) * size, mean, scale);
      } else {
        weight ? write<false, true>(count, rows, h, g * size, (g + 1) * size, mean, scale)
               : write<false, false>(count, rows, h, g * size, (g + 1) * size, mean, scale);
      }
    }
  }

  template <int R>
  void add(RowCount<R>, const int64_t* rows) const {
    for (int r = 0; r < R; ++r) {
      const T* x = static_cast<const T*>(task.x) + rows[r] * task.x_stride;
      const T* residual = static_cast<const T*>(task.residual) + rows[r] * task.residual_stride;
      T* total = static_cast<T*>(task.total) + rows[r] * task.features;
      for_features<A>(0, task.features, [&](auto lanes, int64_t c) {
        using L = decltype(lanes);
        L::store(total + c, L::load(x + c) + L::load(residual + c));
      });
    }
  }

  template <int R>
  void measure(RowCount<R>, const T* const* h, const T* const* ahead, int64_t begin, int64_t end,
               A* mean, A* scale) const {
    const bool once = has(task, kStream);
    const A size = static_cast<A>(end - begin);
    for (int r = 0; r < R; ++r) mean[r] = 0;
    if (task.flags & kCentered) {
      RowSum<A> sums[R];
      for_features<A>(begin, end, [&](auto lanes, int64_t c) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          ask_for(ahead[r] + c, once);
          sums[r].add(lanes, decltype(lanes)::load(h[r] + c));
        }
      });
      for (int r = 0; r < R; ++r) mean[r] = sums[r].total() / size;
    }
    RowSum<A> squares[R];
    for_features<A>(begin, end, [&](auto lanes, int64_t c) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (!(task.flags & kCentered)) ask_for(ahead[r] + c, once);
        auto d = decltype(lanes)::load(h[r] + c) - mean[r];
        squares[r].add(lanes, d * d);
      }
    });
    const A eps = static_cast<A>(task.eps);
    for (int r = 0; r < R; ++r) {
      const A total = squares[r].total();
      // The released code divides by one less and adds eps outside the root.
      scale[r] = 1 / ((task.flags & kReleased) ? A(sqrt(total / (size - 1))) + eps
                                               : A(sqrt(total / size + eps)));
    }
  }

  template <bool Adaptive, bool Affine, int R>
  void write(RowCount<R>, const int64_t* rows, const T* const* h, int64_t begin, int64_t end,
             const A* mean, const A* scale) const {
    T* y[R];
    for (int r = 0; r < R; ++r) y[r] = static_cast<T*>(task.y) + rows[r] * task.features;
    const A factor = static_cast<A>(task.scale), k = static_cast<A>(task.k);
    const A *const weight = this->weight, *const bias = this->bias;
    for_features<A>(begin, end, [&](auto lanes, int64_t c) {
      using L = decltype(lanes);
      using V = typename L::value;
      V steep{}, above{};
      if constexpr (Affine) {
        steep = L::load(weight + c);
        above = L::load(bias + c);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        V v = (L::load(h[r] + c) - mean[r]) * scale[r];
        if constexpr (Adaptive) v = v * (factor - factor * k * v);
        if constexpr (Affine) v = v * steep + above;
        put(lanes, y[r] + c, v, has(task, kStream));
      }
    });
  }
};

template <class T>
struct TokenBackward {
  using A = typename Accumulator<T>::type;

  const PowernormTask& task;
  const A* weight;
  const BackwardPass<T>& rows_of;

  template <bool Adaptive, bool Affine, int R>
  void run(RowCount<R> count, const int64_t* rows, ProductSums<A>* sums) const {
    const auto p = rows_of.template pointers<R>(rows);
    const auto ahead = rows_of.template pointers<R>(count.next);
    for (int64_t g = 0; g < task.groups; ++g) {
      const A* means = static_cast<const A*>(task.scales) + g;
      const A* scales = means + task.tokens * task.groups;
      A mean[R], scale[R];
      bool finite = true;
      for (int r = 0; r < R; ++r) {
        mean[r] = means[rows[r] * task.groups];
        scale[r] = scales[rows[r] * task.groups];
        // A NaN in the group makes it NaN, an infinity NaN or 0.
        finite = finite && scale[r] > 0;
      }
      if (finite) {
        group<Adaptive, Affine, false>(count, p, ahead, sums, g, mean, scale);
      } else {
        one_by_one<Adaptive, Affine>(count, rows, sums, g, mean, scale);
      }
    }
  }

  // Rows of which some are not finite: padding may hold anything, and where no gradient arrives
  // none leaves.
  template <bool Adaptive, bool Affine, int R>
  void one_by_one(RowCount<R>, const int64_t* rows, ProductSums<A>* sums, int64_t g, const A* mean,
                  const A* scale) const {
    for (int r = 0; r < R; ++r) {
      const auto p = rows_of.template pointers<1>(rows + r);
      const RowCount<1> one{rows + r};
      group<Adaptive, Affine, true>(one, p, p, sums, g, mean + r, scale + r);
    }
  }

  template <bool Adaptive, bool Affine, bool Careful, int R, class P>
  void group(RowCount<R> count, const P& p, const P& ahead, ProductSums<A>* sums, int64_t g,
             const A* mean, const A* scale) const {
    const int64_t size = task.features / task.groups, begin = g * size, end = begin + size;
    A constant[R], along[R];
    measure<Adaptive, Affine, Careful>(count, p, ahead, sums, begin, end, mean, scale, constant,
                                       along);
    if (task.grad_total) {
      write<Adaptive, Affine, Careful, true>(count, p, begin, end, mean, scale, constant, along);
    } else {
      write<Adaptive, Affine, Careful, false>(count, p, begin, end, mean, scale, constant, along);
    }
  }

  // The values where a gradient arrives, else 0.
  template <bool Careful, class V>
  static V where_arriving(V grad, V values) {
    if constexpr (Careful) {
      const V zero{};
      values = (grad != zero) ? values : zero;
    }
    return values;
  }

  // Row sums that the gradient needs: what is constant over the group, and what goes along h - mean.
  template <bool Adaptive, bool Affine, bool Careful, int R, class P>
  void measure(RowCount<R>, const P& p, const P& ahead, ProductSums<A>* sums, int64_t begin,
               int64_t end, const A* mean, const A* scale, A* constant, A* along) const {
    const bool once = has(task, kStream);
    const A factor = static_cast<A>(task.scale), k = static_cast<A>(task.k);
    const A* const weight = this->weight;
    A* const grads = sums->short_grad;
    A* const products = sums->short_product;
    RowSum<A> total[R], products_with_y[R];
    for_features<A>(begin, end, [&](auto lanes, int64_t c) {
      using L = decltype(lanes);
      using V = typename L::value;
      V steep{}, grad{}, product{};
      if constexpr (Affine) {
        steep = L::load(weight + c);
        grad = L::load(grads + c);
        product = L::load(products + c);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        ask_for(ahead.x[r] + c, once);
        ask_for(ahead.grad_y[r] + c, once);
        V y = (L::load(p.x[r] + c) - mean[r]) * scale[r];
        V gy = L::load(p.grad_y[r] + c), t = gy;
        if constexpr (Adaptive) t = where_arriving<Careful>(gy, t * (factor - factor * k * y));
        if constexpr (Affine) {
          grad += gy;
          product += where_arriving<Careful>(gy, t * y);
          t = t * steep;
        }
        total[r].add(lanes, t);
        products_with_y[r].add(lanes, where_arriving<Careful>(t, t * y));
      }
      if constexpr (Affine) {
        L::store(grads + c, grad);
        L::store(products + c, product);
      }
    });
    const bool through_mean = (task.flags & kCentered) && !(task.flags & kDetachMean);
    const bool through_std = !(task.flags & kDetachStd);
    const A size = static_cast<A>(end - begin);
    for (int r = 0; r < R; ++r) {
      constant[r] = through_mean ? total[r].total() / size : A(0);
      along[r] = 0;
      if (through_std) along[r] = products_with_y[r].total() / size;
      if (through_std && (task.flags & kReleased)) {
        const A product = products_with_y[r].total();
        along[r] = where_arriving<Careful>(
            product, released_share(p.x[r], begin, end, mean[r], scale[r], product));
      }
    }
  }

  // y's coefficient where eps stands outside the root and the variance divides by one less.
  A released_share(const T* x, int64_t begin, int64_t end, A mean, A scale, A product) const {
    RowSum<A> squares;
    for_features<A>(begin, end, [&](auto lanes, int64_t c) {
      auto d = decltype(lanes)::load(x + c) - mean;
      squares.add(lanes, d * d);
    });
    // From the data: 1/scale - eps would cancel where eps is the larger part.
    A root = sqrt(squares.total() * static_cast<A>(end - begin - 1));
    return root > 0 ? product / (scale * root) : A(0);
  }

  template <bool Adaptive, bool Affine, bool Careful, bool Stream, int R, class P>
  void write(RowCount<R>, const P& p, int64_t begin, int64_t end, const A* mean, const A* scale,
             const A* constant, const A* along) const {
    const A factor = static_cast<A>(task.scale), k = static_cast<A>(task.k);
    const A* const weight = this->weight;
    for_features<A>(begin, end, [&](auto lanes, int64_t c) {
      using L = decltype(lanes);
      using V = typename L::value;
      V steep{};
      if constexpr (Affine) steep = L::load(weight + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        V y = (L::load(p.x[r] + c) - mean[r]) * scale[r];
        const V gy = L::load(p.grad_y[r] + c);
        V t = gy;
        if constexpr (Adaptive) t = where_arriving<Careful>(gy, t * (factor - factor * k * y));
        if constexpr (Affine) t = t * steep;
        V through_std = y * along[r];
        if (Careful && along[r] == 0) through_std = V{};
        const V rest = t - constant[r] - through_std;
        V back = where_arriving<Careful>(rest, rest * scale[r]);
        if constexpr (Stream) back += L::load(p.grad_total[r] + c);
        put(lanes, p.grad_x[r] + c, back, has(task, kStream));
      }
    });
  }

  template <int R>
  void operator()(RowCount<R> count, const int64_t* rows, ProductSums<A>* sums) const {
    const bool adaptive = task.k != 0 || task.scale != 1;
    if (adaptive) {
      weight ? run<true, true>(count, rows, sums) : run<true, false>(count, rows, sums);
    } else {
      weight ? run<false, true>(count, rows, sums) : run<false, false>(count, rows, sums);
    }
  }
};

}  // namespace POWERNORM_ISA
