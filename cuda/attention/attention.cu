// The forward of attention on CUDA. CMake compiles this file once per architecture.
#include "forward.cuh"
#if RLK_CUDA_SM90
#include "forward_sm90.cuh"
#include "splits/clusters_sm90.cuh"
#include "splits/groups_sm90.cuh"
#include "splits/pairs_sm90.cuh"
#endif

namespace rlk::cuda::RLK_CUDA_ARCH {

void attention(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (plan.kernel >= AttentionKernel::kDense && plan.kernel <= AttentionKernel::kTall) {
    with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      if constexpr (T::kPacked) {
        switch (plan.kernel) {
          case AttentionKernel::kDense:
            return run_attention_dense<T>(p, stream);
          case AttentionKernel::kPairs:
            return run_attention_pairs<T>(p, stream);
          case AttentionKernel::kClusters:
            return run_attention_clusters<T>(p, stream);
          case AttentionKernel::kGroups:
            return run_attention_groups<T, kOverlap>(p, stream);
          case AttentionKernel::kTall:
            return attention_wgmma<WgmmaForm::kTall>(p, stream);
          default:
            if (p.head_dim > 128) return attention_wgmma<WgmmaForm::kWide>(p, stream);
            if (!fills_tile(p)) return attention_wgmma<WgmmaForm::kPadded>(p, stream);
            return run_attention_wgmma<T, WgmmaForm::kWhole>(p, stream);
        }
      }
    });
    return check(cudaGetLastError(), "launch of attention");
  }
#endif
  if (plan.kernel == AttentionKernel::kMixed) return attention_mixed(p, stream);
  run_attention<kOverlap>(p, plan, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
