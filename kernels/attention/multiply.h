// The products of a tile of attention in plain fp32, for the kernels of CUDA and HIP. A block of 16 x 16 = 256 threads
// keeps kRows x kBlock scores and kRows x kColumns sums in registers. The operand that gives the rows stays in shared
// memory. The other operand is copied into shared memory in stages of kDepth. The fp32 units and the reads of shared
// memory bound the products.
//
// Gpu has functions for the thread index, barriers, lane exchanges, and loads and stores of groups of floats in shared
// memory. Gpu::Vec8<T> loads eight elements at once. T is a tag type with Storage, load and store.
#pragma once

#include "kernels/attention/row.h"
#include "kernels/attention/tile.h"

namespace rlk {

constexpr int kAttentionThreads = 256;
constexpr int kAttentionLines = 16;  // threads that share a row
constexpr int kAttentionVec8 = 8;    // columns that one load reads

// Offsets that stand for no memory. A row with the offset kZeroRow is read as zeros, and a row with the offset kNoPage
// is read as NaN.
constexpr std::int64_t kZeroRow = kNoPage + 1;

// Marks a missing element of a sum by the bits of -0, which no probability has. Adding -0 to a sum changes no bit.
RLK_HD float nothing() { return float_of(static_cast<std::int32_t>(0x80000000u)); }
RLK_HD bool is_absent(float weight) { return bits_of(weight) == static_cast<std::int32_t>(0x80000000u); }

// The shape of a tile for heads with at most kColumns columns, and with kBlock keys per block. Each thread has
// kOfThread consecutive rows.
template <int kOfThread_, int kColumns_, int kDepth_>
struct AttentionTile {
  static constexpr int kOfThread = kOfThread_, kColumns = kColumns_, kDepth = kDepth_;
  static constexpr int kRows = kAttentionLines * kOfThread;
  static constexpr int kSums = kColumns / kAttentionLines;  // sums per row and thread, of columns 64j + 4 line ... + 3
  static constexpr int kBlock = attention_block(kColumns);
  static constexpr int kScores = kBlock / kAttentionLines;  // scores per row and thread
  static_assert(kColumns % 64 == 0 && kBlock % 64 == 0);

  // The weights are laid out as [kBlock columns][kRows], so that a thread reads its rows together. To avoid bank
  // conflicts of writes, chunks of four rows (16 bytes) are permuted by column. Tiles with other row counts have a gap
  // after each column instead.
  static constexpr int kWeightStride = kOfThread == 4 ? kRows : kRows + kOfThread;
  static constexpr int kWeights = kBlock * kWeightStride;
  static RLK_DEVICE int weight(int column, int row) {
    if constexpr (kOfThread == 4) {
      return column * kWeightStride + ((row / 4 ^ column / 4 % 8) * 4 + row % 4);
    } else {
      return column * kWeightStride + row;
    }
  }
  // The column of score `i` of a thread.
  static RLK_DEVICE int score_column(int line, int i) { return i / 4 * 64 + line * 4 + i % 4; }

  static constexpr int kStageFloats = kDepth * (kColumns > kBlock ? kColumns : kBlock);
};

// The rows of an operand in global memory.
template <class Gpu, class T>
struct AttentionRows {
  const typename T::Storage* data;  // the rows of one head
  const std::int64_t* offsets;      // offsets of the rows in elements, or kZeroRow or kNoPage; in shared memory
  bool vectors;

