// importance_weights: passes over tokens, and with `normalize` a pass over weights. All architectures share this
// source. Bound by HBM. Log-probabilities and mask are read once, or twice if a weight or a rejection criterion belongs
// to sequences. The arrays `weights` and `kept` are written once. With `normalize`, the weights are read and written
// once more.
#include "../common/kernels.h"
#include "../tokens/passes.cuh"
#include "kernels/losses/importance_kernels.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__global__ void __launch_bounds__(kTokenThreads)
    importance_divide_kernel(const __grid_constant__ ImportanceWeightsParams p, const TokenWorkspace<ImportanceBatch> w,
                             std::int64_t count) {
  wait_for_previous_kernel();
  importance_divide<TokenGpu>(p, w, count, blockIdx.x, gridDim.x);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void importance_weights(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const std::int64_t count = p.sequences.num_slots();
  if (count == 0 && p.metrics == nullptr) return;
  TokenLaunches<kOverlap, ImportanceBatch> launches(p, plan, stream);
  switch (form_of(p)) {
    case ImportanceForm::kAlone:
      launches.run(token_terms_kernel<ImportanceBatch, 3, ImportanceTokenTerms<ImportanceForm::kAlone>>);
      break;
    case ImportanceForm::kNormalized:
      launches.run(token_terms_kernel<ImportanceBatch, 3, ImportanceTokenTerms<ImportanceForm::kNormalized>>);
      break;
    case ImportanceForm::kMeasured:
      launches.run(token_terms_kernel<ImportanceBatch, 2, ImportanceTokenTerms<ImportanceForm::kMeasured>>);
  }
  if (p.metrics != nullptr) {
    run_token_passes<kOverlap, ImportanceMomentsBatch>(
        p, plan, token_terms_kernel<ImportanceMomentsBatch, 3, CentralTerms<ImportanceMoments>>, stream);
  }
  if (p.spec.normalize != 0 && count > 0)
    launches.launch(importance_divide_kernel, map_blocks(count), kTokenThreads, count);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
