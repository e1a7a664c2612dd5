// The library's face: argument checks, choice of the instruction set, running statistics.
#include <stddef.h>
#include <stdlib.h>

#include "tasks.h"

extern "C" {
const PowernormTable* powernorm_table_plain(void);
#ifdef POWERNORM_HAS_AVX2
const PowernormTable* powernorm_table_avx2(void);
#endif
#ifdef POWERNORM_HAS_AVX512
const PowernormTable* powernorm_table_avx512(void);
#endif
}

namespace {

const PowernormTable* best_table() {
#if defined(POWERNORM_HAS_AVX2) || defined(POWERNORM_HAS_AVX512)
  __builtin_cpu_init();
#endif
#ifdef POWERNORM_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("fma")) {
    return powernorm_table_avx512();
  }
#endif
#ifdef POWERNORM_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return powernorm_table_avx2();
  }
#endif
  return powernorm_table_plain();
}

const PowernormTable*& chosen_table() {
  static const PowernormTable* table = best_table();
  return table;
}

bool same(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}

// Threads that are worth their start: as torch, one for each 32k elements.
int64_t useful_threads(const PowernormTask& task) {
  const int64_t shares = task.tokens * task.features / 32768 + 1;
  const int64_t blocks = (task.tokens + 63) / 64;
  int64_t threads = task.threads < shares ? task.threads : shares;
  if (threads > blocks) threads = blocks;
  return threads < 1 ? 1 : threads;
}

// Does a store past the cache pay? Measured on one processor of each (docs/kernels.md): on AMD a norm
// takes up to half the time by it, on Intel up to twice, in memory that the system has just cleared.
// Lines of such memory lie in the cache, and probably are written back first.
bool streaming_pays() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Outputs from this many bytes on are written past the cache: with the input they would fill most
// of what a core's neighbours leave of it. A constant, because what a virtual machine says of its
// cache is often the host's.
int64_t& stream_bytes() {
  static int64_t bytes = streaming_pays() ? int64_t{8} << 20 : int64_t{1} << 60;
  return bytes;
}

int64_t bytes_of(int64_t type) { return type == kFloat32 ? 4 : type == kBfloat16 ? 2 : 8; }

bool fits(int operation, const PowernormTask& t) {
  if (operation < 0 || operation >= kNumOperations || t.type < 0 || t.type >= kNumTypes) return false;
  if (t.tokens < 0 || t.features < 1 || t.groups < 0 || t.threads < 1) return false;
  if (t.groups && t.features % t.groups) return false;
  if (t.groups && !t.scales && t.tokens) return false;
  if (t.tokens && !t.x) return false;
  const bool back = operation % 2 == 1;
  const bool finishes = (t.flags & kFinish) != 0;
  if (!back && t.residual && !t.total && t.tokens) return false;
  if (back && t.tokens && (!t.grad_y || (finishes && !t.grad_x))) return false;
  if (!back && finishes && t.tokens && !t.y) return false;
  switch (operation) {
    case kBatchNorm:
      return t.statistics && (t.sums || t.update) && t.var && (t.mean || !(t.flags & kCentered));
    case kBatchNormBackward:
      return t.statistics && t.grad_weight && t.grad_bias &&
             (t.sums || (finishes && (t.flags & kMeasure)));
    case kPowerNorm:
      return t.statistics && t.sums && t.var && t.gradient_moment;
    case kPowerNormBackward:
      return t.statistics && t.sums && t.carried && t.grad_weight && t.grad_bias;
    case kStaticNorm:
      return t.statistics && t.var;
    case kStaticNormBackward:
      return t.statistics && t.grad_weight && t.grad_bias;
    default:
      return t.groups >= 1 && !t.grad_weight == !t.grad_bias && (!t.weight || !back || t.grad_weight);
  }
}

int run_update(const PowernormUpdate& update, const double* sums) {
  if (update.features < 1 || !sums || !update.second || !update.num_batches_tracked ||
      !update.num_nonfinite_batches || update.kind < 0 || update.kind > kPower ||
      (!update.first && update.kind != kSecondMoment)) {
    return kBadArgument;
  }
  chosen_table()->updates[update.wide ? 1 : 0](&update, sums);
  return kDone;
}

// The sums are of no further use: what asks for them asks for no update.
int run_with_update(PowernormFunction function, PowernormTask& task) {
  double* const sums = static_cast<double*>(malloc(4 * task.features * sizeof(double)));
  if (!sums) return kNoMemory;
  task.sums = sums;
  int status = function(&task);
  if (status == kDone) status = run_update(*task.update, sums);
  free(sums);
  return status;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int powernorm_run(int operation, const PowernormTask* given) {
  if (!given || !fits(operation, *given)) return kBadArgument;
  PowernormTask task = *given;
  task.threads = useful_threads(task);
  task.flags &= ~static_cast<int64_t>(kStream | kFar);
  const int64_t bytes = task.tokens * task.features * bytes_of(task.type);
  if (bytes >= stream_bytes()) task.flags |= kStream;
  if (bytes >= 2 * stream_bytes()) task.flags |= kFar;
  const PowernormFunction function = chosen_table()->functions[operation][task.type];
  return task.update ? run_with_update(function, task) : function(&task);
}

__attribute__((visibility("default"))) int powernorm_update(const PowernormUpdate* update,
                                                            const double* sums) {
  return update ? run_update(*update, sums) : kBadArgument;
}

__attribute__((visibility("default"))) const char* powernorm_instruction_set(void) {
  return chosen_table()->name;
}

// For tests: use a certain instruction set. 0 if this library or this machine does not have it.
__attribute__((visibility("default"))) int powernorm_use_instruction_set(const char* name) {
  const PowernormTable* best = best_table();
  const PowernormTable* tables[] = {
      powernorm_table_plain(),
#ifdef POWERNORM_HAS_AVX2
      powernorm_table_avx2(),
#endif
#ifdef POWERNORM_HAS_AVX512
      powernorm_table_avx512(),
#endif
  };
  for (const PowernormTable* table : tables) {
    if (same(table->name, name)) {
      chosen_table() = table;
      return 1;
    }
    if (table == best) break;
  }
  return 0;
}

// For tests and measurements: write past the cache from this many bytes on; gives the old number.
__attribute__((visibility("default"))) int64_t powernorm_set_stream_bytes(int64_t bytes) {
  const int64_t before = stream_bytes();
  stream_bytes() = bytes < 1 ? 1 : bytes;
  return before;
}

__attribute__((visibility("default"))) int powernorm_uses_openmp(void) {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// What the library was built from, as building.py numbers it.
__attribute__((visibility("default"))) const char* powernorm_sources(void) {
#ifdef POWERNORM_SOURCES
  return POWERNORM_SOURCES;
#else
  return "";
#endif
}

__attribute__((visibility("default"))) size_t powernorm_task_size(void) {
  return sizeof(PowernormTask);
}

__attribute__((visibility("default"))) size_t powernorm_update_size(void) {
  return sizeof(PowernormUpdate);
}
}
