// The inner loops of logprob, one copy per instruction set (logprob_simd.cpp).
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/base.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/logprob.h"

namespace rlk::cpu {

// A row as the inner loops use it. Columns count from the first column in memory.
struct LogprobRow {
  const unsigned char* logits;  // dtype, any alignment
  DType dtype;
  Exp exp;
  bool moments;  // whether E and Q are wanted; unwanted moments are 0
  float c;       // log2e / T
  float logit_scale, softcap, inverse_softcap;
};

struct LogprobBackwardRow : LogprobRow {
  unsigned char* dlogits;  // dtype; may be `logits`
  float u;                 // log2 p = fma(z, c, -u)
  float b;                 // factor of log2 p, from dentropy
  float w;                 // fl(a - g)
  float d;                 // term of label smoothing, which every column gets
};

// `kept` has one bit for each of the run's columns, padded with zeros to whole leaves; null keeps all columns.
struct LogprobLanes {
  // Tree over the leaves of [first, first + columns), where `first` begins a leaf.
  SoftmaxStats (*stats)(const LogprobRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept);
  // dlogits of [first, first + columns), computed as if no column were the target's.
  void (*backward)(const LogprobBackwardRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept);
};

RLK_CPU_LANES(LogprobLanes, logprob_simd)

}  // namespace rlk::cpu
