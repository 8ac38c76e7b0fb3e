// What of sequences and their mask would corrupt memory, for every backend.
#pragma once

#include "rlk/sequences.h"

namespace rlk {

inline void check_sequences(const Sequences& q, const TokenMask& mask) {
  RLK_CHECK(q.num_sequences >= 0 && q.num_sequences < std::int64_t{1} << 31, "sequences: fewer than 2^31");
  RLK_CHECK(q.num_tokens >= 0 && q.num_tokens < std::int64_t{1} << 40, "sequences: fewer than 2^40 tokens");
  RLK_CHECK(q.cu_dtype == DType::kInt32 || q.cu_dtype == DType::kInt64, "cu_seqlens: int32 or int64");
  RLK_CHECK(mask.dtype == DType::kBool || mask.dtype == DType::kInt32 || mask.dtype == DType::kInt64 ||
                mask.dtype == DType::kFloat32,
            "mask: bool, int32, int64 or float32");
}

}  // namespace rlk
