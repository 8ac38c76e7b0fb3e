// How the columns of a vocabulary are cut into tiles and strips, and rows and strips into the work of blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/wave.h"
#include "rlk/kernels/scored_groups.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kHeadTileColumns = 256;  // two leaves
constexpr int kStripTiles = 8;         // a strip is an aligned run of 16 leaves of a part: one node of its tree
constexpr int kStripColumns = kStripTiles * kHeadTileColumns;

struct HeadColumns {
  int num_parts;                                    // of this shard
  int longest;                                      // columns of the longest part
  int strips_per_part;                              // of that
  int part_first[kNumParts], part_last[kNumParts];  // valid columns of each part, [first, last), local to the shard
};
RLK_HD int strips_of(const HeadColumns& columns) { return columns.num_parts * columns.strips_per_part; }

// A strip of a block of rows is an item.
struct HeadItems {
  int row_blocks, group_rows;  // blocks of rows; how many of them are neighbours in time, for L2
  int whole, all;              // items from `whole` on are cut into tiles, a node each
};
// As many whole strips as keep all blocks equally busy; the rest goes by tiles.
RLK_HD HeadItems head_items(const HeadColumns& columns, int row_blocks, int block_rows, int blocks) {
  const int all = row_blocks * strips_of(columns);
  return {row_blocks, wave_height(blocks, row_blocks, block_rows, kHeadTileColumns), all / blocks * blocks, all};
}

// Blocks of the rows in place of `groups`, at least one, or, where that is null, row_blocks.
RLK_HD int scored_row_blocks(const ScoredGroups* groups, int row_blocks, int block_rows) {
  if (groups == nullptr) return row_blocks;
  const int scored = (groups->count * kScoredGroupRows + block_rows - 1) / block_rows;
  return scored > 0 ? scored : 1;
}
RLK_HD HeadItems scored_items(const HeadColumns& columns, const ScoredGroups* groups, int row_blocks, int block_rows,
                              int blocks) {
  return head_items(columns, scored_row_blocks(groups, row_blocks, block_rows), block_rows, blocks);
}

// One stretch of tiles of a strip, and the rows it is for.
struct HeadWork {
  int row_block, part, strip;  // strip: of the part
  int first_tile, tiles;       // of the strip; tiles is 0 where the part does not reach so far
  bool whole;                  // the node is the strip's
  int slot;                    // of a node that is not, among those
};

RLK_HD int strip_tiles(const HeadColumns& columns, int part, int strip) {
  const int left = columns.part_last[part] - columns.part_first[part] - strip * kStripColumns;
  const int tiles = (left + kHeadTileColumns - 1) / kHeadTileColumns;
  return tiles < 0 ? 0 : tiles < kStripTiles ? tiles : kStripTiles;
}

RLK_HD int head_work_items(const HeadItems& items) { return items.whole + (items.all - items.whole) * kStripTiles; }

// Strips go around the groups of row blocks: the rows of a group stay in L2 while the weights pass by.
RLK_HD HeadWork head_work(const HeadColumns& columns, const HeadItems& items, int index) {
  HeadWork work;
  work.whole = index < items.whole;
  work.slot = index - items.whole;
  const int item = work.whole ? index : items.whole + work.slot / kStripTiles;
  const int per_group = items.group_rows * strips_of(columns);
  const int group = item / per_group, in_group = item - group * per_group, first = group * items.group_rows;
  const int rows_left = items.row_blocks - first;  // none of an index past the last, which is no work
  const int height = rows_left < 1 ? 1 : rows_left < items.group_rows ? rows_left : items.group_rows;
  const int strip = in_group / height;
  work.row_block = first + in_group - strip * height;
  work.part = strip / columns.strips_per_part;
  work.strip = strip - work.part * columns.strips_per_part;
  const int tiles = strip_tiles(columns, work.part, work.strip);
  work.first_tile = work.whole ? 0 : work.slot % kStripTiles;
  work.tiles = work.whole ? tiles : work.first_tile < tiles;
  return work;
}

// The item of a strip of a row block.
RLK_HD int head_item(const HeadColumns& columns, const HeadItems& items, int row_block, int part, int strip) {
  const int group = row_block / items.group_rows, first = group * items.group_rows;
  const int height = items.row_blocks - first < items.group_rows ? items.row_blocks - first : items.group_rows;
  return first * strips_of(columns) + (part * columns.strips_per_part + strip) * height + row_block - first;
}

RLK_HD int next_power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Whether a warp has room for the nodes of all strips (tree_over_nodes), which two million columns and more do not find.
inline bool fits_one_tree(const HeadColumns& columns) {
  return columns.num_parts * next_power_of_two(columns.strips_per_part) <= 1024;
}

}  // namespace rlk::cuda
