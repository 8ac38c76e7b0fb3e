// Divides a vocabulary's columns into tiles of one and a half leaves, pairs of tiles, and runs of pairs. An item of
// work is a run, or a pair, for one block of rows.
#pragma once

#include <cstdint>

#include "../common/concurrent_tiles.h"
#include "head_grid.h"

namespace rlk::cuda {

constexpr int kPairTileColumns = 192;  // columns per warpgroup
constexpr int kPairColumns = 2 * kPairTileColumns, kPairLeaves = 3;
constexpr int kPairRows = 128;  // rows per block
constexpr int kRunPairs = 8;    // pairs per run: 24 leaves, three nodes of the part's tree
constexpr int kRunColumns = kRunPairs * kPairColumns, kRunNodes = 3, kNodeLevels = 3, kNodeLeaves = 8;
static_assert(kRunPairs * kPairLeaves == kRunNodes * kNodeLeaves && 1 << kNodeLevels == kNodeLeaves);

// Runs of a shard's longest part.
struct PartRuns {
  int all;        // runs
  int end_pairs;  // pairs of the last run; all other runs have kRunPairs
};
RLK_HD PartRuns part_runs(const HeadColumns& columns) {
  const int longest = columns.longest > 1 ? columns.longest : 1;  // at least 1, even if the shard is only padding
  const int pairs = (longest + kPairColumns - 1) / kPairColumns, all = (pairs + kRunPairs - 1) / kRunPairs;
  return {all, pairs - (all - 1) * kRunPairs};
}

// Work items for runs of equal length, over all blocks of rows. Each of the first `whole` items is a whole run, which
// one thread block computes. `whole` is a multiple of the number of thread blocks, so all of them get equal work. All
// other items are single pairs.
struct RunItems {
  int runs;        // runs per row block
  int all, whole;  // items
  int pairs;       // pairs per run
};
struct PairItems {
  int row_blocks, group_rows;  // blocks of rows; blocks in a group, which run close in time and share L2
  RunItems full, ends;         // runs of kRunPairs pairs; the last run of each part
};
// The fields are chosen one by one: a choice between two structs would put both structs in memory.
RLK_HD RunItems of_kind(const PairItems& items, bool ends) {
  return {ends ? items.ends.runs : items.full.runs, ends ? items.ends.all : items.full.all,
          ends ? items.ends.whole : items.full.whole, ends ? items.ends.pairs : items.full.pairs};
}
RLK_HD PairItems pair_items(const HeadColumns& columns, int row_blocks, int blocks) {
  const PartRuns runs = part_runs(columns);
  const auto items = [&](int of_row_block, int pairs) {
    const int all = row_blocks * of_row_block;
    return RunItems{of_row_block, all, all / blocks * blocks, pairs};
  };
  return {row_blocks, wave_height(blocks, row_blocks, kPairRows, kPairTileColumns),
          items(columns.num_parts * (runs.all - 1), kRunPairs), items(columns.num_parts, runs.end_pairs)};
}
// Pairs for the rows in `groups`, or for all row_blocks if `groups` is null.
RLK_HD PairItems scored_pairs(const HeadColumns& columns, const ScoredGroups* groups, int row_blocks, int blocks) {
  return pair_items(columns, scored_row_blocks(groups, row_blocks, kPairRows), blocks);
}
RLK_HD int single_pairs(const RunItems& items) { return (items.all - items.whole) * items.pairs; }
RLK_HD int pair_work_items(const PairItems& items) {
  return items.full.whole + items.ends.whole + single_pairs(items.full) + single_pairs(items.ends);
}

// Neighbouring pairs of a run, and their block of rows.
struct PairWork {
  int row_block, part, run;  // `run` counts within the part
  int first_pair, pairs;     // range of the run's pairs; `pairs` is 0 after the end of the part
  int slot;                  // index among single pairs; -1: a whole run
};

// The number of columns from the begin of a run to the end of its part; below 1 if the run begins at or after that end.
RLK_HD int columns_from(const HeadColumns& columns, int part, int run) {
  return columns.part_last[part] - columns.part_first[part] - run * kRunColumns;
}

// The work item of an index. Runs are the outer loop, and the blocks of rows of a group are the inner loop. So a
// group's rows stay in L2 while the weights stream.
RLK_HD PairWork pair_work(const HeadColumns& columns, const PairItems& items, int index) {
  PairWork work;
  bool ends;
  int item;
  work.slot = index - items.full.whole - items.ends.whole;
  if (work.slot < 0) {
    ends = index >= items.full.whole;
    item = ends ? index - items.full.whole : index;
    work.first_pair = 0;
  } else {
    const int of_full = single_pairs(items.full);
    ends = work.slot >= of_full;
    const RunItems cut = of_kind(items, ends);
    const int single = ends ? work.slot - of_full : work.slot;
    item = cut.whole + single / cut.pairs;
    work.first_pair = single % cut.pairs;
  }
  const int runs = ends ? items.ends.runs : items.full.runs, per_part = runs / columns.num_parts;
  const int per_group = items.group_rows * runs;
  const int group = item / per_group, in_group = item - group * per_group, first = group * items.group_rows;
  const int rows_left = items.row_blocks - first;  // 0 for an index after the last item
  const int height = rows_left < 1 ? 1 : rows_left < items.group_rows ? rows_left : items.group_rows;
  const int run = in_group / height;
  work.row_block = first + in_group - run * height;
  work.part = run / per_part;
  work.run = ends ? items.full.runs / columns.num_parts : run - work.part * per_part;
  const int left = columns_from(columns, work.part, work.run) - work.first_pair * kPairColumns;
  const int pairs = (left + kPairColumns - 1) / kPairColumns, most = work.slot < 0 ? kRunPairs : 1;
  work.pairs = pairs < 0 ? 0 : pairs < most ? pairs : most;
  return work;
}

// The number of nodes of eight leaves in a part.
RLK_HD int nodes_per_part(const HeadColumns& columns) {
  const int longest = columns.longest > 1 ? columns.longest : 1;
  return (longest + kNodeLeaves * kLeafColumns - 1) / (kNodeLeaves * kLeafColumns);
}

// Where the nodes of a run of a row block lie: -1 if one item computes the whole run; otherwise the slot of the run's
// first single pair.
RLK_HD int first_slot(const HeadColumns& columns, const PairItems& items, int row_block, int part, int run) {
  const int full_runs = items.full.runs / columns.num_parts;
  const bool ends = run == full_runs;
  const RunItems all = of_kind(items, ends);
  const int group = row_block / items.group_rows, first = group * items.group_rows;
  const int height = items.row_blocks - first < items.group_rows ? items.row_blocks - first : items.group_rows;
  const int in_row_block = ends ? part : part * full_runs + run;
  const int item = first * all.runs + in_row_block * height + row_block - first;
  if (item < all.whole) return -1;
  return (item - all.whole) * all.pairs + (ends ? single_pairs(items.full) : 0);
}

}  // namespace rlk::cuda
