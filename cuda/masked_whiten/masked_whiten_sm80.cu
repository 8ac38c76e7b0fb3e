// masked_whiten for SM80 and later.
#include "passes.cuh"

namespace rlk::cuda {
void masked_whiten_sm80(const MaskedWhitenParams& p, int warps, cudaStream_t stream) {
  run_masked_whiten(p, warps, stream);
}
}  // namespace rlk::cuda
