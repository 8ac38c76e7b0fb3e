// masked_whiten for SM90.
#include "passes.cuh"

namespace rlk::cuda {
void masked_whiten_sm90(const MaskedWhitenParams& p, int warps, cudaStream_t stream) {
  run_masked_whiten(p, warps, stream);
}
}  // namespace rlk::cuda
