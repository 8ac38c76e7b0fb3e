// Every backend checks these preconditions of a sequence_logprob call, because a violation would corrupt memory. Users'
// input is checked earlier, by the bindings.
#pragma once

#include "rlk/ops/sequence_logprob.h"

namespace rlk {

template <class Params>
void check_sequence_logprob(const Params& p) {
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "sequence_logprob: logprob is float32, bfloat16 or float16");
  RLK_CHECK(p.num_sequences >= 0 && p.num_sequences < std::int64_t{1} << 31, "sequence_logprob: fewer than 2^31 rows");
  RLK_CHECK(p.num_tokens >= 0, "sequence_logprob: num_tokens is not negative");
  check_mask(p.mask);
  check_offsets(p.cu_seqlens);
  if (p.num_sequences == 0 || p.num_tokens == 0) return;
  if constexpr (requires { p.logprob; }) {
    RLK_CHECK(p.logprob && p.sum && p.count, "sequence_logprob: logprob, sum and count are given");
  } else {
    RLK_CHECK(p.dsum && p.d_logprob, "sequence_logprob_backward: dsum and d_logprob are given");
  }
}

}  // namespace rlk
