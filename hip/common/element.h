// Tag types for the elements of arrays: the type in memory, and the conversions to and from fp32.
#pragma once

#include <cstdint>

#include "rlk/math/half.h"

namespace rlk::hip {

struct Bf16 {
  using Storage = std::uint16_t;
  static RLK_DEVICE float load(Storage s) { return float_of_bf16(s); }
  static RLK_DEVICE Storage store(float x) { return bf16_rn(x); }
};
struct Fp16 {
  using Storage = std::uint16_t;
  static RLK_DEVICE float load(Storage s) { return float_of_f16(s); }
  static RLK_DEVICE Storage store(float x) { return f16_rn(x); }
};
struct Fp32 {
  using Storage = float;
  static RLK_DEVICE float load(Storage s) { return s; }
  static RLK_DEVICE Storage store(float x) { return is_nan(x) ? canonical_nan() : x; }
};

}  // namespace rlk::hip
