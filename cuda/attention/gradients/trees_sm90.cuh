// The blocks of keys on the paths of trees, for attention's wgmma backward. The path of a segment runs from the root of
// the tree to the segment. A segment's queries see the blocks of the segment's path. So a token's key may take part in
// several jobs, one for each segment that sees the key. The jobs of a key add to its dk and dv one after another.
#pragma once

#include "work_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <class Params>
__device__ __forceinline__ bool has_queries(const Params& p, std::int64_t segment) {
  const AttentionRange own = attention_place(p.cu_seqlens_q, segment, p.q_tokens);
  return own.first < own.last;
}

// Sets `call.firsts`: entry s is the number of blocks of keys on the paths of segments 0 ... s - 1. One thread block
// counts the blocks of all segments.
constexpr int kCountingThreads = 1024;
template <class Params>
__global__ void __launch_bounds__(kCountingThreads)
    attention_path_blocks_kernel(const __grid_constant__ Params p, const __grid_constant__ GradientTreeCall call) {
  __shared__ std::int32_t sums[kCountingThreads];
  const int thread = threadIdx.x;
  const std::int64_t each = (p.num_sequences + kCountingThreads - 1) / kCountingThreads;
  const std::int64_t begin = min(thread * each, p.num_sequences), end = min(begin + each, p.num_sequences);
  const auto blocks = [&](std::int64_t s) {
    return has_queries(p, s) ? static_cast<std::int32_t>((AttentionPath(p, s).keys() + 127) / 128) : 0;
  };
  std::int32_t own = 0;
  for (std::int64_t s = begin; s < end; ++s) own += blocks(s);
  sums[thread] = own;
  __syncthreads();
  for (int distance = 1; distance < kCountingThreads; distance *= 2) {
    const std::int32_t before = thread >= distance ? sums[thread - distance] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  std::int32_t first = sums[thread] - own;
  for (std::int64_t s = begin; s < end; ++s) {
    call.firsts[s] = first;
    first += blocks(s);
  }
  if (thread != kCountingThreads - 1) return;
  call.firsts[p.num_sequences] = first;
  *call.jobs_of_paths = first * static_cast<std::int32_t>(p.num_kv_heads);
}

// Sets `call.rows`, which describes every row (key) of every block of keys. Each thread finds the token and the turn of
// one row (GradientRow). To find the turns, a warp tests 32 segments at a time.
template <class Params>
__global__ void __launch_bounds__(128)
    attention_path_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ GradientTreeCall call) {
  const std::int32_t block = blockIdx.x;
  if (block >= call.firsts[p.num_sequences]) return;
  const std::int64_t segment = sequence_of_slot(p.num_sequences, block, [&](std::int64_t s) { return call.firsts[s]; });
  const std::int64_t key = std::int64_t{block - call.firsts[segment]} * 128 + threadIdx.x;
  AttentionPath path(p, segment);
  GradientRow row = {-1, 1};
  std::int64_t owner = -1;  // the segment that has the row's token
  if (key < path.keys()) {
    row.token = static_cast<std::int32_t>(path.token(p, key));
    if (row.token >= 0) owner = path.segment;
  }
  for (unsigned left = __ballot_sync(~0u, owner >= 0); left != 0;) {
    const std::int64_t of = __shfl_sync(~0u, owner, __ffs(static_cast<int>(left)) - 1);
    unsigned before = 0, after = 0;
    for (std::int64_t first = of; first < p.num_sequences && after == 0; first += 32) {
      const std::int64_t other = first + threadIdx.x % 32;
      const bool adds = other < p.num_sequences && has_queries(p, other) && AttentionPath(p, other).passes(p, of);
      before += __popc(__ballot_sync(~0u, adds && other < segment));
      after = __ballot_sync(~0u, adds && other > segment);
    }
    if (owner == of) row.turn = 2 * before + (after == 0 ? 1 : 0);
    left &= ~__ballot_sync(~0u, owner == of);
  }
  call.rows[std::int64_t{block} * 128 + threadIdx.x] = row;
}

template <class Params>
void launch_path_blocks(const Params& p, const GradientTreeCall& call, cudaStream_t stream) {
  attention_path_blocks_kernel<<<1, kCountingThreads, 0, stream>>>(p, call);
  check(cudaGetLastError(), "launch of attention's counts of blocks");
  attention_path_rows_kernel<<<static_cast<unsigned>(call.key_blocks), 128, 0, stream>>>(p, call);
  check(cudaGetLastError(), "launch of attention's rows of blocks");
}

}  // namespace
}  // namespace rlk::cuda
