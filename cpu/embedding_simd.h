// The inner loops of the backward of the operator `embedding`. CMake compiles embedding_simd.cpp once per instruction
// set. The arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/embedding.h"

namespace rlk::cpu {

struct EmbeddingLanes {
  // sums[k] = fl(sums[k] + row[k])
  void (*add_row)(const unsigned char* row, DType dtype, std::int64_t count, float* sums);
  // sums[k] = fl(earlier[k] + sums[k])
  void (*join)(const float* earlier, std::int64_t count, float* sums);
  void (*store)(const float* sums, std::int64_t count, unsigned char* to, DType dtype);
};

RLK_CPU_LANES(EmbeddingLanes, embedding_simd)

}  // namespace rlk::cpu
