// pack for SM80 and later.
#include "copy.cuh"

namespace rlk::cuda {
void pack_layout_sm80(const PackLayoutParams& p, cudaStream_t stream) { run_pack_layout(p, stream); }
void pack_sm80(const PackParams& p, const PackGrid& g, cudaStream_t stream) { run_pack<false>(p, g, stream); }
}  // namespace rlk::cuda
