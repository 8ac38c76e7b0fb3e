// Constants and arguments of embedding that host and kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hip/common/launch_shape.h"
#include "kernels/rows/embedding_copy.h"
#include "kernels/rows/embedding_rows.h"

namespace rlk::hip {

constexpr int kCopyThreads = 256;
constexpr int kCopyUnits = 4;  // units per thread

// Sort: a block is one wave, which reads its tile in order.
constexpr int kSortThreads = 64;
constexpr int kSortTile = 1024;  // tokens
constexpr int kDigitBits = 9;    // greatest number of row-index bits that one pass sorts by
constexpr int kDigits = 1 << kDigitBits;
constexpr std::size_t kSortLds = kDigits * sizeof(std::uint32_t);
constexpr int kBeginThreads = 256;
constexpr std::size_t kBeginLds = kBeginThreads * sizeof(std::uint32_t);

// Sums: a block sums the rows that begin among this many sorted tokens, with eight columns per thread.
constexpr int kEmbeddingThreads = 64;
constexpr int kSliceColumns = kEmbeddingThreads * kVec8;
constexpr int kWindow = 16;
constexpr std::size_t kEmbeddingLds = kEmbeddingLevels * kSliceColumns * sizeof(float);
constexpr int kClearRows = 16;  // rows per block

// The sort key of a token. The upper half is its row, or num_rows without a row; the lower half its index.
using EmbeddingKey = std::uint64_t;
struct EmbeddingDigit {
  int shift, width;  // in a key, bits
};
struct EmbeddingWorkspace {
  EmbeddingKey* keys[2];   // [num_tokens] each
  std::uint32_t* counts;   // [kDigits, tiles]: counts, then the first position of each
  std::uint32_t* present;  // [num_rows]: 1 where a row has a token
};

}  // namespace rlk::hip
