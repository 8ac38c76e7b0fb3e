// Functions on words that hold four flags of one byte each.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// Sets the top bit of each byte that is not zero.
RLK_HD std::uint32_t tops_not_zero(std::uint32_t word) {
  constexpr std::uint32_t kLow = 0x7f7f7f7f;
  return (((word & kLow) + kLow) | word) & ~kLow;
}
// Returns one bit per byte, which is set if the byte is not zero. Bit 0 belongs to the lowest byte.
RLK_HD std::uint32_t bytes_not_zero(std::uint32_t word) { return (tops_not_zero(word) >> 7) * 0x01020408u >> 24; }

}  // namespace rlk
