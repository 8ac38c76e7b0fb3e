// The inner loops of the operator `rope`. CMake compiles rope_simd.cpp once per instruction set. The arrays may have
// any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/rope.h"

namespace rlk::cpu {

// The rotated columns of a head.
struct RopeRow {
  const unsigned char* x;
  unsigned char* y;                            // x itself, or memory that does not overlap it
  const float *cos_a, *sin_a, *cos_b, *sin_b;  // [pairs], as factors
  std::int64_t pairs;
  DType dtype;
  bool interleaved, round_products;
};

struct RopeLanes {
  // to[i] = from[i], an element of `dtype` rounded to `rounded_to`.
  void (*load_angles)(const unsigned char* from, DType dtype, DType rounded_to, std::int64_t count, float* to);
  void (*rotate)(const RopeRow& row);
};

RLK_CPU_LANES(RopeLanes, rope_simd)

}  // namespace rlk::cpu