  RLK_DEVICE typename Gpu::template Vec8<T> vec8(int row, int column) const {
    const std::int64_t offset = offsets[row];
    if (offset <= kZeroRow) return Gpu::template fill_vec8<T>(offset == kNoPage);
    return Gpu::template load_vec8<T>(data + offset + column, vectors);
  }
};

// Copies kRows rows to shared memory: column `column` of row `row` goes to to[column * kRows + row]. The rows' offsets
// lie in shared memory.
template <class Gpu, class T, int kRows>
RLK_DEVICE void load_transposed(const AttentionRows<Gpu, T>& rows, int columns, float* to) {
  for (int i = Gpu::thread(); i < kRows * columns / kAttentionVec8; i += kAttentionThreads) {
    const int row = i % kRows, column = i / kRows * kAttentionVec8;
    float z[kAttentionVec8];
    rows.vec8(row, column).to_float(z);
#pragma unroll
    for (int j = 0; j < kAttentionVec8; ++j) to[(column + j) * kRows + row] = z[j];
  }
}

// Computes scores[r][i], the sum of a[d][row r] * b[column i][d] by fma over ascending d. The call begins with a
// barrier. When it returns, other threads may still read `stage`, so a caller needs a barrier before it writes `stage`.
template <class Gpu, class Tile, class T>
RLK_DEVICE void multiply(const float* a, const AttentionRows<Gpu, T>& b, int dim, float* stage,
                         float (&scores)[Tile::kOfThread][Tile::kScores]) {
#pragma unroll
  for (auto& row : scores) {
#pragma unroll
    for (float& s : row) s = 0.0f;
  }
  constexpr int kBlock = Tile::kBlock, kDepth = Tile::kDepth;
  // Number of columns that the threads load at once. If kAtOnce exceeds kDepth, some threads load nothing.
  constexpr int kAtOnce = kAttentionThreads / kBlock * kAttentionVec8, kVec8s = (kDepth + kAtOnce - 1) / kAtOnce;
  static_assert(kDepth % kAtOnce == 0 || kVec8s == 1);
  const int thread = Gpu::thread(), row = thread % kBlock;
  // first column of the thread; its other columns follow at steps of kAtOnce
  const int first = thread / kBlock * kAttentionVec8;
  const bool loads = kDepth >= kAtOnce || first < kDepth;
  a += thread / kAttentionLines * Tile::kOfThread;
  const float* mine = stage + thread % kAttentionLines * 4;
  typename Gpu::template Vec8<T> next[kVec8s];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      if (loads && begin + first + kAtOnce * i < dim) next[i] = b.vec8(row, begin + first + kAtOnce * i);
    }
  };
  load(0);
#pragma unroll 1
  for (int begin = 0; begin < dim; begin += kDepth) {
    Gpu::barrier();
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      if (!loads || begin + first + kAtOnce * i >= dim) continue;
      float z[kAttentionVec8];
      next[i].to_float(z);
#pragma unroll
      for (int j = 0; j < kAttentionVec8; ++j) stage[(first + kAtOnce * i + j) * kBlock + row] = z[j];
    }
    Gpu::barrier();
    load(begin + kDepth);
    const int depth = dim - begin < kDepth ? dim - begin : kDepth;
#pragma unroll 1
    for (int d = 0; d < depth; d += kAttentionVec8) {
#pragma unroll
      for (int j = 0; j < kAttentionVec8; ++j) {
        float x[Tile::kOfThread], y[Tile::kScores / 4][4];
        Gpu::load_group(a + (begin + d + j) * Tile::kRows, x);
#pragma unroll
        for (int g = 0; g < Tile::kScores / 4; ++g) Gpu::load_group(mine + (d + j) * kBlock + 64 * g, y[g]);
#pragma unroll
        for (int r = 0; r < Tile::kOfThread; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int g = 0; g < Tile::kScores / 4; ++g)
              scores[r][4 * g + i] = fma_rn(x[r], y[g][i], scores[r][4 * g + i]);
          }
        }
      }
    }
  }
}

