// Arguments of linear's sm_90 kernels, except their tensor maps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

// Rows of 16-bit elements that may begin at any element.
struct RowStreams {
  std::uint64_t data;
  std::int64_t stride;  // bytes
  int bytes, rows;      // bytes of a row
};

constexpr int kCopyRange = 1024;     // contraction indices that a counter of copies covers
constexpr int kPieceVectors = 1024;  // vectors of 16 bytes that a warp copies at a time

// An operand that the product's kernel copies for TMA (copied_operands_sm90.cuh). `to` is null if the operand is not
// copied.
struct CopiedOperand {
  std::uint64_t from;
  uint4* to;
  std::int64_t stride, pitch;               // stride of `from` in bytes; pitch of `to` in vectors
  int rows, columns, vectors;               // `vectors`: vectors per row of the copy
  std::uint64_t first_vector, last_vector;  // the operand's whole vectors of 16 bytes lie between these addresses
};
struct CopiedOperands {
  CopiedOperand a, b;
  std::uint32_t* claimed;  // the number of claimed pieces
  std::uint32_t* done;     // [panels of A, then of B, ranges]: finished pieces
  int panels_a, panels_b;  // number of tiles that cover the rows of A, and of B
  int wave_a, wave_b;      // panels that a wave of tiles reads
  int waves, waves_b;      // number of all waves, and of waves that read A's first wave_a panels
  int ranges;
};

struct GemmLaunch {
  void* d;                        // [rows, columns]
  const void* bias;               // [columns], or null
  const float* addend;            // [rows, columns], or null; Combine::kContinue: the sums begin with the addend
  const std::int32_t* row_limit;  // rows of d (input gradient) or of the contraction (weight gradient); null: all rows
  std::int64_t d_stride, addend_stride;
  int rows, columns;  // shape of d
  int k_steps;        // stages of the contraction
  int chunk_steps;    // stages of a chunk (see Combine); k_steps if there is one chunk
  int chunks;
  int cluster;           // number of blocks, neighbours along A's rows, that load their tile of B together
  int last_a, last_b;    // rows that a block of the last, partial tile loads, a multiple of 8
  int tiles_a, tiles_b;  // tiles of clusters, along the rows of A and of B
  int group_a;           // consecutive clusters along A's rows, which share L2
  int stages;
  int prefetched_steps;  // number of weight stages that a block prefetches while the previous kernel still runs
  DType d_dtype, bias_dtype;
  bool vector_stores, vector_addend;  // whether each row of d (of the addend) begins at a multiple of 16 bytes
  bool box_stores;                    // TMA stores d; nothing is added to d in memory
  RowStreams rows_of_a;               // A, if Tile::kLoadsRows
  bool follows_copy;                  // the previous kernel copies B
  CopiedOperands copies;              // the operands to copy, if Tile::kCopies
};

// Number of boxes per stage for a block that takes rows_a rows of A and rows_b rows of B. A box has 64 contraction
// indices. A stage has two boxes if the products of one box take less time than the barriers of a stage.
constexpr int stage_boxes(int rows_a, int rows_b) { return rows_a == 64 && rows_b <= 112 ? 2 : 1; }

// How a kernel combines the sums of the contraction's chunks. A chunk of the contraction is a segment (rule 2 of
// docs/numerics.md) or a token block (rule 9).
enum class Combine : std::uint8_t {
  kAdd,       // each sum is added to d in memory; the first sum is added to the addend, if given
  kFold,      // the sums are added one after another in registers
  kTree,      // a perfect binary tree over segments
  kContinue,  // there is one chunk, whose sums begin with the addend
};

}  // namespace rlk::cuda
