// The matrix products of linear for gfx90a and gfx942. A block of four waves computes a tile of outputs. Operands pass
// through two LDS buffers: the block fills one buffer while it multiplies the other. The order of additions is that of
// rule 1 (docs/numerics.md): each output has one accumulator, to which matrix instructions add the products in
// ascending order of the contraction index. A step of 16 contraction indices takes two 32x32x8 instructions or one
// 16x16x16 instruction. The matrix units limit the speed of large products. Memory bandwidth limits small products,
// which read the weight once.
#pragma once

#include "hip/common/wave.h"
#include "hip/linear/any_element.h"
#include "hip/linear/launches.h"
#include "hip/linear/stage.h"
#include "hip/linear/tree.h"

namespace rlk::hip {

// how the dot products of segments are added: not at all, as a tree (rule 2), or in ascending order (rule 9)
enum class Fold { kNone, kTree, kAscending };

// A wave's outputs, in the layout of its matrix instructions.
template <class Tile>
struct WaveSums {
  static constexpr int kSize = Tile::kMfma, kOutputs = kSize * kSize / kWave;
  Accumulator<kOutputs> v[Tile::kMfmasDown][Tile::kMfmasAcross];

  // Calls f(sum, down, across, i) for each output of the wave. The output is number i of the matrix instruction at
  // (down, across) in the wave's tile.
  template <class F>
  RLK_DEVICE void for_each(const F& f) {
#pragma unroll
    for (int down = 0; down < Tile::kMfmasDown; ++down) {
#pragma unroll
      for (int across = 0; across < Tile::kMfmasAcross; ++across) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) f(v[down][across].v[i], down, across, i);
      }
    }
  }
};
template <class Tile>
RLK_DEVICE void add_earlier(WaveSums<Tile>& sum, const WaveSums<Tile>& earlier) {
  sum.for_each([&](float& x, int down, int across, int i) { x = add_rn(earlier.v[down][across].v[i], x); });
}

// The position of a block's tile among the outputs, and of a wave in the tile.
template <class Tile>
struct WavePlace {
  std::int64_t row, column;   // first row and column of the tile
  int wave_row, wave_column;  // first row and column of the wave, in the tile
  // number of rows and columns of the result from the wave's first row and column on; not positive if the wave has none
  std::int64_t rows, columns;
  RLK_DEVICE WavePlace(const GemmParams& p, std::int64_t tile)
      : row(tile % p.tiles_down * kTileRows<Tile>), column(tile / p.tiles_down * kTileColumns<Tile>) {
    const int wave = thread_id() / kWave;
    wave_row = wave / Tile::kWavesAcross * Tile::kMfmasDown * Tile::kMfma;
    wave_column = wave % Tile::kWavesAcross * Tile::kMfmasAcross * Tile::kMfma;
    rows = p.a_size - row - wave_row;
    columns = p.b_size - column - wave_column;
  }
  RLK_DEVICE bool empty() const { return rows <= 0 || columns <= 0; }
};

// Adds the products of one step of 16 contraction indices to the sums.
template <class Operand, class Tile>
RLK_DEVICE void multiply_step(const std::uint16_t* stage, const WavePlace<Tile>& place, int step,
                              WaveSums<Tile>& sums) {
  constexpr int kSize = Tile::kMfma, kStageK = Tile::kStageK;
  constexpr int kVec4s = kWave / kSize, kParts = 4 / kVec4s;  // vec4s of a row per instruction; instructions per step
  const std::uint16_t* const stage_b = stage + kTileRows<Tile> * kStageK;
  const int lane = thread_id() % kWave, row = place.wave_row + lane % kSize, column = place.wave_column + lane % kSize;
  Operand a[kParts][Tile::kMfmasDown], b[kParts][Tile::kMfmasAcross];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int vec4 = step * 4 + part * kVec4s + lane / kSize;
#pragma unroll
    for (int j = 0; j < Tile::kMfmasDown; ++j) a[part][j] = load_vec4<Operand, kStageK>(stage, row + j * kSize, vec4);
#pragma unroll
    for (int j = 0; j < Tile::kMfmasAcross; ++j) {
      b[part][j] = load_vec4<Operand, kStageK>(stage_b, column + j * kSize, vec4);
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int down = 0; down < Tile::kMfmasDown; ++down) {
#pragma unroll
      for (int across = 0; across < Tile::kMfmasAcross; ++across) {
        auto& sum = sums.v[down][across];
        if constexpr (kSize == 32) {
          sum = mfma_32x32x8(a[part][down], b[part][across], sum);
        } else {
          sum = mfma_16x16x16(a[part][down], b[part][across], sum);
        }
      }
    }
  }
}

