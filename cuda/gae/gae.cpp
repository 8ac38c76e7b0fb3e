// CUDA backend of gae: checks memory safety, chooses how many warps share a sequence, and calls the kernel for the
// GPU's architecture.
#include "rlk/ops/gae.h"

#include "../common/kernels.h"
#include "../common/sequence_warps.h"
#include "kernels/advantages/gae_check.h"
#include "rlk/backends.h"

namespace rlk::cuda {
void gae(const GaeParams& p, int device, Stream stream) {
  check_gae(p);
  if (p.sequences.num_slots() == 0) return;
  const DeviceGuard guard(device);
  const int warps = choose_sequence_warps(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("gae", device, gae)(p, warps, to_stream(stream));
}

}  // namespace rlk::cuda
