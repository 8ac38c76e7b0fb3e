// For trees: the runs of a path's keys whose tokens follow one another in memory.
#pragma once

#include <cstdint>

#include "kernels/attention/span.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy

// Keys [first, last) of a path, which are the tokens from `token` on.
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
