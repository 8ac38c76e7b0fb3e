// Constants that the host and the kernels of every operator share.
#pragma once

#include <cstdint>

namespace rlk::hip {

constexpr int kVec8 = 8;  // columns that a thread processes at a time

// Splits `blocks` blocks into launches and calls launch(first, count) for each launch. A launch must have fewer than
// 2^32 threads.
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 23;
template <class F>
void for_each_launch(std::int64_t blocks, const F& launch) {
  for (std::int64_t first = 0; first < blocks; first += kMostBlocks) {
    launch(first, blocks - first < kMostBlocks ? blocks - first : kMostBlocks);
  }
}

}  // namespace rlk::hip
