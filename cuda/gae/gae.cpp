// CUDA backend of gae: what would corrupt memory, how many warps share a sequence, which architecture's kernel runs.
#include "rlk/ops/gae.h"

#include "../common/sequence_warps.h"
#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/gae_check.h"

namespace rlk::cuda {
void gae(const GaeParams& p, int device, Stream stream) {
  check_gae(p);
  if (p.sequences.num_slots() == 0) return;
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("gae: built for compute capability 8.0 and later");
  const int warps = choose_sequence_warps(p.sequences, multiprocessors(device));
  capability == 90 ? gae_sm90(p, warps, to_stream(stream)) : gae_sm80(p, warps, to_stream(stream));
}

}  // namespace rlk::cuda