// Adds the products of weights and x to the sums, by fma in ascending order of the weights' columns. x has `count` rows
// of `dim` columns. kHoles: a weight may be nothing(), and the product with such a weight is left out.
template <class Gpu, class Tile, bool kHoles, class T>
RLK_DEVICE void accumulate(const float* weights, const AttentionRows<Gpu, T>& x, int count, int dim, float* stage,
                           float (&sums)[Tile::kOfThread][Tile::kSums]) {
  constexpr int kRowVec8s = Tile::kColumns / kAttentionVec8;
  constexpr int kDepth = Tile::kDepth, kVec8s = kDepth * kRowVec8s / kAttentionThreads;
  static_assert(kVec8s >= 1);
  constexpr int kRowsAtOnce = kAttentionThreads / kRowVec8s;
  const int thread = Gpu::thread(), row = thread / kRowVec8s;
  const int column = thread % kRowVec8s * kAttentionVec8, my_row = thread / kAttentionLines * Tile::kOfThread;
  const float* mine = stage + thread % kAttentionLines * 4;
  typename Gpu::template Vec8<T> next[kVec8s];
  const auto load = [&](int begin) {
    if (column >= dim) return;
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      if (begin + row + kRowsAtOnce * i < count) next[i] = x.vec8(begin + row + kRowsAtOnce * i, column);
    }
  };
  load(0);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kDepth) {
    Gpu::barrier();
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      if (column >= dim || begin + row + kRowsAtOnce * i >= count) continue;
      float z[kAttentionVec8];
      next[i].to_float(z);
      float* to = stage + (row + kRowsAtOnce * i) * Tile::kColumns + column;
      Gpu::store_four(to, z[0], z[1], z[2], z[3]);
      Gpu::store_four(to + 4, z[4], z[5], z[6], z[7]);
    }
    Gpu::barrier();
    load(begin + kDepth);
    const int depth = count - begin < kDepth ? count - begin : kDepth;
#pragma unroll 2
    for (int n = 0; n < depth; ++n) {
      float w[Tile::kOfThread];
      Gpu::load_group(weights + Tile::weight(begin + n, my_row), w);
#pragma unroll
      for (int j = 0; j < Tile::kSums / 4; ++j) {
        float y[4];
        Gpu::load_group(mine + n * Tile::kColumns + 64 * j, y);
#pragma unroll
        for (int r = 0; r < Tile::kOfThread; ++r) {
          if (kHoles && is_absent(w[r])) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][4 * j + i] = fma_rn(w[r], y[i], sums[r][4 * j + i]);
        }
      }
    }
  }
}

// x rounded to an element of type T.
template <class T>
RLK_DEVICE float as_element(float x) {
  if constexpr (sizeof(typename T::Storage) == sizeof(float)) return x;
  return T::load(T::store(x));
}

// Stores a thread's scores as weights. AttentionTile::weight() permutes all columns of a thread alike, so their
// addresses differ by constants.
template <class Gpu, class Tile>
RLK_DEVICE void store_weights(float* weights, const float (&scores)[Tile::kOfThread][Tile::kScores]) {
  const int thread = Gpu::thread();
  weights += Tile::weight(thread % kAttentionLines * 4, thread / kAttentionLines * Tile::kOfThread);
#pragma unroll
  for (int i = 0; i < Tile::kScores; ++i) {
    float* to = weights + (i / 4 * 64 + i % 4) * Tile::kWeightStride;
    if constexpr (Tile::kOfThread == 4) {
      Gpu::store_four(to, scores[0][i], scores[1][i], scores[2][i], scores[3][i]);
    } else {
#pragma unroll
      for (int r = 0; r < Tile::kOfThread; ++r) to[r] = scores[r][i];
    }
  }
}

template <class T>
RLK_DEVICE const typename T::Storage* attention_head(const AttentionHeads& a, std::int64_t head) {
  return in_memory(static_cast<const typename T::Storage*>(a.data)) + head * a.head_stride;
}

// Places arrays in shared memory, one after another.
class Carver {
 public:
  RLK_DEVICE explicit Carver(void* memory) : at_(static_cast<unsigned char*>(memory)) {}
  template <class V>
  RLK_DEVICE V* take(int count) {
    V* taken = reinterpret_cast<V*>(at_);
    at_ += (count * static_cast<int>(sizeof(V)) + 15) / 16 * 16;
    return taken;
  }

 private:
  unsigned char* at_;
};
constexpr int carved(int count, int bytes) { return (count * bytes + 15) / 16 * 16; }

}  // namespace rlk