// Adds dot products over contraction indices [begin, end) to the sums. The whole block must call this function. A wave
// without outputs only loads operands.
template <class Operand, class Tile, class LoadA, class LoadB>
RLK_DEVICE void dot(const WavePlace<Tile>& place, LoadA& a, LoadB& b, std::int64_t begin, std::int64_t end,
                    WaveSums<Tile>& sums) {
  constexpr int kStageK = Tile::kStageK, kSteps = kStageK / 16;
  if (begin >= end) return;
  int buffer = 0;  // the buffer that is being filled
  const auto stage = [&] { return reinterpret_cast<std::uint16_t*>(lds()) + buffer * kStageElements<Tile>; };
  const auto load = [&](std::int64_t k) {
    a.load(k, end);
    b.load(k, end);
  };
  const auto store = [&] {
    a.store(stage());
    b.store(stage() + kTileRows<Tile> * kStageK);
    block_barrier();
  };
  load(begin);
  store();
  std::int64_t k = begin;
  for (; end - k > kStageK; k += kStageK) {
    load(k + kStageK);
    if (!place.empty()) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) multiply_step<Operand>(stage(), place, step, sums);
    }
    buffer ^= 1;  // after the last barrier, no wave reads this buffer any more
    store();
  }
  // The last stage may be partial. Zeros fill its last step.
  const int steps = place.empty() ? 0 : static_cast<int>(end - k + 15) / 16;
  for (int step = 0; step < steps; ++step) multiply_step<Operand>(stage(), place, step, sums);
  block_barrier();
  // All zeros become +0, because the sign of a zero from underflow depends on the instruction's shape
  // (math/mma_model.h).
  sums.for_each([](float& sum, int, int, int) { sum = add_rn(sum, 0.0f); });
}

// A buffer in LDS (the patch) converts the layout of matrix instructions into rows of memory. The patch of a wave holds
// the outputs of one instruction. When a wave reads its patch, neighbouring lanes read neighbouring columns, and each
// lane loops over rows. for_patch calls f(patch, row, column) for each of the lane's outputs that exists. Rows and
// columns are counted among all outputs.
template <class Tile>
RLK_DEVICE float* wave_patch() {
  return reinterpret_cast<float*>(lds()) + thread_id() / kWave * Tile::kMfma * Tile::kMfma;
}
template <class Tile>
RLK_DEVICE int patch_at(int i) {  // the place of the lane's output i
  constexpr int kSize = Tile::kMfma;
  const int lane = thread_id() % kWave;
  const int row = kSize == 32 ? 8 * (i / 4) + 4 * (lane / 32) + i % 4 : 4 * (lane / 16) + i;
  return row * kSize + lane % kSize;
}
template <class Tile, class F>
RLK_DEVICE void for_patch(const WavePlace<Tile>& place, int down, int across, const F& f) {
  constexpr int kSize = Tile::kMfma;
  const int lane = thread_id() % kWave, column = across * kSize + lane % kSize;
  if (column >= place.columns) return;
  for (int i = lane / kSize; i < kSize; i += kWave / kSize) {
    const int row = down * kSize + i;
    if (row >= place.rows) return;
    f(wave_patch<Tile>()[i * kSize + lane % kSize], place.row + place.wave_row + row,
      place.column + place.wave_column + column);
  }
}

