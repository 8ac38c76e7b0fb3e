// Distance of an fp32 result from the exact result, for the tests and benches of rlk/math.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "rlk/math/ieee.h"

namespace rlk {

enum class Small { kKept, kFlushed };  // kFlushed: an exact result below 2^-126 must come out as +0

// |got - exact| in spacings of fp32 at `exact`, a double; infinite if a special value is wrong. NaN must be
// canonical_nan(), and overflow must occur exactly where rounding to nearest overflows.
inline double error_in_ulp(float got, double exact, Small small) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (std::isnan(exact)) return bits_of(got) == 0x7fc00000 ? 0 : kWrong;
  if (small == Small::kFlushed && std::fabs(exact) < 0x1.0p-126) return bits_of(got) == 0 ? 0 : kWrong;
  if (std::isinf(got) || std::fabs(exact) >= 0x1.ffffffp+127) return got == static_cast<float>(exact) ? 0 : kWrong;
  if (std::isnan(got)) return kWrong;
  if (exact == 0) return got == 0 ? 0 : kWrong;
  const std::int64_t exponent = ((__builtin_bit_cast(std::int64_t, exact) >> 52) & 0x7ff) - 1023;
  const std::int64_t spacing = exponent < -126 ? -149 : exponent - 23;
  return std::fabs(got - exact) * __builtin_bit_cast(double, (1023 - spacing) << 52);
}

}  // namespace rlk
