// CUDA backend of sequence_logprob: what would corrupt memory, which kernel serves a call, which architecture's runs.
#include "sequence_logprob.h"

#include <algorithm>

#include "kernels.h"
#include "rlk/kernels/sequence_logprob_check.h"

namespace rlk::cuda {
namespace {

int checked_capability(int device) {
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("sequence_logprob: built for compute capability 8.0 and later");
  return capability;
}

bool aligned(const void* data, std::int64_t row_stride, std::int64_t num_rows, int element_bytes) {
  const int bytes = std::min(4 * element_bytes, 16);
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<unsigned>(bytes) == 0 &&
         (num_rows <= 1 || row_stride * element_bytes % bytes == 0);
}

}  // namespace

bool serves(const SequencePlan& plan, const SequenceLogprobParams& p) {
  if (plan.width == 1) return true;
  return p.cu_seqlens.data == nullptr && aligned(p.logprob, p.logprob_stride, p.num_sequences, size_of(p.dtype)) &&
         (p.mask.data == nullptr || aligned(p.mask.data, p.mask.row_stride, p.num_sequences, p.mask.bytes));
}

SequencePlan choose_plan(const SequenceLogprobParams& p) {
  SequencePlan plan;
  plan.width = serves({4, 1}, p) ? 4 : 1;
  const bool packed = p.cu_seqlens.data != nullptr;
  const std::int64_t length = packed ? p.num_tokens / std::max<std::int64_t>(p.num_sequences, 1) : p.num_tokens;
  plan.groups = length <= 4 * kSequenceChunk ? 1 : length <= 16 * kSequenceChunk ? 4 : 8;
  return plan;
}

void sequence_logprob(const SequenceLogprobParams& p, int device, Stream stream) {
  check_sequence_logprob(p);
  if (p.num_sequences == 0) return;
  const DeviceGuard guard(device);
  const int capability = checked_capability(device);
  const SequencePlan plan = choose_plan(p);
  capability == 90 ? sequence_logprob_sm90(p, plan, to_stream(stream))
                   : sequence_logprob_sm80(p, plan, to_stream(stream));
}

void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, int device, Stream stream) {
  check_sequence_logprob(p);
  const bool packed = p.cu_seqlens.data != nullptr;
  if (p.num_tokens == 0 || (!packed && p.num_sequences == 0)) return;
  const DeviceGuard guard(device);
  const int capability = checked_capability(device);
  capability == 90 ? sequence_logprob_backward_sm90(p, to_stream(stream))
                   : sequence_logprob_backward_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
