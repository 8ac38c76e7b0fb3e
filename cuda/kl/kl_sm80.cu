// kl for SM80 and later.
#include "kl.cuh"

namespace rlk::cuda {
void kl_sm80(const KlParams& p, const TokenPlan& plan, cudaStream_t stream) { run_kl(p, plan, stream); }
}  // namespace rlk::cuda
