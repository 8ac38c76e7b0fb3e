// The columns of a vocabulary, and how those of few rows are cut into tiles and strips.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/kernels/scored_groups.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kSmallM = 64;            // what one warpgroup has, as a kernel of its own
constexpr int kHeadTileColumns = 256;  // columns per tile: two leaves
constexpr int kStripTiles = 8;         // a strip is an aligned run of 16 leaves of a part: one node of its tree
constexpr int kStripColumns = kStripTiles * kHeadTileColumns;

struct HeadColumns {
  int num_parts;                                    // parts of this shard
  int longest;                                      // columns of the longest part
  int strips_per_part;                              // strips of the longest part
  int part_first[kNumParts], part_last[kNumParts];  // valid columns of each part, [first, last), local to the shard
};
RLK_HD int strips_of(const HeadColumns& columns) { return columns.num_parts * columns.strips_per_part; }

// Blocks of the rows in place of `groups`, at least one, or, where that is null, row_blocks.
RLK_HD int scored_row_blocks(const ScoredGroups* groups, int row_blocks, int block_rows) {
  if (groups == nullptr) return row_blocks;
  const int scored = (groups->count * kScoredGroupRows + block_rows - 1) / block_rows;
  return scored > 0 ? scored : 1;
}

// For at most kSmallM rows: strips. As many are whole as keep all blocks equally busy; the rest goes by tiles.
struct HeadItems {
  int whole, all;  // items from `whole` on are cut into tiles, a node each
};
RLK_HD HeadItems head_items(const HeadColumns& columns, int blocks) {
  const int all = strips_of(columns);
  return {all / blocks * blocks, all};
}

// A block's work: consecutive tiles of a strip.
struct HeadWork {
  int part, strip;        // strip: of the part
  int first_tile, tiles;  // place in the strip; tiles is 0 where the part does not reach so far
  bool whole;             // the node is the strip's
  int slot;               // index among the nodes that are not a strip's
};

RLK_HD int strip_tiles(const HeadColumns& columns, int part, int strip) {
  const int left = columns.part_last[part] - columns.part_first[part] - strip * kStripColumns;
  const int tiles = (left + kHeadTileColumns - 1) / kHeadTileColumns;
  return tiles < 0 ? 0 : tiles < kStripTiles ? tiles : kStripTiles;
}

RLK_HD int head_work_items(const HeadItems& items) { return items.whole + (items.all - items.whole) * kStripTiles; }

RLK_HD HeadWork head_work(const HeadColumns& columns, const HeadItems& items, int index) {
  HeadWork work;
  work.whole = index < items.whole;
  work.slot = index - items.whole;
  const int strip = work.whole ? index : items.whole + work.slot / kStripTiles;
  work.part = strip / columns.strips_per_part;
  work.strip = strip - work.part * columns.strips_per_part;
  const int tiles = strip_tiles(columns, work.part, work.strip);
  work.first_tile = work.whole ? 0 : work.slot % kStripTiles;
  work.tiles = work.whole ? tiles : work.first_tile < tiles;
  return work;
}

RLK_HD int next_power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Nodes that a warp has room for (tree_over_nodes), of all parts.
constexpr int kMostNodes = 1024;

}  // namespace rlk::cuda
