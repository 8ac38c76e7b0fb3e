// CUDA backend of attention: what would corrupt memory, which kernel serves a call, which architecture's runs.
#include "attention.h"

#include "kernels.h"
#include "rlk/kernels/attention_check.h"

namespace rlk::cuda {
namespace {

int supported_capability(int device) {
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("attention: built for compute capability 8.0 and later");
  return capability;
}

}  // namespace

AttentionPlan choose_plan(const AttentionParams& p) {
  constexpr std::int64_t kFewRows = 32;  // of a sequence: most of a larger tile would be empty
  const std::int64_t sequences = p.cu_seqlens_q != nullptr && p.num_sequences > 0 ? p.num_sequences : 1;
  return {p.q_tokens * (p.num_q_heads / p.num_kv_heads) <= kFewRows * sequences};
}

void attention(const AttentionParams& p, int device, Stream stream) {
  check_attention(p);
  if (attention_rows(p) * p.num_q_heads == 0) return;
  const DeviceGuard guard(device);
  const AttentionPlan plan = choose_plan(p);
  supported_capability(device) == 90 ? attention_sm90(p, plan, to_stream(stream))
                                     : attention_sm80(p, plan, to_stream(stream));
}

void attention_backward(const AttentionBackwardParams& p, int device, Stream stream) {
  check_attention(p);
  if (attention_rows(p) * p.num_q_heads == 0 && attention_keys(p) == 0) return;
  const DeviceGuard guard(device);
  supported_capability(device) == 90 ? attention_backward_sm90(p, to_stream(stream))
                                     : attention_backward_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
