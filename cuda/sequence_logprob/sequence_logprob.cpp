// CUDA backend of sequence_logprob: checks memory safety, then picks a plan and calls the kernel for the GPU's
// architecture.
#include "rlk/ops/sequence_logprob.h"

#include <algorithm>
#include <iterator>

#include "kernels.h"
#include "kernels/packing/sequence_logprob_check.h"
#include "rlk/backends.h"

namespace rlk::cuda {
SequencePlan choose_plan(const SequenceLogprobParams& p) {
  // The host does not know the lengths of packed sequences, so it uses their mean length.
  const bool packed = p.cu_seqlens.data != nullptr;
  const std::int64_t length = packed ? p.num_tokens / std::max<std::int64_t>(p.num_sequences, 1) : p.num_tokens;
  for (const SequencePlan& plan : kSequencePlans) {
    if (plan.warps * kSequenceChunk >= length) return plan;
  }
  return std::end(kSequencePlans)[-1];
}

void sequence_logprob(const SequenceLogprobParams& p, int device, Stream stream) {
  check_sequence_logprob(p);
  if (p.num_sequences == 0) return;
  const DeviceGuard guard(device);
  const SequencePlan plan = choose_plan(p);
  RLK_CUDA_IN_USE("sequence_logprob", device, sequence_logprob)(p, plan, to_stream(stream));
}

void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, int device, Stream stream) {
  check_sequence_logprob(p);
  const bool packed = p.cu_seqlens.data != nullptr;
  if (p.num_tokens == 0 || (!packed && p.num_sequences == 0)) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("sequence_logprob", device, sequence_logprob_backward)(p, to_stream(stream));
}

}  // namespace rlk::cuda
