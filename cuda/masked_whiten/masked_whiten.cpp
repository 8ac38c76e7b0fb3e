// CUDA backend of masked_whiten: checks memory safety, chooses how many warps share a sequence, and calls the kernels
// for the GPU's architecture.
#include "rlk/ops/masked_whiten.h"

#include "../common/kernels.h"
#include "../common/sequence_warps.h"
#include "kernels/advantages/masked_whiten_token.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t masked_whiten_workspace_bytes(const MaskedWhitenParams& p, int) { return whiten_workspace_bytes(p); }

void masked_whiten(const MaskedWhitenParams& p, int device, Stream stream) {
  check_masked_whiten(p);
  RLK_CHECK(p.workspace != nullptr, "masked_whiten: no workspace");
  const DeviceGuard guard(device);
  const bool empty = p.sequences.num_sequences == 0 || p.sequences.num_tokens == 0;
  const int warps = empty ? 1 : choose_sequence_warps(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("masked_whiten", device, masked_whiten)(p, warps, to_stream(stream));
}

}  // namespace rlk::cuda
