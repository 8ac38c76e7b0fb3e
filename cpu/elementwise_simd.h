// The inner loops of elementwise operators. CMake compiles elementwise_simd.cpp once per instruction set.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/base.h"

namespace rlk::cpu {

// Computes columns of one row. Memory may have any alignment. The pointer to an array is null if the params hold null
// for this array.
template <class Params>
struct ElementwiseLanes {
  void (*columns)(const Params& p, const unsigned char* const* in, unsigned char* const* out, std::int64_t columns);
};

}  // namespace rlk::cpu

#define RLK_ELEMENTWISE(operator, function, Params, forms)    \
  namespace rlk {                                             \
  struct Params;                                              \
  }                                                           \
  namespace rlk::cpu {                                        \
  RLK_CPU_LANES(ElementwiseLanes<Params>, function##_columns) \
  }
#include "rlk/elementwise.inc"
#undef RLK_ELEMENTWISE
