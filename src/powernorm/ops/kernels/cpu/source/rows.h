// How the tokens are walked: blocks of rows for each thread, valid rows and padding apart, four rows
// at a time so that what belongs to a feature is loaded and stored once for four tokens.
#pragma once

#include "lanes.h"
#include "tasks.h"
#ifdef _OPENMP
extern "C" {
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}
#endif

namespace POWERNORM_ISA {

constexpr int kRows = 4;
// Float sums are flushed to double after this many rows: their error stays that of a short sum.
constexpr int64_t kBlock = 64;

inline bool has(const PowernormTask& task, int64_t flag) { return (task.flags & flag) != 0; }

inline int64_t count_blocks(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

// Runs body(thread) on each of `threads` threads; without OpenMP one after the other.
template <class Body>
inline void in_parallel(int threads, Body&& body) {
  if (threads <= 1) {
    body(0);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    // The runtime may grant fewer threads than asked for; each takes its share of the numbers.
    const int granted = omp_get_num_threads();
    for (int t = omp_get_thread_num(); t < threads; t += granted) body(t);
  }
#else
  for (int t = 0; t < threads; ++t) body(t);
#endif
}

struct Range {
  int64_t begin, end;
};

inline Range share_of(int64_t blocks, int thread, int threads) {
  return {blocks * thread / threads, blocks * (thread + 1) / threads};
}

// The rows of one block, valid ones and padding apart.
struct BlockRows {
  int64_t valid[kBlock], padding[kBlock];
  int num_valid = 0, num_padding = 0;

  BlockRows(const uint8_t* mask, int64_t block, int64_t tokens) {
    int64_t begin = block * kBlock;
    int64_t end = begin + kBlock < tokens ? begin + kBlock : tokens;
    for (int64_t t = begin; t < end; ++t) {
      if (mask && mask[t]) {
        padding[num_padding++] = t;
      } else {
        valid[num_valid++] = t;
      }
    }
  }
};

template <int R>
struct RowCount {
  static constexpr int value = R;
  const int64_t* next;  // the rows after these, or these again
};

// Calls body(RowCount<R>, rows) for groups of four rows, then of one; or of one throughout.
template <class Body>
inline void for_rows(const int64_t* rows, int count, Body&& body, bool one_by_one = false) {
  int i = 0;
  for (; !one_by_one && i + kRows <= count; i += kRows) {
    body(RowCount<kRows>{i + 2 * kRows <= count ? rows + i + kRows : rows + i}, rows + i);
  }
  for (; i < count; ++i) body(RowCount<1>{i + 1 < count ? rows + i + 1 : rows + i}, rows + i);
}

// Memory that is freed at the end of the scope; check `data` before use.
template <class A>
struct Scratch {
  A* data;
  explicit Scratch(int64_t size)
      : data(static_cast<A*>(malloc((size > 0 ? size : 1) * sizeof(A)))) {}
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

}  // namespace POWERNORM_ISA
