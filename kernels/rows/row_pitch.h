// The pitch of rows of 16-bit elements. TMA needs rows that begin at multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace rlk {

// n rounded up to a multiple of 8.
constexpr std::int64_t round_up_8(std::int64_t n) { return (n + 7) / 8 * 8; }

}  // namespace rlk
