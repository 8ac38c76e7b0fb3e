// pack for SM90.
#include "copy.cuh"

namespace rlk::cuda {
void pack_layout_sm90(const PackLayoutParams& p, cudaStream_t stream) { run_pack_layout(p, stream); }
void pack_sm90(const PackParams& p, const PackGrid& g, cudaStream_t stream) { run_pack<true>(p, g, stream); }
}  // namespace rlk::cuda
