// For trees: runs of keys of a path. The tokens of a run are consecutive in memory.
#pragma once

#include <cstdint>

#include "kernels/attention/span.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// A run: keys [first, last) of a path are consecutive tokens, and key `first` is token `token`.
struct PathRun {
  std::int32_t first, last, token;
  __device__ __forceinline__ bool holds(int begin, int end) const { return first <= begin && end <= last; }
};
// Returns the run that holds key j of a segment's path. The run is empty if the key has no token.
template <class Params>
__device__ __forceinline__ PathRun path_run(const Params& p, std::int64_t segment, int j) {
  AttentionPath path(p, segment);
  if (path.token(p, j) < 0) return {0, 0, 0};
  return {static_cast<std::int32_t>(path.depth), static_cast<std::int32_t>(path.keys()),
          static_cast<std::int32_t>(path.tokens.first)};
}

}  // namespace
}  // namespace rlk::cuda
