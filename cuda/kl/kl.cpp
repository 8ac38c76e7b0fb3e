// CUDA backend of kl: checks memory safety, divides the work into tiles, and calls the kernel for the GPU's
// architecture.
#include "rlk/ops/kl.h"

#include "../common/kernels.h"
#include "kernels/losses/kl_check.h"
#include "rlk/backends.h"

namespace rlk::cuda {

void kl(const KlParams& p, int device, Stream stream) {
  check_kl(p);
  if (p.sequences.num_slots() == 0) return;
  const KlParams rows = as_one_row(p);
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_token_plan(rows.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("kl", device, kl)(rows, plan, to_stream(stream));
}

}  // namespace rlk::cuda
