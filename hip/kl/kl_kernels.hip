// The kernel of kl under the name that the host looks up. The kernel is compiled for gfx90a and gfx942, and for the
// emulation.
#include "hip/tokens/gpu.h"
#include "kernels/losses/kl_terms.h"

RLK_KERNEL(rlk::kTokenThreads)
rlk_kl_tokens(rlk::KlParams p, std::int64_t first_block, std::int64_t slots, int tile) {
  rlk::token_tiles<rlk::hip::TokenGpu, rlk::KlTokenTerms>(p, nullptr, slots, tile, first_block + rlk::hip::block_id_x(),
                                                          nullptr,
                                                          [](std::int64_t) { return rlk::KlTokenTerms::Factors{}; });
}
