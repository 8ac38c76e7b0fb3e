// tree_sum adds equally shaped arrays (its parts) by a tree. CMake compiles this file once per architecture. A thread
// adds four elements of all parts. Bound by HBM: every part is read once.
#include "../common/element_dtype.cuh"
#include "../common/launch.h"
#include "sums.h"

namespace rlk::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // elements per thread: 16 bytes of a part

// The column of element i. If i and `columns` fit into 32 bits, a 32-bit remainder suffices. A 64-bit remainder would
// take longer than loading the element.
__device__ __forceinline__ std::int64_t column_of(std::int64_t i, std::int64_t columns) {
  if (((i | columns) >> 32) == 0) return static_cast<std::uint32_t>(i) % static_cast<std::uint32_t>(columns);
  return i % columns;
}

// x[j][part]: the parts of element j. The function stores the scaled sum of each element's parts in x[j][0].
template <int kCount>
__device__ __forceinline__ void add_parts(float (&x)[kElements][kCount], float scale) {
#pragma unroll
  for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * distance) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j][i] = __fadd_rn(x[j][i], x[j][i + distance]);
    }
  }
  if (scale == 1.0f) return;
#pragma unroll
  for (int j = 0; j < kElements; ++j) x[j][0] = __fmul_rn(x[j][0], scale);
}

// `vector`: the parts, the sum and the rows of columns all begin at multiples of four elements.
template <int kCount>
__global__ void __launch_bounds__(kThreads) tree_sum_kernel(const __grid_constant__ TreeSumParams p, bool vector) {
  const std::int64_t block = std::int64_t{blockIdx.x} * kThreads * kElements;
  const int thread = static_cast<int>(threadIdx.x);
  float x[kElements][kCount];
  const std::int64_t first = block + thread * kElements;
  if (vector && first + kElements <= p.size) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(p.parts[i] + first);
      x[0][i] = v.x;
      x[1][i] = v.y;
      x[2][i] = v.z;
      x[3][i] = v.w;
    }
    add_parts(x, p.scale);
    if (p.bias != nullptr) {
      const std::int64_t column = column_of(first, p.columns);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        x[j][0] = __fadd_rn(x[j][0], load_element(p.bias, p.bias_dtype, column + j));
      }
    }
    if (p.out_dtype == DType::kFloat32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.sum) + first) = make_float4(x[0][0], x[1][0], x[2][0], x[3][0]);
    } else {
      const bool bf16 = p.out_dtype == DType::kBFloat16;
      *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(p.sum) + first) =
          bf16 ? make_uint2(Bf16::pack(x[0][0], x[1][0]), Bf16::pack(x[2][0], x[3][0]))
               : make_uint2(Fp16::pack(x[0][0], x[1][0]), Fp16::pack(x[2][0], x[3][0]));
    }
    return;
  }
  // Without vector loads, neighbouring threads take neighbouring elements. With vector loads, at the end of an array, a
  // thread takes its own elements one by one.
  const std::int64_t begin = vector ? first : block + thread, step = vector ? 1 : kThreads;
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[j][i] = begin + j * step < p.size ? p.parts[i][begin + j * step] : 0.0f;
  }
  add_parts(x, p.scale);
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    const std::int64_t at = begin + j * step;
    if (at >= p.size) break;
    if (p.bias != nullptr) {
      x[j][0] = __fadd_rn(x[j][0], load_element(p.bias, p.bias_dtype, column_of(at, p.columns)));
    }
    store_element(p.sum, p.out_dtype, at, x[j][0]);
  }
}

template <int kCount>
void run(const TreeSumParams& p, cudaStream_t stream) {
  const auto aligned = [](const void* base, int bytes) { return reinterpret_cast<std::uintptr_t>(base) % bytes == 0; };
  bool vector = aligned(p.sum, kElements * size_of(p.out_dtype)) && (p.bias == nullptr || p.columns % kElements == 0);
  for (int i = 0; i < kCount; ++i) vector = vector && aligned(p.parts[i], 16);
  const std::int64_t blocks = (p.size + kThreads * kElements - 1) / (kThreads * kElements);
  RLK_CHECK(blocks < std::int64_t{1} << 31, "tree_sum: too many elements for one launch");
  tree_sum_kernel<kCount><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, vector);
  check(cudaGetLastError(), "launch of tree_sum");
}

}  // namespace

namespace RLK_CUDA_ARCH {

void tree_sum(const TreeSumParams& p, cudaStream_t stream) {
  if (p.size == 0) return;
  switch (p.count) {
    case 1:
      return run<1>(p, stream);
    case 2:
      return run<2>(p, stream);
    case 4:
      return run<4>(p, stream);
    default:
      return run<8>(p, stream);
  }
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