// Loads the array `initial` into the sums. With Fold::kAscending, the first segment's dot product is then added to
// these sums. With Fold::kNone, the only dot product starts from these sums.
template <class Tile>
RLK_DEVICE void load_initial(const GemmParams& p, const WavePlace<Tile>& place, WaveSums<Tile>& sums) {
#pragma unroll
  for (int down = 0; down < Tile::kMfmasDown; ++down) {
#pragma unroll
    for (int across = 0; across < Tile::kMfmasAcross; ++across) {
      for_patch(place, down, across, [&](float& patch, std::int64_t row, std::int64_t column) {
        patch = global_pointer(p.initial)[row * p.initial_stride + column];
      });
      wave_barrier();
      auto& mine = sums.v[down][across];
#pragma unroll
      for (int i = 0; i < sums.kOutputs; ++i) mine.v[i] = wave_patch<Tile>()[patch_at<Tile>(i)];
      wave_barrier();
    }
  }
}

// Adds the bias, rounds the sums and writes the outputs.
template <class Tile>
RLK_DEVICE void store_outputs(const GemmParams& p, const WavePlace<Tile>& place, const WaveSums<Tile>& sums) {
#pragma unroll
  for (int down = 0; down < Tile::kMfmasDown; ++down) {
#pragma unroll
    for (int across = 0; across < Tile::kMfmasAcross; ++across) {
      const auto& mine = sums.v[down][across];
#pragma unroll
      for (int i = 0; i < sums.kOutputs; ++i) wave_patch<Tile>()[patch_at<Tile>(i)] = mine.v[i];
      wave_barrier();
      for_patch(place, down, across, [&](const float& patch, std::int64_t row, std::int64_t column) {
        float y = patch;
        if (p.bias) y = add_rn(y, load_element(p.bias, p.bias_dtype, column));
        store_element(p.out, p.out_dtype, p.out_rows.offset(row) + column, y);
      });
      wave_barrier();
    }
  }
}

// Each block computes one tile of outputs. LoadA and LoadB are AlongRows or AcrossRows for the tile's rows and columns.
template <class Operand, class Tile, class LoadA, class LoadB, Fold kFold>
RLK_DEVICE void gemm_kernel(const GemmParams& p, std::int64_t first_tile) {
  const WavePlace<Tile> place(p, first_tile + block_id_x());
  LoadA a(p.a, place.row, p.a_size);
  LoadB b(p.b, place.column, p.b_size);
  WaveSums<Tile> sums{};
  if constexpr (kFold == Fold::kNone) {
    if (p.initial) {
      load_initial(p, place, sums);
      block_barrier();  // dot() overwrites the LDS that load_initial() uses
    }
    dot<Operand>(place, a, b, 0, p.contraction, sums);
  } else if constexpr (kFold == Fold::kTree) {
    TreeSum<WaveSums<Tile>, 3> tree;  // up to kMaxSegments segments
    int segment = 0;
    for (std::int64_t k = 0; k < p.contraction; k += p.segment, ++segment) {
      sums = {};
      dot<Operand>(place, a, b, k, k + p.segment, sums);
      tree.take(segment, sums);
    }
  } else {
    WaveSums<Tile> total{};
    if (p.initial) {
      load_initial(p, place, total);
      block_barrier();  // dot() overwrites the LDS that load_initial() uses
    }
    for (std::int64_t k = 0; k < p.contraction; k += p.segment) {
      const std::int64_t end = p.contraction - k < p.segment ? p.contraction : k + p.segment;
      sums = {};
      dot<Operand>(place, a, b, k, end, sums);
      if (k > 0 || p.initial) add_earlier(sums, total);
      total = sums;
    }
    sums = total;
  }
  store_outputs(p, place, sums);
}

}  // namespace rlk::hip
