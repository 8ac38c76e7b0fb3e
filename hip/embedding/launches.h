// Constants and arguments of embedding that host and kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hip/common/launch_shape.h"
#include "kernels/rows/embedding_copy.h"
#include "kernels/rows/embedding_rows.h"

namespace rlk::hip {

constexpr int kCopyThreads = 256;
constexpr int kCopyUnits = 4;  // units (of 16 bytes or one element) that a thread copies

// The sort. A block is one wave, which reads its tile in order.
constexpr int kSortThreads = 64;
constexpr int kSortTile = 1024;  // tokens
constexpr int kDigitBits = 9;    // maximum number of bits of the row index by which one pass sorts
constexpr int kDigits = 1 << kDigitBits;
constexpr std::size_t kSortLds = kDigits * sizeof(std::uint32_t);
constexpr int kBeginThreads = 256;
constexpr std::size_t kBeginLds = kBeginThreads * sizeof(std::uint32_t);

// The sums. A block sums the rows that begin among kWindow sorted tokens. Each thread sums eight columns.
constexpr int kEmbeddingThreads = 64;
constexpr int kSliceColumns = kEmbeddingThreads * kVec8;
constexpr int kWindow = 16;
constexpr std::size_t kEmbeddingLds = kEmbeddingLevels * kSliceColumns * sizeof(float);
constexpr int kClearRows = 16;  // rows per block

// The sort key of a token. The upper half is the token's row, or num_rows if it has no row. The lower half is the
// token's index.
using EmbeddingKey = std::uint64_t;
struct EmbeddingDigit {
  int shift, width;  // position and number of a digit's bits in a key
};
struct EmbeddingWorkspace {
  EmbeddingKey* keys[2];   // [num_tokens] each
  std::uint32_t* counts;   // [kDigits, tiles]: counts of digits, later their first positions
  std::uint32_t* present;  // [num_rows]: 1 if any token has the row, else 0
};

}  // namespace rlk::hip
