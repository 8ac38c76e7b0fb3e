// Host side of losses over tokens: how work is cut, and the launches of the kernels of rlk/kernels/policy_kernels.h.
#pragma once

#include <string>

#include "hip/common/launch.h"
#include "hip/common/token_gpu.h"
#include "rlk/kernels/policy_kernels.h"

namespace rlk::hip {

constexpr std::int64_t kWaveTokens = 128;  // sequences of at most so many are waves

inline int token_tile(const PolicySequences& q) {
  const std::int64_t mean = q.packed() && q.num_sequences > 0 ? q.num_tokens / q.num_sequences + 1 : q.num_tokens;
  return mean <= kWaveTokens ? kWaveTile<TokenGpu>
         : mean <= 4096      ? kLeastBlockTile<TokenGpu>
                             : kMostBlockTile<TokenGpu>;
}

// Kernels are named `prefix`_statistics, _sequences, _sums and _results; that of the pass over tokens has a name of its own.
template <class Params>
void run_policy_passes(const Params& p, int device, Stream stream, const std::string& prefix,
                       const std::string& tokens_kernel) {
  const int tile = token_tile(p.sequences);
  const PolicyPasses passes(p, tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const PolicyWorkspace w(p.sequences, tile, p.workspace);
  const Block tokens = {kTokenThreads, sizeof(WaveResults)};
  if (passes.counts) {
    launch_blocks(device, stream, tokens, prefix + "_statistics", passes.token_blocks > 0 ? passes.token_blocks : 1, p,
                  w, passes.slots, tile);
    launch_blocks(device, stream, {kGatherThreads, sizeof(GatheredSums)}, prefix + "_sequences", passes.sequence_blocks,
                  p, w, tile, passes.lanes);
  }
  if (passes.token_blocks > 0) {
    launch_blocks(device, stream, tokens, tokens_kernel, passes.token_blocks, p, w, passes.slots, tile);
  }
  launch_blocks(device, stream, {kGatherThreads, sizeof(PolicySumsShared)}, prefix + "_sums", passes.sequence_blocks, p,
                w, tile, passes.lanes, passes.sequence_blocks);
  if (passes.sequence_blocks > 1) {
    launch_blocks(device, stream, {kGatherThreads, sizeof(PolicyResultsShared)}, prefix + "_results", 1, p, w,
                  passes.sequence_blocks);
  }
}

}  // namespace rlk::hip
