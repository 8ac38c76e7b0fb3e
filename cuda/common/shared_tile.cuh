// Tiles of 16-bit elements in shared memory whose 16-byte chunks are swizzled, so that neither eight lanes that fill a
// row nor eight that read one chunk of eight rows meet in a bank.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

template <int kTileRows, int kRowElements>
struct SharedTile {
  static constexpr int kRows = kTileRows, kRowBytes = kRowElements * 2, kRowChunks = kRowElements / 8;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRowChunks >= 2 && (kRowChunks & (kRowChunks - 1)) == 0);

  // What a row's chunks are exchanged by: eight rows that follow one another lie in different banks each.
  static constexpr RLK_HD int key(int row) {
    return kRowChunks >= 8 ? row % 8 : row / (8 / (kRowChunks < 8 ? kRowChunks : 8)) % kRowChunks;
  }
  static constexpr RLK_HD int offset(int row, int chunk) { return row * kRowBytes + (chunk ^ key(row)) * 16; }
};

// A stage of one operand of a matrix product: kExtent of its rows (columns of D for the second operand) by kStageK of
// the contraction. Memory's contiguous index, which is a tile's row here too, is the contraction or the extent.
template <int kExtent, int kStageK, bool kContraction>
struct OperandTile : SharedTile<kContraction ? kExtent : kStageK, kContraction ? kStageK : kExtent> {
  using Base = SharedTile<kContraction ? kExtent : kStageK, kContraction ? kStageK : kExtent>;

  // Addresses of the 16 x 16 fragments of a warp: the i-th after extent `first`, the step-th of the contraction. Four
  // matrices: the lower and the upper half of the extent at k 0 ... 7, then both at 8 ... 15. That is mma's A; of B it
  // is two of them, matrices 0 and 2, 1 and 3.
  struct Fragments {
    int row_offset, chunk_offset;

    constexpr RLK_HD Fragments(int first, int lane) : row_offset(0), chunk_offset(0) {
      const int row = kContraction ? first + lane % 16 : lane / 16 * 8 + lane % 8;
      const int chunk = kContraction ? lane / 16 : first / 8 + lane / 8 % 2;
      row_offset = row * Base::kRowBytes;
      chunk_offset = (chunk ^ Base::key(row)) * 16;
    }
    // Steps of 16 rows leave the key as it is, and the bits that steps of two chunks change are 0 in `chunk`: with
    // `first` a multiple of the warp's extent, a power of two.
    constexpr RLK_HD int offset(int step, int i) const {
      return kContraction ? row_offset + i * 16 * Base::kRowBytes + (chunk_offset ^ step * 32)
                          : row_offset + step * 16 * Base::kRowBytes + (chunk_offset ^ i * 32);
    }
  };

  // Whether Fragments agrees with the tile for warps of kWarpExtent.
  template <int kWarpExtent>
  static constexpr bool fragments_agree() {
    for (int lane = 0; lane < 32; ++lane) {
      for (int first = 0; first < kExtent; first += kWarpExtent) {
        for (int step = 0; step < kStageK / 16; ++step) {
          for (int i = 0; i < kWarpExtent / 16; ++i) {
            const int matrix = lane / 8, extent = first + i * 16 + matrix % 2 * 8, k = step * 16 + matrix / 2 * 8;
            const int row = (kContraction ? extent : k) + lane % 8, chunk = (kContraction ? k : extent) / 8;
            if (Fragments(first, lane).offset(step, i) != Base::offset(row, chunk)) return false;
          }
        }
      }
    }
    return true;
  }
};

}  // namespace rlk::cuda
