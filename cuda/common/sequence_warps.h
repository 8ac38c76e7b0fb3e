// Chooses how many warps share a sequence of tokens. Each warp takes a chunk of 128 tokens at a time.
#pragma once

#include "rlk/tokens.h"

namespace rlk::cuda {

constexpr int kSequenceWarps[] = {1, 2, 4, 8, 16};
// The number of warps that a multiprocessor should have. If a launch would have fewer, more warps share a sequence.
constexpr std::int64_t kSequenceWarpsWanted = 24;

inline int choose_sequence_warps(const Sequences& q, int multiprocessors) {
  // The host does not know the lengths of packed sequences, so it uses the mean length.
  const std::int64_t length = !q.packed() || q.num_sequences == 0 ? q.num_tokens : q.num_tokens / q.num_sequences + 1;
  for (const int warps : kSequenceWarps) {
    if (q.num_sequences * warps >= kSequenceWarpsWanted * multiprocessors || warps * 128 >= length) return warps;
  }
  return kSequenceWarps[4];
}

}  // namespace rlk::cuda
