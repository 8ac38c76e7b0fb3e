// The forward of attention for mixed batches on CUDA. CMake compiles this file once per architecture.
#include "mixed.cuh"

namespace rlk::cuda {
namespace RLK_CUDA_ARCH {

void attention_mixed(const AttentionParams& p, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
#if RLK_CUDA_SM90
      if (fits_plan(p, {AttentionKernel::kWgmma}, 90)) {
        if (p.head_dim > 128) return attention_mixed_wgmma<WgmmaForm::kWide>(p, stream);
        if (!fills_tile(p)) return attention_mixed_wgmma<WgmmaForm::kPadded>(p, stream);
        const auto run = [&](auto columns) {
          run_mixed_by_wgmma<T, decltype(columns)::value, WgmmaTile<decltype(columns)::value>>(p, vectors, stream);
        };
        return p.head_dim == 64 ? run(std::integral_constant<int, 64>()) : run(std::integral_constant<int, 128>());
      }
#endif
      const auto run = [&](auto columns) {
        MixedLaunches<T, decltype(columns)::value, kOverlap>(p, vectors, stream).run_by_mma();
      };
      if (p.head_dim <= 64) {
        run(std::integral_constant<int, 64>());
      } else {
        p.head_dim <= 128 ? run(std::integral_constant<int, 128>()) : run(std::integral_constant<int, 256>());
      }
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
