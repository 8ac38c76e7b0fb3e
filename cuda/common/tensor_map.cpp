#include "tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "launch.h"

namespace rlk::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Returns cuTensorMapEncodeTiled of the installed driver. The address of this function is found at run time, so the
// library need not be linked with the driver.
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

namespace {

template <int kRank>
CUtensorMap encode(const void* data, DType dtype, const cuuint64_t (&extents)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank], L2Reads reads,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const auto type = dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto promotion =
      reads == L2Reads::k128Bytes ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap map;
  const auto call = [&] {
    return encoder()(&map, type, kRank, const_cast<void*>(data), extents, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = call();
  // The driver requires a context that is current in the thread. A thread that has launched nothing yet may have none.
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    check(cudaSetDevice(current_device()), "cudaSetDevice");
    status = call();
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace

CUtensorMap tensor_map(const void* data, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows, L2Reads reads) {
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride * size_of(dtype))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / size_of(dtype)), static_cast<cuuint32_t>(box_rows)};
  return encode(data, dtype, extents, strides, box, reads);
}

CUtensorMap heads_tensor_map(const void* data, DType dtype, const HeadsExtent& e, int box_tokens, int box_bytes) {
  const auto bytes = [&](std::int64_t stride) { return static_cast<cuuint64_t>(stride * size_of(dtype)); };
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(e.columns), static_cast<cuuint64_t>(e.heads),
                                static_cast<cuuint64_t>(e.tokens), static_cast<cuuint64_t>(e.sequences)};
  const cuuint64_t strides[] = {bytes(e.head_stride), bytes(e.token_stride), bytes(e.sequence_stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes / size_of(dtype)), 1, static_cast<cuuint32_t>(box_tokens),
                            1};
  return encode(data, dtype, extents, strides, box, L2Reads::k256Bytes,
                box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace rlk::cuda
