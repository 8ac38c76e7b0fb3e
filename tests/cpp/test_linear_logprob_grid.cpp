// Tests the work lists of the fused head on CUDA. Its kernels derive them from the block index, so a test without a GPU
// can check that all work is done.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/linear_logprob/pair_grid.h"

namespace rlk::cuda {
namespace {

struct Shape {
  int row_blocks, blocks;
  std::vector<int> parts;  // number of columns of each part
};
// Row blocks: one item; fewer and more items than blocks; a last group of rows that is not full. Parts: one column, one
// leaf, whole runs, empty; and the vocabularies of Llama 3 and Qwen 2.5.
const Shape kShapes[] = {{1, 132, {16032, 16032, 16032, 16032, 16032, 16032, 16032, 16032}},
                         {64, 132, {16032, 16032, 16032, 16032, 16032, 16032, 16032, 16032}},
                         {64, 114, {18992, 18992, 18992, 18992, 18992, 18992, 18992, 18992}},
                         {17, 132, {16384, 16384, 16384, 16384, 16384, 16384, 16384, 100}},
                         {5, 7, {3072, 1}},
                         {3, 2, {128, 0, 385, 6145}},
                         {2, 132, {0}}};

HeadColumns columns_of(const Shape& shape) {
  HeadColumns columns{};
  columns.num_parts = static_cast<int>(shape.parts.size());
  for (int i = 0, first = 0; i < columns.num_parts; ++i) {
    columns.part_first[i] = first;
    columns.part_last[i] = first += shape.parts[i];
    columns.longest = std::max(columns.longest, shape.parts[i]);
  }
  return columns;
}

TEST(LinearLogprobGrid, EveryPairIsOneBlocksWork) {
  for (const Shape& shape : kShapes) {
    const HeadColumns columns = columns_of(shape);
    const PairItems items = pair_items(columns, shape.row_blocks, shape.blocks);
    std::set<std::tuple<int, int, int>> done;  // row block, part, pair
    std::set<int> slots;
    for (int index = 0; index < pair_work_items(items); ++index) {
      const PairWork work = pair_work(columns, items, index);
      const int slot = first_slot(columns, items, work.row_block, work.part, work.run);
      EXPECT_EQ(slot < 0, work.slot < 0);
      if (work.slot >= 0) {
        EXPECT_EQ(slot + work.first_pair, work.slot);
        EXPECT_TRUE(slots.insert(work.slot).second);
        EXPECT_LT(work.slot, single_pairs(items.full) + single_pairs(items.ends));
      }
      for (int i = 0; i < work.pairs; ++i) {
        const int pair = work.run * kRunPairs + work.first_pair + i;
        EXPECT_TRUE(done.insert({work.row_block, work.part, pair}).second);
      }
    }
    std::size_t pairs = 0;
    for (int count : shape.parts) pairs += (count + kPairColumns - 1) / kPairColumns;
    EXPECT_EQ(done.size(), pairs * shape.row_blocks);
  }
}

TEST(LinearLogprobGrid, BlocksAreBusyForEquallyLong) {
  const HeadColumns columns = columns_of(kShapes[1]);
  const PairItems items = pair_items(columns, 64, 132);
  std::map<int, int> pairs;
  for (int index = 0; index < pair_work_items(items); ++index) {
    pairs[index % 132] += pair_work(columns, items, index).pairs;
  }
  for (const auto& [block, count] : pairs) {
    EXPECT_GE(count, 162);  // 21504 pairs of 132 blocks
    EXPECT_LE(count, 164);
  }
}

}  // namespace
}  // namespace rlk::cuda
