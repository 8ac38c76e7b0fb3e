// Tiles of 16-bit elements in shared memory, with swizzled chunks of 16 bytes. The swizzle avoids bank conflicts of
// eight lanes that write one row, or that read the same chunk of eight rows.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

template <int kTileRows, int kRowElements>
struct SharedTile {
  static constexpr int kRows = kTileRows, kRowBytes = kRowElements * 2, kRowChunks = kRowElements / 8;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRowChunks >= 2 && (kRowChunks & (kRowChunks - 1)) == 0);

  // The key of a row: the row's chunks are permuted by XOR with the key. So the same chunk of eight consecutive rows
  // lies in different banks.
  static constexpr int kKeyRows = 8;  // rows after which keys repeat
  static constexpr RLK_HD int key(int row) {
    return kRowChunks >= 8 ? row % 8 : row / (8 / (kRowChunks < 8 ? kRowChunks : 8)) % kRowChunks;
  }
  static constexpr RLK_HD int offset(int row, int chunk) { return row * kRowBytes + (chunk ^ key(row)) * 16; }
};

// A stage of one operand of a matrix product with result D: kExtent rows by kStageK contraction indices. A row of the
// first operand belongs to a row of D, and a row of the second operand to a column of D. kContraction: whether the
// contraction index is contiguous, in memory and in the tile; else the row index is contiguous.
template <int kExtent, int kStageK, bool kContraction>
struct OperandTile : SharedTile<kContraction ? kExtent : kStageK, kContraction ? kStageK : kExtent> {
  using Base = SharedTile<kContraction ? kExtent : kStageK, kContraction ? kStageK : kExtent>;

  // The positions of the four 8 x 8 matrices of a 16 x 16 fragment, in the order of mma's registers. Operand A takes
  // the lower and the upper eight rows at k 0 ... 7, then the lower and the upper eight rows at k 8 ... 15. Operand B
  // takes the lower eight rows at k 0 ... 7 and at k 8 ... 15, then the upper eight rows at both ranges of k. So a
  // fragment holds two operands B.
  enum class Order { kA, kB };
  static constexpr RLK_HD int upper_extent(Order order, int matrix) {
    return order == Order::kA ? matrix % 2 : matrix / 2;
  }
  static constexpr RLK_HD int upper_k(Order order, int matrix) { return order == Order::kA ? matrix / 2 : matrix % 2; }

  // Offsets of a warp's fragments. A fragment has number i among the rows from `first` on, and number `step` along the
  // contraction.
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
    // Returns the offset of a fragment. Steps of 16 rows do not change the key. XOR with chunk_offset adds a step of
    // two chunks, since the constructor's `chunk` has zeros in the bits of such steps. The zeros are there because
    // `first` is a multiple of the warp's extent, a power of two.
    constexpr RLK_HD int offset(int step, int i) const {
      return kContraction ? row_offset + i * 16 * Base::kRowBytes + (chunk_offset ^ step * 32)
                          : row_offset + step * 16 * Base::kRowBytes + (chunk_offset ^ i * 32);
    }
  };

  // Whether Fragments gives the same offsets as the tile's offset(), for warps of kWarpExtent rows.
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
