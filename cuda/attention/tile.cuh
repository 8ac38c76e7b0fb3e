// Tiles of attention's products in plain fp32: a block of 256 threads, 16 x 16, has kRows rows by 128 columns of scores,
// and kRows rows by kColumns columns of sums, in registers. The operand that its rows are is in shared memory; the other
// comes through it in stages of 32 deep. Bound by the fp32 units and shared memory's reads beside them.
#pragma once

#include "../common/kernel_memory.h"
#include "../common/octet.cuh"
#include "kernels.h"
#include "rlk/kernels/attention_row.h"
#include "rlk/math/softmax_stats.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kAttentionThreads = 256;
constexpr int kLines = 16;  // threads that share a row
constexpr int kStage = 32;  // deep

// Offsets of rows that are not in memory.
constexpr std::int64_t kZeroRow = kNoPage + 1;

// The bits of -0, which no probability has: a link that is missing from a chain. As a number it changes no sum.
constexpr std::uint32_t kNothing = 0x80000000u;
__device__ __forceinline__ float nothing() { return __uint_as_float(kNothing); }
__device__ __forceinline__ bool is_nothing(float weight) { return __float_as_uint(weight) == kNothing; }

// The thread's number, read again wherever it is asked for: what is computed from it does not stay in registers, which
// are for sums. Not for an inner loop.
__device__ __forceinline__ int thread_of_block() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int line_of() { return thread_of_block() % kLines; }
__device__ __forceinline__ int rows_line() { return thread_of_block() / kLines; }

// A tile's shape. kOfThread rows a thread, one after another.
template <int kOfThread_, int kColumns_>
struct AttentionTile {
  static constexpr int kOfThread = kOfThread_, kColumns = kColumns_;
  static constexpr int kRows = kLines * kOfThread;
  static constexpr int kSums = kColumns / kLines;  // of a row and thread: columns 64j + 4 line ... + 3
  static_assert(kColumns % 64 == 0);

  // Weights are [128 columns][kRows], so that a thread reads its rows together; in 16 byte chunks of four rows exchanged
  // by the column, or with a gap behind each column, or writes of a column's lines would meet in a bank.
  static constexpr int kWeightStride = kOfThread == 4 ? kRows : kRows + kOfThread;
  static constexpr int kWeights = kAttentionBlock * kWeightStride;
  static __device__ __forceinline__ int weight(int column, int row) {
    if constexpr (kOfThread == 4) {
      return column * kWeightStride + ((row / 4 ^ column / 4 % 8) * 4 + row % 4);
    } else {
      return column * kWeightStride + row;
    }
  }
  // Columns of a thread's scores.
  static __device__ __forceinline__ int score_column(int line, int i) { return i / 4 * 64 + line * 4 + i % 4; }

  static constexpr int kStageFloats = kStage * (kColumns > kAttentionBlock ? kColumns : kAttentionBlock);
};

template <int kCount>
__device__ __forceinline__ void load_group(const float* from, float (&to)[kCount]) {
  if constexpr (kCount == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
  } else if constexpr (kCount == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    to[0] = v.x;
    to[1] = v.y;
  } else {
    to[0] = *from;
  }
}

// Rows of an operand in memory.
template <class T>
struct Rows {
  const typename T::Storage* data;  // of the head
  const std::int64_t* offsets;      // shared; elements, kZeroRow or kNoPage
  bool vectors;

  __device__ __forceinline__ Octet<T> octet(int row, int column) const {
    Octet<T> x;
    const std::int64_t offset = offsets[row];
    if (offset <= kZeroRow) {
      const std::uint32_t fill = offset == kZeroRow ? 0u : 0xffffffffu;  // NaN in every format
#pragma unroll
      for (auto& v : x.v) v.v = make_uint4(fill, fill, fill, fill);
      return x;
    }
    const typename T::Storage* from = data + offset + column;
    if (vectors) return load_octet<T>(from);
    if constexpr (T::kPacked) {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = from[2 * i] | std::uint32_t{from[2 * i + 1]} << 16;
      x.v[0].v = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x.v[i].v = make_uint4(__float_as_uint(from[4 * i]), __float_as_uint(from[4 * i + 1]),
                              __float_as_uint(from[4 * i + 2]), __float_as_uint(from[4 * i + 3]));
      }
    }
    return x;
  }
};

// to[column][row] of kRows rows, whose offsets are shared.
template <class T, int kRows>
__device__ __forceinline__ void load_transposed(const Rows<T>& rows, int head_dim, float* to) {
  for (int i = thread_of_block(); i < kRows * head_dim / kOctet; i += kAttentionThreads) {
    const int row = i % kRows, column = i / kRows * kOctet;
    float z[kOctet];
    rows.octet(row, column).to_float(z);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) to[(column + j) * kRows + row] = z[j];
  }
}

// scores[r][i] = a chain over d ascending of a[d][row r] * b[column i][d]. Begins and ends with `stage` free to write
// after a barrier.
template <class T, class Tile>
__device__ __forceinline__ void multiply(const float* a, const Rows<T>& b, int head_dim, float* stage,
                                         float (&scores)[Tile::kOfThread][8]) {
#pragma unroll
  for (auto& row : scores) {
#pragma unroll
    for (float& s : row) s = 0.0f;
  }
  constexpr int kOctets = kAttentionBlock * kStage / kOctet / kAttentionThreads;
  static_assert(kOctets == 2);
  const int thread = thread_of_block(), row = thread % kAttentionBlock;
  const int first = thread / kAttentionBlock * kOctet;  // column; the other is 16 behind
  a += thread / kLines * Tile::kOfThread;
  const float* mine = stage + thread % kLines * 4;
  Octet<T> next[kOctets];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      if (begin + first + 16 * i < head_dim) next[i] = b.octet(row, begin + first + 16 * i);
    }
  };
  load(0);
