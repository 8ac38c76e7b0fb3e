// Computes dbias. CMake compiles this file once per architecture. A block takes a few columns of all rows, 8192 rows at
// a time. A thread adds a group of 64 consecutive rows of eight columns. The tree over these groups is added first by
// the threads of each warp, then across warps. Bound by HBM: dy is read once.
#include "../common/alignment.h"
#include "../common/element_dtype.cuh"
#include "../common/launch.h"
#include "sums.h"

namespace rlk::cuda {
namespace {

constexpr int kGroups = static_cast<int>(kTokenBlock) / kBiasGroupRows;  // groups per 8192 rows
constexpr int kBatchRows = 8;                                            // loads of a thread in flight

// Steps through the rows one by one, starting at `row`.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const RowLayout& rows, std::int64_t row) : rows_(rows) {
    std::int64_t outer = 0, inner = row;
    if (row >= rows.inner) {  // row and rows.inner are below 2^32
      outer = static_cast<std::uint32_t>(row) / static_cast<std::uint32_t>(rows.inner);
      inner = static_cast<std::uint32_t>(row) % static_cast<std::uint32_t>(rows.inner);
    }
    outer_offset_ = outer * rows.outer_stride;
    offset_ = outer_offset_ + inner * rows.inner_stride;
    left_ = rows.inner - inner;
  }
  __device__ __forceinline__ std::int64_t offset() const { return offset_; }
  __device__ __forceinline__ void next() {
    offset_ += rows_.inner_stride;
    if (--left_ == 0) {
      outer_offset_ += rows_.outer_stride;
      offset_ = outer_offset_;
      left_ = rows_.inner;
    }
  }

 private:
  const RowLayout& rows_;
  std::int64_t outer_offset_, offset_, left_;
};

// Adds the `num` rows of a group one after another, in eight columns, of which `count` exist. Missing elements add +0,
// which changes no bit, because the sums start from +0.
template <class T, bool kVector>
__device__ __forceinline__ void add_group(const typename T::Storage* columns, RowWalk walk, int num, int count,
                                          float (&sum)[kVec8]) {
  constexpr int kVectors = Vec8<T>::kVectors, kBatch = kVector ? kBatchRows / kVectors : 1;
#pragma unroll 1
  for (int first = 0; first < num; first += kBatch) {
    Vec8<T> x[kBatch]{};
    float z[kVec8]{};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const typename T::Storage* from = columns + walk.offset();
      if constexpr (kVector) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (first + i < num) x[i].v[j].v = reinterpret_cast<const uint4*>(from)[j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < kVec8; ++j) {
          if (j < count) z[j] = T::load(from[j]);
        }
      }
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if constexpr (kVector) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) x[i].v[j].to_float(z + j * kVec8 / kVectors);
      }
#pragma unroll
      for (int j = 0; j < kVec8; ++j) sum[j] = __fadd_rn(sum[j], z[j]);
    }
  }
}

// `kLanes`: number of neighbouring lanes that share a group's rows; each lane has eight columns.
template <class T, int kLanes>
__global__ void __launch_bounds__(kGroups* kLanes, 2)
    linear_bias_grad_kernel(const __grid_constant__ LinearBiasGradParams p, bool vector) {
  constexpr int kColumns = kLanes * kVec8, kWarps = kGroups * kLanes / 32;
  // Blocks of 8192 rows alternate between two buffers, because other threads may still read the previous buffer.
  __shared__ float of_warp[2][kWarps][kColumns];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int group = thread / kLanes;
  const std::int64_t first = std::int64_t{blockIdx.x} * kColumns, column = first + thread % kLanes * kVec8;
  const std::int64_t left = p.out_features - column;
  const int count = left <= 0 ? 0 : left >= kVec8 ? kVec8 : static_cast<int>(left);
  const typename T::Storage* columns = static_cast<const typename T::Storage*>(p.dy) + column;
  float total = 0.0f;  // total of column `first` + thread
  int buffer = 0;
  for (std::int64_t block = 0; block < p.num_rows; block += kTokenBlock, buffer ^= 1) {
    const std::int64_t row = block + group * kBiasGroupRows, rows_left = p.num_rows - row;
    float sum[kVec8] = {};
    if (rows_left > 0 && count > 0) {
      const int num = rows_left < kBiasGroupRows ? static_cast<int>(rows_left) : kBiasGroupRows;
      if (vector && count == kVec8) {
        add_group<T, true>(columns, RowWalk(p.dy_rows, row), num, count, sum);
      } else {
        add_group<T, false>(columns, RowWalk(p.dy_rows, row), num, count, sum);
      }
    }
#pragma unroll
    for (int distance = kLanes; distance < 32; distance *= 2) {
#pragma unroll
      for (int j = 0; j < kVec8; ++j) {
        sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(0xffffffff, sum[j], distance));
      }
    }
    if (lane < kLanes) {
#pragma unroll
      for (int j = 0; j < kVec8; ++j) of_warp[buffer][warp][lane * kVec8 + j] = sum[j];
    }
    __syncthreads();
    if (thread < kColumns) {
      float x[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) x[i] = of_warp[buffer][i][thread];
#pragma unroll
      for (int distance = 1; distance < kWarps; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kWarps; i += 2 * distance) x[i] = __fadd_rn(x[i], x[i + distance]);
      }
      total = block == 0 ? x[0] : __fadd_rn(total, x[0]);
    }
  }
  if (thread < kColumns && first + thread < p.out_features)
    store_element(p.dbias, p.dbias_dtype, first + thread, total);
}

template <class T, int kLanes>
void run(const LinearBiasGradParams& p, bool vector, cudaStream_t stream) {
  constexpr int kColumns = kLanes * kVec8;
  const std::int64_t blocks = (p.out_features + kColumns - 1) / kColumns;
  RLK_CHECK(blocks < std::int64_t{1} << 31, "linear_bias_grad: too many columns for one launch");
  linear_bias_grad_kernel<T, kLanes><<<static_cast<unsigned>(blocks), kGroups * kLanes, 0, stream>>>(p, vector);
  check(cudaGetLastError(), "launch of linear_bias_grad");
}

}  // namespace

namespace RLK_CUDA_ARCH {

void linear_bias_grad(const LinearBiasGradParams& p, cudaStream_t stream) {
  if (p.out_features == 0) return;
  const bool vector = rows_begin_at_16_bytes(p.dy, p.dy_rows, p.num_rows, size_of(p.dtype));
  // A block takes 64 bytes of each row if all multiprocessors then have columns. Otherwise a block takes 32 bytes, the
  // smallest unit of memory reads.
  const bool wide = p.out_features > std::int64_t{multiprocessors(current_device()) - 1} * 4 * kVec8;
  if (p.dtype == DType::kBFloat16) {
    wide ? run<Bf16, 4>(p, vector, stream) : run<Bf16, 2>(p, vector, stream);
  } else if (p.dtype == DType::kFloat16) {
    wide ? run<Fp16, 4>(p, vector, stream) : run<Fp16, 2>(p, vector, stream);
  } else {
    run<Fp32, 2>(p, vector, stream);
  }
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
