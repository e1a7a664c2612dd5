// What Python hands over: one structure for all operations, mirrored field by field in tasks.py.
// Pointers that an operation does not use, or that are absent, are null. Strides are in elements.
#pragma once

#include <stdint.h>

extern "C" {

enum PowernormType { kFloat32 = 0, kBfloat16 = 1, kFloat64 = 2, kNumTypes = 3 };

enum PowernormStatus { kDone = 0, kBadArgument = 1, kNoMemory = 2 };

enum PowernormFlags {
  kCentered = 1,
  kFloor = 2,
  kReleased = 4,
  kUseBatch = 8,
  kDetachMean = 16,
  kDetachStd = 32,
  kMeasure = 64,   // compute the sums over the tokens
  kStream = 256,   // the output is too large for the cache: write past it (set by the library)
  kFar = 512,      // and so much larger that two such matrices fill the cache (as well)
  kFinish = 128,   // the sums are there (of all processes): compute what follows from them
};

// "acc" is float, or double for float64 tokens.
struct PowernormTask {
  int64_t type, flags, tokens, features, groups, threads;
  int64_t x_stride, residual_stride, grad_y_stride, grad_total_stride;
  double eps, scale, k, max_ratio;
  const void* x;         // (tokens, features)
  const void* residual;  // the same
  const uint8_t* mask;   // (tokens,), not 0 = padding
  const void* weight;    // (features,) acc, as all of the next five
  const void* bias;
  const void* mean;
  const void* var;
  const void* gradient_moment;
  const void* limits;  // (2,) acc: r_max, d_max
  void* y;             // (tokens, features) dense
  void* total;         // the same: x + residual
  void* scales;        // (tokens, groups) acc; of a token norm (2, tokens, groups)
  void* statistics;    // (rows, features) acc
  double* sums;        // (rows, features)
  const void* grad_y;
  const void* grad_total;
  const void* grad_statistics;
  void* grad_x;  // dense
  void* grad_weight;
  void* grad_bias;
  double* carried;  // (5, features)
  const struct PowernormUpdate* update;  // of running statistics by the sums, which are then not given out
};

typedef int (*PowernormFunction)(const PowernormTask*);

enum PowernormOperation {
  kBatchNorm,
  kBatchNormBackward,
  kPowerNorm,
  kPowerNormBackward,
  kTokenNorm,
  kTokenNormBackward,
  kStaticNorm,
  kStaticNormBackward,
  kNumOperations
};

struct PowernormUpdate;

struct PowernormTable {
  const char* name;
  PowernormFunction functions[kNumOperations][kNumTypes];
  // By these sums; of buffers that are float, and double.
  void (*updates[2])(const PowernormUpdate*, const double* sums);
};

// Running statistics and how the sums over a batch update them. Read only: several threads may share
// one.
enum PowernormUpdateKind { kMeanAndVar, kSecondMoment, kPower };

struct PowernormUpdate {
  int64_t kind, wide, features;  // wide: the buffers are double
  int64_t unbiased, average, floored;  // average: number of its first batch, from 1; 0 for none
  double momentum, backward_momentum;  // momentum: in an average the least weight of a batch
  void* first;   // running mean; null for kSecondMoment; the gradient moment of kPower
  void* second;  // running variance or second moment
  int64_t* num_batches_tracked;
  int64_t* num_nonfinite_batches;
};
}
