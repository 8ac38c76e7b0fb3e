// The host side of sequence_logprob on HIP checks memory safety and launches the kernels.
#include "rlk/ops/sequence_logprob.h"

#include <string>

#include "hip/common/launch.h"
#include "kernels/packing/sequence_logprob_check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void sequence_logprob(const SequenceLogprobParams& p, int device, Stream stream) {
  check_sequence_logprob(p);
  if (p.num_sequences == 0) return;
  launch_blocks(device, stream, {kSumThreads, kSumLds}, std::string("rlk_sequence_logprob_sum") + type_suffix(p.dtype),
                p.num_sequences, p);
}

void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, int device, Stream stream) {
  check_sequence_logprob(p);
  const bool packed = p.cu_seqlens.data != nullptr;
  if (p.num_tokens == 0 || (!packed && p.num_sequences == 0)) return;
  const GradientGrid g = gradient_grid(p);
  launch_blocks(device, stream, {kGradientThreads, kGradientLds},
                std::string("rlk_sequence_logprob_backward") + type_suffix(p.dtype), g.blocks, p, g);
}

}  // namespace rlk::hip
