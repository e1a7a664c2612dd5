// Element types and the two ways to walk along a row: a vector at a time, then one by one.
//
// Everything in these headers lives in a namespace of its instruction set (POWERNORM_ISA), because
// the linker merges equal names: a function compiled for AVX-512 must never serve a plain machine.
// For the same reason nothing of the C++ standard library is used here.
#pragma once

#include <math.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace POWERNORM_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct bfloat16 {
  uint16_t bits;
};

template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<bfloat16> {
  using type = float;
};

// One element at a time: the rest of a row.
template <class A>
struct Single {
  using value = A;
  static constexpr int width = 1;

  static A load(const A* p) { return *p; }
  static void store(A* p, A v) { *p = v; }
  static A load(const bfloat16* p) {
    uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
  static void store(bfloat16* p, A v) {
    float single = static_cast<float>(v);
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (v != v) {
      p->bits = 0x7fc0;
    } else {
      p->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
  }
  static A sum(A v) { return v; }

  // Past the caches where that is possible; here, it is not.
  template <class T>
  static void stream(T* p, A v) {
    store(p, v);
  }
};

template <class A>
struct Wide;
template <>
struct Wide<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Wide<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
};

// A register full: GCC's and Clang's vector types, so that nothing is left to the optimiser's mood.
template <class A>
struct Vector {
  using value = typename Wide<A>::type;
  static constexpr int width = kVectorBytes / sizeof(A);

  static value load(const A* p) {
    value v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(A* p, value v) { memcpy(p, &v, sizeof v); }

  typedef uint32_t words __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t halves __attribute__((vector_size(kVectorBytes / 2)));

  static value load(const bfloat16* p) {
    halves h;
    memcpy(&h, p, sizeof h);
    words w = __builtin_convertvector(h, words) << 16;
    value v;
    memcpy(&v, &w, sizeof v);
    return v;
  }
  static void store(bfloat16* p, value v) {
    words w;
    memcpy(&w, &v, sizeof w);
    words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
    words quiet = rounded - rounded + 0x7fc0;
    rounded = (v != v) ? quiet : rounded;
    halves h = __builtin_convertvector(rounded, halves);
    memcpy(p, &h, sizeof h);
  }
  static A sum(value v) {
    A total = 0;
    for (int i = 0; i < width; ++i) total += v[i];
    return total;
  }

  // A store past the caches: the line need not be read first, and pushes nothing out. The address
  // must be a multiple of the bytes that are stored.
  template <class T>
  static void stream(T* p, value v) {
    alignas(kVectorBytes) T slot[width];
    store(slot, v);
    constexpr int bytes = width * sizeof(T);
#if defined(__AVX512F__)
    if constexpr (bytes == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_load_si512(slot));
      return;
    }
#endif
#if defined(__AVX2__)
    if constexpr (bytes == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p),
                          _mm256_load_si256(reinterpret_cast<const __m256i*>(slot)));
      return;
    }
#endif
#if defined(__SSE2__)
    if constexpr (bytes == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(p),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(slot)));
      return;
    }
#endif
    memcpy(p, slot, bytes);
  }
};

// Can rows that begin here be written by `stream`?
template <class T>
inline bool can_stream(const void* begin, int64_t features) {
  const int bytes = Vector<typename Accumulator<T>::type>::width * sizeof(T);
  return reinterpret_cast<uintptr_t>(begin) % bytes == 0 && features * sizeof(T) % bytes == 0;
}

inline void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class L, class T, class V>
inline void put(L, T* p, V v, bool streams) {
  if (streams) {
    L::stream(p, v);
  } else {
    L::store(p, v);
  }
}

// Asks for a line ahead of its use; `once` keeps it out of the way of what is used again.
inline void ask_for(const void* p, bool once) {
  if (once) {
    __builtin_prefetch(p, 0, 0);
  } else {
    __builtin_prefetch(p, 0, 3);
  }
}

// Calls `body.template at<Lanes>(c)` for the features [begin, end).
template <class A, class Body>
inline void for_features(int64_t begin, int64_t end, Body&& body) {
  int64_t c = begin;
  for (; c + Vector<A>::width <= end; c += Vector<A>::width) body(Vector<A>{}, c);
  for (; c < end; ++c) body(Single<A>{}, c);
}

// What an element of type T holds after v is stored in it.
template <class T, class L, class V>
inline V rounded(L, V v) {
  T slot[L::width];
  L::store(slot, v);
  return L::load(slot);
}

// A sum along a row that vector and rest share.
template <class A>
struct RowSum {
  typename Vector<A>::value wide = {};
  A rest = 0;

  void add(Vector<A>, typename Vector<A>::value v) { wide += v; }
  void add(Single<A>, A v) { rest += v; }
  A total() const { return Vector<A>::sum(wide) + rest; }
};

}  // namespace POWERNORM_ISA
