// What the sm_90 kernels of linear are told beside their tensor maps.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

struct GemmLaunch {
  void* d;              // [rows, columns]
  const void* bias;     // [columns], or null
  const float* addend;  // [rows, columns], or null
  std::int64_t d_stride, addend_stride;
  int rows, columns;  // of d
  int k_steps;        // stages of the contraction
  int chunk_steps;    // stages of a segment (rule 2) or a token block (rule 9); k_steps where there is but one
  int chunks;
  int cluster;           // blocks that are neighbours along m and load their tile of B together
  int tiles_m, tiles_n;  // of clusters
  int group_m;           // clusters along m that are neighbours in time, for L2
  int stages;
  DType d_dtype, bias_dtype;
  bool vector_stores, vector_addend;  // rows of d, of addend begin at 16 bytes
};

// What becomes of the sums of the chunks.
enum class Combine : std::uint8_t {
  kAdd,   // each is added to d in memory, the first to the addend or nothing
  kFold,  // the same in registers
  kTree,  // rule 2's tree
};

}  // namespace rlk::cuda
