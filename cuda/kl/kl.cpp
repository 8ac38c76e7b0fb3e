// CUDA backend of kl: what would corrupt memory, how work is cut, which architecture's kernel runs.
#include "rlk/ops/kl.h"

#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/kl_check.h"

namespace rlk::cuda {

void kl(const KlParams& p, int device, Stream stream) {
  check_kl(p);
  if (p.sequences.num_slots() == 0) return;
  const KlParams rows = as_one_row(p);
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("kl: built for compute capability 8.0 and later");
  const TokenPlan plan = choose_token_plan(rows.sequences, multiprocessors(device));
  capability == 90 ? kl_sm90(rows, plan, to_stream(stream)) : kl_sm80(rows, plan, to_stream(stream));
}

}  // namespace rlk::cuda
