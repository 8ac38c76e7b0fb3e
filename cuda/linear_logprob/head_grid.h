// How the columns of a vocabulary are cut into tiles and strips, and rows and strips into the work of blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kHeadTileColumns = 256;  // two leaves
constexpr int kStripTiles = 8;         // a strip is an aligned run of 16 leaves of a part: one node of its tree
constexpr int kStripColumns = kStripTiles * kHeadTileColumns;

struct HeadGrid {
  int num_parts;                                    // of this shard
  int strips_per_part;                              // of the longest part
  int part_first[kNumParts], part_last[kNumParts];  // valid columns of each part, [first, last), local to the shard
  int row_blocks, group_rows;                       // blocks of rows; how many of them are neighbours in time, for L2
  int whole_items, items;                           // items from whole_items on are cut into tiles, a node each
};

// One stretch of tiles of a strip, and the rows it is for.
struct HeadWork {
  int row_block, part, strip;  // strip: of the part
  int first_tile, tiles;       // of the strip; tiles is 0 where the part does not reach so far
  bool whole;                  // the node is the strip's
  int slot;                    // of a node that is not, among those
};

RLK_HD int strip_tiles(const HeadGrid& grid, int part, int strip) {
  const int columns = grid.part_last[part] - grid.part_first[part] - strip * kStripColumns;
  const int tiles = (columns + kHeadTileColumns - 1) / kHeadTileColumns;
  return tiles < 0 ? 0 : tiles < kStripTiles ? tiles : kStripTiles;
}

RLK_HD int head_work_items(const HeadGrid& grid) {
  return grid.whole_items + (grid.items - grid.whole_items) * kStripTiles;
}

// Strips go around the groups of row blocks: the rows of a group stay in L2 while the weights pass by.
RLK_HD HeadWork head_work(const HeadGrid& grid, int index) {
  HeadWork work;
  work.whole = index < grid.whole_items;
  work.slot = index - grid.whole_items;
  const int item = work.whole ? index : grid.whole_items + work.slot / kStripTiles;
  const int strips = grid.num_parts * grid.strips_per_part, per_group = grid.group_rows * strips;
  const int group = item / per_group, in_group = item - group * per_group, first = group * grid.group_rows;
  const int height = grid.row_blocks - first < grid.group_rows ? grid.row_blocks - first : grid.group_rows;
  const int strip = in_group / height;
  work.row_block = first + in_group - strip * height;
  work.part = strip / grid.strips_per_part;
  work.strip = strip - work.part * grid.strips_per_part;
  const int tiles = strip_tiles(grid, work.part, work.strip);
  work.first_tile = work.whole ? 0 : work.slot % kStripTiles;
  work.tiles = work.whole ? tiles : work.first_tile < tiles;
  return work;
}

// The item of a strip of a row block.
RLK_HD int head_item(const HeadGrid& grid, int row_block, int part, int strip) {
  const int strips = grid.num_parts * grid.strips_per_part, group = row_block / grid.group_rows;
  const int first = group * grid.group_rows;
  const int height = grid.row_blocks - first < grid.group_rows ? grid.row_blocks - first : grid.group_rows;
  return group * grid.group_rows * strips + (part * grid.strips_per_part + strip) * height + row_block - first;
}

RLK_HD int next_power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// As many whole strips as keep all blocks equally busy; the rest goes by tiles.
inline void plan_head_items(HeadGrid* grid, int blocks) {
  grid->items = grid->row_blocks * grid->num_parts * grid->strips_per_part;
  grid->whole_items = grid->items / blocks * blocks;
}

}  // namespace rlk::cuda
