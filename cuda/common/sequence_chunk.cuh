// The tree over a chunk of ops/sequence_logprob.h by a warp, whose thread t has the lanes t, t + 32, ..., t + 224.
#pragma once

#include "rlk/math/ieee.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kChunkWarpLanes = 8;  // of a thread

// All threads get the sum. Levels 1, 2 and 3 leave a thread half of its nodes each: what it gives away, its neighbour adds.
__device__ __forceinline__ float sum_of_chunk_lanes(const float (&lanes)[kChunkWarpLanes]) {
  float v[kChunkWarpLanes];
#pragma unroll
  for (int j = 0; j < kChunkWarpLanes; ++j) v[j] = lanes[j];
#pragma unroll
  for (int distance = 1, half = kChunkWarpLanes / 2; half > 0; distance *= 2, half /= 2) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float given = upper ? v[j] : v[j + half];
      v[j] = add_rn(upper ? v[j + half] : v[j], __shfl_xor_sync(0xffffffffu, given, distance));
    }
  }
  v[0] = add_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], 8));
  v[0] = add_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], 16));
  // Now the levels over the nodes 4 b0 + 2 b1 + b2 that threads with these bits have.
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) v[0] = add_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], distance));
  return v[0];
}

}  // namespace
}  // namespace rlk::cuda
