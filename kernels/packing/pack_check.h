// Every backend checks these preconditions of a pack call, because a violation would corrupt memory. Users' input is
// checked earlier, by the bindings.
#pragma once

#include "rlk/ops/pack.h"

namespace rlk {

constexpr std::int64_t kMostPackedTokens = std::int64_t{1} << 31;  // cu_seqlens and positions are int32

inline void check_pack_layout(const PackLayoutParams& p) {
  RLK_CHECK(p.num_sequences >= 0 && p.num_sequences < kMostPackedTokens, "pack: fewer than 2^31 sequences");
  RLK_CHECK(p.num_tokens >= 0 && p.num_tokens < kMostPackedTokens, "pack: fewer than 2^31 tokens in a row");
  RLK_CHECK(p.capacity >= 0 && p.capacity < kMostPackedTokens, "pack: a capacity below 2^31 tokens");
  RLK_CHECK(p.lengths_dtype == DType::kInt32 || p.lengths_dtype == DType::kInt64, "pack: lengths are int32 or int64");
  RLK_CHECK(p.num_sequences == 0 || (p.lengths != nullptr) != (p.mask.data != nullptr) || p.num_tokens == 0,
            "pack: lengths or a mask");
  RLK_CHECK(p.mask.data == nullptr || p.positions != nullptr, "pack: positions are written where there is a mask");
  check_mask(p.mask);
}

inline void check_pack(const PackParams& p) {
  RLK_CHECK(p.num_arrays >= 0 && p.num_arrays <= kPackArrays, "pack: at most eight arrays a call");
  RLK_CHECK(p.num_sequences >= 0 && p.num_sequences < kMostPackedTokens, "pack: fewer than 2^31 sequences");
  RLK_CHECK(p.num_tokens >= 0 && p.num_tokens < kMostPackedTokens, "pack: fewer than 2^31 tokens in a row");
  RLK_CHECK(p.capacity >= 0, "pack: a capacity that is not negative");
  check_offsets(p.cu_seqlens);
  RLK_CHECK(p.cu_seqlens.data != nullptr, "pack: cu_seqlens is given");
  for (int i = 0; i < p.num_arrays; ++i) {
    RLK_CHECK(p.arrays[i].token_bytes >= 0, "pack: token_bytes is not negative");
  }
}

}  // namespace rlk