#pragma unroll 1
  for (int begin = 0; begin < head_dim; begin += kStage) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      if (begin + first + 16 * i >= head_dim) continue;
      float z[kOctet];
      next[i].to_float(z);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) stage[(first + 16 * i + j) * kAttentionBlock + row] = z[j];
    }
    __syncthreads();
    load(begin + kStage);
    const int depth = head_dim - begin < kStage ? head_dim - begin : kStage;
#pragma unroll 1
    for (int d = 0; d < depth; d += kOctet) {
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        float x[Tile::kOfThread], low[4], high[4];
        load_group(a + (begin + d + j) * Tile::kRows, x);
        load_group(mine + (d + j) * kAttentionBlock, low);
        load_group(mine + (d + j) * kAttentionBlock + 64, high);
#pragma unroll
        for (int r = 0; r < Tile::kOfThread; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[r][i] = fma_rn(x[r], low[i], scores[r][i]);
            scores[r][4 + i] = fma_rn(x[r], high[i], scores[r][4 + i]);
          }
        }
      }
    }
  }
}

// sums[r] = a chain over columns of scores ascending of weights * x, from sums[r] on: x has `count` rows. kHoles: a
// weight may be nothing, where x is not to be looked at.
template <class T, class Tile, bool kHoles>
__device__ __forceinline__ void accumulate(const float* weights, const Rows<T>& x, int count, int head_dim,
                                           float* stage, float (&sums)[Tile::kOfThread][Tile::kSums]) {
  constexpr int kRowOctets = Tile::kColumns / kOctet;
  constexpr int kOctets = kStage * kRowOctets / kAttentionThreads;
  constexpr int kRowsAtOnce = kAttentionThreads / kRowOctets;
  const int thread = thread_of_block(), row = thread / kRowOctets;
  const int column = thread % kRowOctets * kOctet, my_row = thread / kLines * Tile::kOfThread;
  const float* mine = stage + thread % kLines * 4;
  Octet<T> next[kOctets];
  const auto load = [&](int begin) {
    if (column >= head_dim) return;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      if (begin + row + kRowsAtOnce * i < count) next[i] = x.octet(begin + row + kRowsAtOnce * i, column);
    }
  };
  load(0);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kStage) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      if (column >= head_dim || begin + row + kRowsAtOnce * i >= count) continue;
      float z[kOctet];
      next[i].to_float(z);
      float4* to = reinterpret_cast<float4*>(stage + (row + kRowsAtOnce * i) * Tile::kColumns + column);
      to[0] = make_float4(z[0], z[1], z[2], z[3]);
      to[1] = make_float4(z[4], z[5], z[6], z[7]);
    }
    __syncthreads();
    load(begin + kStage);
    const int depth = count - begin < kStage ? count - begin : kStage;
#pragma unroll 2
    for (int n = 0; n < depth; ++n) {
      float w[Tile::kOfThread];
      load_group(weights + Tile::weight(begin + n, my_row), w);
#pragma unroll
      for (int j = 0; j < Tile::kSums / 4; ++j) {
        float y[4];
        load_group(mine + n * Tile::kColumns + 64 * j, y);
#pragma unroll
        for (int r = 0; r < Tile::kOfThread; ++r) {
          if (kHoles && is_nothing(w[r])) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][4 * j + i] = fma_rn(w[r], y[i], sums[r][4 * j + i]);
        }
      }
    }
  }
}

// The value as an element of type T holds it.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (T::kPacked) return T::load(T::store(x));
  return x;
}

// A thread's scores into the weights. Of all of its columns the chunks are exchanged alike.
template <class Tile>
__device__ __forceinline__ void store_weights(float* weights, const float (&scores)[Tile::kOfThread][8]) {
  const int thread = thread_of_block();
  weights += Tile::weight(thread % kLines * 4, thread / kLines * Tile::kOfThread);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float* to = weights + (i / 4 * 64 + i % 4) * Tile::kWeightStride;
    if constexpr (Tile::kOfThread == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(scores[0][i], scores[1][i], scores[2][i], scores[3][i]);
    } else {
#pragma unroll
      for (int r = 0; r < Tile::kOfThread; ++r) to[r] = scores[r][i];
    }
  }
}

template <class T>
__device__ __forceinline__ const typename T::Storage* head_of(const AttentionHeads& a, std::int64_t head) {
  return static_cast<const typename T::Storage*>(a.data) + head * a.head_stride;
}

// Shared memory in pieces.
class Carver {
 public:
  __device__ __forceinline__ explicit Carver(void* memory) : at_(static_cast<unsigned char*>(memory)) {}
  template <class V>
  __device__ __forceinline__ V* take(int count) {
    V* taken = reinterpret_cast<V*>(at_);
    at_ += (count * static_cast<int>(sizeof(V)) + 15) / 16 * 16;
    return taken;
  }

 private:
  unsigned char* at_;
};
constexpr int carved(int count, int bytes) { return (count * bytes + 15) / 16 * 16; }

// f(tile) for a head_dim.
template <class F>
void with_tile(std::int64_t head_dim, const F& f) {
  if (head_dim <= 64) {
    f(AttentionTile<4, 64>{});
  } else if (head_dim <= 128) {
    f(AttentionTile<4, 128>{});
  } else {
    f(AttentionTile<2, 256>{});
  }
}

}  // namespace
}  // namespace rlk::cuda
