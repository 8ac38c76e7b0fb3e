// The host side of passes over tokens launches the kernels of kernels/tokens/passes.h.
#pragma once

#include <string>

#include "hip/common/launch.h"
#include "hip/tokens/tile.h"
#include "kernels/tokens/passes.h"

namespace rlk::hip {

inline TokenPasses token_passes(const Sequences& q) {
  return {q, token_tile(q), kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>};
}
template <class Batch>
TokenWorkspace<Batch> token_workspace(const Sequences& q, void* memory) {
  return {q, token_tile(q), memory};
}

template <class Batch>
void run_token_terms(const typename Batch::Params& p, int device, Stream stream, const std::string& kernel) {
  const Sequences& q = Batch::sequences(p);
  const TokenPasses passes = token_passes(q);
  if (passes.token_blocks == 0) return;
  launch_blocks(device, stream, {kTokenThreads, sizeof(WaveResults)}, kernel, passes.token_blocks, p,
                token_workspace<Batch>(q, p.workspace), passes.slots, token_tile(q));
}

// Kernels are named `prefix`_statistics, _sequences, _few, _sums and _results. `terms_kernel` is the name of the kernel
// for the tokens' terms.
template <class Batch>
void run_token_passes(const typename Batch::Params& p, int device, Stream stream, const std::string& prefix,
                      const std::string& terms_kernel) {
  const Sequences& q = Batch::sequences(p);
  const int tile = token_tile(q);
  const TokenPasses passes = token_passes(q);
  const TokenWorkspace<Batch> w = token_workspace<Batch>(q, p.workspace);
  const Block tokens = {kTokenThreads, sizeof(WaveResults)};
  if constexpr (kHasStatistics<Batch>) {
    if (Batch::needs_pass_before(p)) {
      launch_blocks(device, stream, tokens, prefix + "_statistics", passes.token_blocks > 0 ? passes.token_blocks : 1,
                    p, w, passes.slots, tile);
      launch_blocks(device, stream, {kGatherThreads, sizeof(GatheredSums)}, prefix + "_sequences",
                    passes.sequence_blocks, p, w, tile, passes.lanes);
    }
  }
  run_token_terms<Batch>(p, device, stream, terms_kernel);
  if (!Batch::needs_sums(p)) return;
  if (are_few(q, tile)) {
    launch_blocks(device, stream, {kTokenThreads, sizeof(FewShared<Batch>)}, prefix + "_few", 1, p, w, tile);
    return;
  }
  launch_blocks(device, stream, {kGatherThreads, sizeof(BatchSumsShared<Batch>)}, prefix + "_sums",
                passes.sequence_blocks, p, w, tile, passes.lanes, passes.sequence_blocks);
  if (passes.sequence_blocks > 1) {
    launch_blocks(device, stream, {kGatherThreads, sizeof(TotalsShared<Batch>)}, prefix + "_results", 1, p, w,
                  passes.sequence_blocks);
  }
}

}  // namespace rlk::hip
