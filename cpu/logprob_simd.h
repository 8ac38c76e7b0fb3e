// The inner loops of the operator `logprob`. CMake compiles logprob_simd.cpp once per instruction set.
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
  float u;                 // u of ops/logprob.h: log2 p = fma(z, c, -u)
  float b;                 // b of ops/logprob.h: the factor of log2 p
  float w;                 // fl(a - g) of ops/logprob.h
  float d;                 // d of ops/logprob.h: the same addend for all columns
};

// `kept` has one bit for each column of the range, and zeros up to a whole leaf; null keeps all columns.
struct LogprobLanes {
  // Statistics of the columns [first, first + columns), by the tree over their leaves. `first` begins a leaf.
  SoftmaxStats (*stats)(const LogprobRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept);
  // dlogits of [first, first + columns), computed as if no column were the target's.
  void (*backward)(const LogprobBackwardRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept);
};

RLK_CPU_LANES(LogprobLanes, logprob_simd)

}  // namespace rlk::cpu
