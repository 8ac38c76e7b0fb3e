// Arguments of linear's sm_90 kernels, besides their tensor maps.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

struct GemmLaunch {
  void* d;                        // [rows, columns]
  const void* bias;               // [columns], or null
  const float* addend;            // [rows, columns], or null; of Combine::kContinue what the sums begin with
  const std::int32_t* row_limit;  // rows of d, of an input gradient, or of the contraction, of a weight's, or null: all
  std::int64_t d_stride, addend_stride;
  int rows, columns;  // shape of d
  int k_steps;        // stages of the contraction
  int chunk_steps;    // stages of a segment (rule 2) or a token block (rule 9); k_steps where there is but one
  int chunks;
  int cluster;           // blocks that are neighbours along A's rows and load their tile of B together
  int last_a, last_b;    // rows that a block loads where fewer than a tile's are left, a multiple of 8
  int tiles_a, tiles_b;  // tiles of clusters, along the rows of A and of B
  int group_a;           // clusters along A's rows that are neighbours in time, for L2
  int stages;
  int prefetched_steps;  // stages of weights that a block asks for while the kernel before this one still runs
  DType d_dtype, bias_dtype;
  bool vector_stores, vector_addend;  // rows of d, of addend begin at 16 bytes
  bool box_stores;                    // d goes to memory by the copy engine: nothing is added to it there
};

// Boxes of 64 of the contraction in a stage, by the rows that a block takes of A and of B: two where one is multiplied
// sooner than its barriers are served.
constexpr int stage_boxes(int rows_a, int rows_b) { return rows_a == 64 && rows_b <= 112 ? 2 : 1; }

// What becomes of the sums of the chunks.
enum class Combine : std::uint8_t {
  kAdd,       // each is added to d in memory, the first to the addend or nothing
  kFold,      // the same in registers
  kTree,      // rule 2's tree
  kContinue,  // there is one, whose sums begin with the addend
};

}  // namespace rlk::cuda
