// The host side of kl on HIP checks memory safety, splits the work into blocks, and launches the kernel.
#include "rlk/ops/kl.h"

#include "hip/tokens/passes.h"
#include "kernels/losses/kl_check.h"
#include "rlk/backends.h"

namespace rlk::hip {

void kl(const KlParams& p, int device, Stream stream) {
  check_kl(p);
  if (p.sequences.num_slots() == 0) return;
  const KlParams rows = as_one_row(p);
  const TokenPasses passes = token_passes(rows.sequences);
  RLK_CHECK(passes.slots < std::int64_t{1} << 31, "kl: too many tokens for one launch");
  launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_kl_tokens", passes.token_blocks, rows, passes.slots,
                token_tile(rows.sequences));
}

}  // namespace rlk::hip
