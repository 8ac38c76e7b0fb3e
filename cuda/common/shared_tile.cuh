// Tiles of 16-bit elements in shared memory, with swizzled chunks of 16 bytes. The swizzle avoids bank conflicts in two
// cases: eight lanes write one row, or eight lanes read the same chunk of eight rows.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

template <int kTileRows, int kRowElements>
struct SharedTile {
  static constexpr int kRows = kTileRows, kRowBytes = kRowElements * 2, kRowChunks = kRowElements / 8;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRowChunks >= 2 && (kRowChunks & (kRowChunks - 1)) == 0);

  // key() returns the key of a row: the row's chunks are permuted by XOR with this key. So chunk i of eight consecutive
  // rows lies in eight different groups of banks.
  static constexpr int kKeyRows = 8;  // rows after which the XOR keys repeat
  static constexpr RLK_HD int key(int row) {
    return kRowChunks >= 8 ? row % 8 : row / (8 / (kRowChunks < 8 ? kRowChunks : 8)) % kRowChunks;
  }
  static constexpr RLK_HD int offset(int row, int chunk) { return row * kRowBytes + (chunk ^ key(row)) * 16; }
};

// A stage of one operand of the matrix product D = A B^T: kExtent rows of A or of B, by kStageK values of the
// contraction index k. kContraction: if true, k is the contiguous index, in memory and in the tile. If false, the row
// index is contiguous.
template <int kExtent, int kStageK, bool kContraction>
struct OperandTile : SharedTile<kContraction ? kExtent : kStageK, kContraction ? kStageK : kExtent> {
  using Base = SharedTile<kContraction ? kExtent : kStageK, kContraction ? kStageK : kExtent>;

  // The positions of the four 8 x 8 matrices of a 16 x 16 fragment, in the order of mma's registers. For operand A the
  // order is: rows 0 ... 7, then rows 8 ... 15 at k 0 ... 7, and then the same rows at k 8 ... 15. For operand B the
  // order is: rows 0 ... 7 at k 0 ... 7, then at k 8 ... 15, and then rows 8 ... 15 at the same k. So a fragment of B
  // holds the operands of two mma instructions.
  enum class Order { kA, kB };
  static constexpr RLK_HD int upper_extent(Order order, int matrix) {
    return order == Order::kA ? matrix % 2 : matrix / 2;
  }
  static constexpr RLK_HD int upper_k(Order order, int matrix) { return order == Order::kA ? matrix / 2 : matrix % 2; }

  // Offsets of a warp's fragments in the tile. Fragment (step, i) begins at k = 16 step and at row `first` + 16 i.
  template <Order kOrder>
  struct Fragments {
    int row_offset, chunk_offset;

    constexpr RLK_HD Fragments(int first, int lane) : row_offset(0), chunk_offset(0) {
      const int extent = upper_extent(kOrder, lane / 8), k = upper_k(kOrder, lane / 8);
      const int row = (kContraction ? first + extent * 8 : k * 8) + lane % 8;
      const int chunk = kContraction ? k : first / 8 + extent;
      row_offset = row * Base::kRowBytes;
      chunk_offset = (chunk ^ Base::key(row)) * 16;
    }
    // Returns the offset of a fragment. 16 more rows have the same keys, so they only add to the offset. A step of two
    // chunks is an XOR, since the constructor's `chunk` has zeros in the bits of such steps. The zeros are there
    // because `first` is a multiple of the number of a warp's rows, a power of two.
    constexpr RLK_HD int offset(int step, int i) const {
      return kContraction ? row_offset + i * 16 * Base::kRowBytes + (chunk_offset ^ step * 32)
                          : row_offset + step * 16 * Base::kRowBytes + (chunk_offset ^ i * 32);
    }
  };

  // Returns whether Fragments gives the same offsets as the tile's offset(), for warps that have kWarpExtent rows each.
  template <Order kOrder, int kWarpExtent>
  static constexpr bool fragments_agree() {
    for (int lane = 0; lane < 32; ++lane) {
      for (int first = 0; first < kExtent; first += kWarpExtent) {
        for (int step = 0; step < kStageK / 16; ++step) {
          for (int i = 0; i < kWarpExtent / 16; ++i) {
            const int matrix = lane / 8, extent = first + i * 16 + upper_extent(kOrder, matrix) * 8;
            const int k = step * 16 + upper_k(kOrder, matrix) * 8;
            const int row = (kContraction ? extent : k) + lane % 8, chunk = (kContraction ? k : extent) / 8;
            if (Fragments<kOrder>(first, lane).offset(step, i) != Base::offset(row, chunk)) return false;
          }
        }
      }
    }
    return true;
  }
};

}  // namespace rlk::cuda
