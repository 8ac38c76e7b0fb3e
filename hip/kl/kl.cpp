// Host side of the HIP backend of kl: what would corrupt memory, how work is cut, its launch.
#include "kl.h"

#include "hip/common/policy_passes.h"
#include "rlk/kernels/kl_check.h"

namespace rlk::hip {

void kl(const KlParams& p, int device, Stream stream) {
  check_kl(p);
  if (p.sequences.num_slots() == 0) return;
  const KlParams rows = as_one_row(p);
  const int tile = token_tile(rows.sequences);
  const std::int64_t slots = workspace_slots(rows.sequences, tile);
  RLK_CHECK(slots < std::int64_t{1} << 31, "kl: too many tokens for one launch");
  const std::int64_t blocks = tile == kWaveTile<TokenGpu> ? ceil_div(slots, kTokenWaves<TokenGpu>) : slots;
  launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_kl_tokens", blocks, rows, slots, tile);
}

}  // namespace rlk::hip
