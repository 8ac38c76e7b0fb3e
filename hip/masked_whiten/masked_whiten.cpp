// The host side of masked_whiten on HIP checks memory safety and launches the kernels.
#include "rlk/ops/masked_whiten.h"

#include "hip/common/launch.h"
#include "kernels/tokens/slots.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t masked_whiten_workspace_bytes(const MaskedWhitenParams& p, int) { return whiten_workspace_bytes(p); }

void masked_whiten(const MaskedWhitenParams& p, int device, Stream stream) {
  check_masked_whiten(p);
  RLK_CHECK(p.workspace != nullptr, "masked_whiten: no workspace");
  const std::int64_t sequences = p.sequences.num_tokens == 0 ? 0 : p.sequences.num_sequences;
  const auto launch = [&](const char* name, std::int64_t blocks) {
    launch_blocks(device, stream, {kWhitenThreads, kWhitenLdsBytes}, name, blocks, p);
  };
  launch("rlk_masked_whiten_sums", sequences);
  launch("rlk_masked_whiten_mean", 1);
  launch("rlk_masked_whiten_squares", sequences);
  launch("rlk_masked_whiten_variance", 1);
  launch("rlk_masked_whiten_tokens", sequences + (p.sequences.num_tokens == 0 ? 0 : rest_blocks(p.sequences)));
}

}  // namespace rlk::hip
