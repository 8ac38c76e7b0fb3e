// The columns of a vocabulary, and how they are divided into tiles and strips for few rows. A part is one of the
// vocabulary's eight parts; a leaf is 128 columns of a part (rule 5 of docs/numerics.md).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/vocabulary/scored_groups.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kSmallM = 64;            // rows of one warpgroup, for which there is a separate kernel
constexpr int kHeadTileColumns = 256;  // columns per tile: two leaves
constexpr int kStripTiles = 8;         // a strip is an aligned run of 16 leaves of a part: one node of the part's tree
constexpr int kStripColumns = kStripTiles * kHeadTileColumns;

struct HeadColumns {
  int num_parts;                                    // parts of this shard
  int longest;                                      // columns of the longest part
  int strips_per_part;                              // strips of the longest part
  int part_first[kNumParts], part_last[kNumParts];  // valid columns of each part, [first, last), local to the shard
};
RLK_HD int strips_of(const HeadColumns& columns) { return columns.num_parts * columns.strips_per_part; }

// The number of blocks of rows that `groups` fills, at least one; row_blocks if `groups` is null.
RLK_HD int scored_row_blocks(const ScoredGroups* groups, int row_blocks, int block_rows) {
  if (groups == nullptr) return row_blocks;
  const int scored = (groups->count * kScoredGroupRows + block_rows - 1) / block_rows;
  return scored > 0 ? scored : 1;
}

// Items of work for at most kSmallM rows. Each block gets the same number of whole strips; the remaining strips are
// divided into tiles.
struct HeadItems {
  int whole, all;  // items from `whole` on are single tiles, each with its own node
};
RLK_HD HeadItems head_items(const HeadColumns& columns, int blocks) {
  const int all = strips_of(columns);
  return {all / blocks * blocks, all};
}

// One work item of a block: consecutive tiles of a strip.
struct HeadWork {
  int part, strip;        // `strip` counts within the part
  int first_tile, tiles;  // position in the strip; number of tiles, 0 after the end of the part
  bool whole;             // the item is a whole strip and yields one node
  int slot;               // index among the nodes of tiles
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

// The largest number of nodes, of all parts together, for which a warp has room (tree_over_nodes).
constexpr int kMostNodes = 1024;

}  // namespace rlk::cuda
