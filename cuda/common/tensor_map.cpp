#include "tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "launch.h"

namespace rlk::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is there: the library itself is never linked.
Encode encoder() {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
#else
    check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
#endif
    if (result != cudaDriverEntryPointSuccess) throw Unsupported("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  return encode;
}

}  // namespace

CUtensorMap tensor_map(const void* data, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows, L2Reads reads) {
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride * size_of(dtype))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / size_of(dtype)), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const auto type = dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto promotion =
      reads == L2Reads::k128Bytes ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap map;
  const CUresult status =
      encoder()(&map, type, 2, const_cast<void*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace rlk::cuda
