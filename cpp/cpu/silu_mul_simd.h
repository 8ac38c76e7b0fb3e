// The inner loops of silu_mul, one copy per instruction set (silu_mul_simd.cpp).
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/silu_mul.h"

namespace rlk::cpu {

// A piece of a row. Memory has any alignment.
struct GatedMulPiece {
  const unsigned char *dy, *gate, *up;  // dy: backward's alone
  unsigned char *y, *d_gate, *d_up;     // y: forward's; the others backward's, each may be null
  std::int64_t columns;
  DType dtype;
  Activation activation;
  bool round_before_mul;
};

struct SiluMulLanes {
  void (*forward)(const GatedMulPiece& piece);
  void (*backward)(const GatedMulPiece& piece);
};

RLK_CPU_LANES(SiluMulLanes, silu_mul_simd)

}  // namespace rlk::cpu
