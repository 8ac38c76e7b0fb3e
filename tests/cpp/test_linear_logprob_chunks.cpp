// Tests how the backward of linear_logprob cuts the vocabulary: every column occurs once, and gradients of logits
// overlap nothing else.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cpp/ops/linear_logprob_chunks.h"
#include "cpp/ops/linear_logprob_rows.h"

namespace rlk {
namespace {

LinearLogprobBackwardParams head(std::int64_t rows, std::int64_t features, std::int64_t columns, DType dweight,
                                 std::uintptr_t address) {
  LinearLogprobBackwardParams p;
  p.num_rows = rows;
  p.num_columns = columns;
  p.head.in_features = features;
  p.head.dtype = DType::kBFloat16;
  p.dweight_dtype = dweight;
  p.dweight = reinterpret_cast<void*>(address);
  return p;
}

TEST(LinearLogprobChunks, EveryColumnOnceAndGradientsPastTheirOwnRows) {
  for (const std::int64_t rows : {1, 300, 8192}) {
    for (const std::int64_t features : {0, 13, 64, 4096}) {
      for (const std::int64_t columns : {1, 255, 256, 20000, 128256}) {
        for (const DType dweight : {DType::kBFloat16, DType::kFloat32}) {
          for (const std::int64_t chunk : {16, 256, 7424, 24576}) {
            for (const bool lends : {false, true}) {
              const auto p = head(rows, features, columns, dweight, 4096 + 16);
              const std::int64_t end = columns * features * size_of(dweight);
              std::int64_t first = 0;
              for (const Chunk& c : chunks_of(p, {chunk, false, lends})) {
                ASSERT_EQ(c.first, first);
                ASSERT_GT(c.count, 0);
                first += c.count;
                if (!c.in_dweight) {
                  ASSERT_LE(c.count, chunk);
                  continue;
                }
                ASSERT_TRUE(lends);
                ASSERT_GT(c.count, chunk);
                const std::int64_t offset = offset_in_dweight(p, c);
                ASSERT_EQ((4096 + 16 + offset) % kWorkspaceAlign, 0);
                ASSERT_GE(offset, first * features * size_of(dweight));
                ASSERT_LE(offset + rows * c.count * 2, end);
              }
              ASSERT_EQ(first, columns);
            }
          }
        }
      }
    }
  }
}

TEST(LinearLogprobChunks, DweightsMemoryMakesFewer) {
  const auto p = head(8192, 4096, 128256, DType::kBFloat16, 4096);
  constexpr std::int64_t kChunk = 7680;  // columns that fit in 256 MiB together with the sums of dhidden
  EXPECT_EQ(chunks_of(p, {kChunk}).size(), 17U);
  EXPECT_EQ(chunks_of(p, {kChunk, false, true}).size(), 9U);
  EXPECT_FALSE(chunks_of(p, {kChunk, false, true}).back().in_dweight);
  EXPECT_EQ(chunks_of(p, {kMostColumns, false, true}).size(), chunks_of(p, {kMostColumns}).size());
}

}  // namespace
}  // namespace rlk
