// kl for SM90.
#include "kl.cuh"

namespace rlk::cuda {
void kl_sm90(const KlParams& p, const TokenPlan& plan, cudaStream_t stream) { run_kl(p, plan, stream); }
}  // namespace rlk::cuda
