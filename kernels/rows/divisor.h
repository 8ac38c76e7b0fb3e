// Divides an index by a number that is known before the launch. The division is one multiplication and one shift. GPUs
// have no instruction for integer division, and an emulated division takes about 150 cycles, in which a block issues no
// loads.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

struct Divisor {
  std::uint32_t value = 1, multiplier = std::uint32_t{1} << 31;
  int shift = 31;

  Divisor() = default;
  // d lies in [1, 2^31]. With 2^(l - 1) < d <= 2^l the multiplier is 2^(31 + l) / d, rounded up, so rounding adds less
  // than 1 to it. For n < 2^31, n * multiplier / 2^(31 + l) therefore exceeds n / d by less than 2^-l <= 1 / d. An
  // excess below 1 / d is too small to reach the next integer.
  explicit Divisor(std::uint32_t d) : value(d) {
    while ((std::uint64_t{1} << (shift - 31)) < d) ++shift;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + d - 1) / d);
  }
  // n / value, for n below 2^31.
  RLK_HD std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{n} * multiplier) >> shift);
  }
};

}  // namespace rlk
