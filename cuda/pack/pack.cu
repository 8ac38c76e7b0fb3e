// pack and unpack, bound by HBM: bytes are read once and written once. The header kernels/packing/pack_copy.h, shared
// with HIP, has the copy and its distribution over threads. kernels/packing/pack_scan.h has the prefix sum.
//
// pack_kernel: copies up to eight arrays in one launch.
// pack_positions_kernel: each block counts one row of the mask, 1,024 tokens at a time by ballots, and stores the row's
//   length in cu_seqlens.
// pack_scan_kernel: one block turns the lengths in cu_seqlens into offsets, by a prefix sum.
// All architectures share this source; each has its own machine code.
#include "../common/dependent_launch.cuh"
#include "../common/kernels.h"
#include "kernels/packing/pack_copy.h"
#include "kernels/packing/pack_scan.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kPositionThreads = 256;
constexpr int kPositionWarps = kPositionThreads / 32;
constexpr int kPositionTokens = 4;  // tokens per thread, a warp's width apart
constexpr int kPositionTile = kPositionThreads * kPositionTokens;

constexpr int kPackBlocks = 8;  // blocks per multiprocessor

// Prefetches into L2 the offsets of a block of `s`: blocks of short rows wait as long for the two offsets as for the
// rows. The prefetch reads no value, so it may run before wait_for_previous_kernel.
__device__ __forceinline__ void prefetch_offsets(const Offsets& offsets, const PackShare& s, std::uint32_t block) {
  if (block >= s.row_blocks || s.split.chunks.value > 1) return;
  const std::int64_t row = std::int64_t{block} << s.split.log2_rows, bytes = offsets.dtype == DType::kInt64 ? 8 : 4;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(offsets.data) + row * bytes));
}

// With more than 64 registers a multiprocessor would hold seven blocks in place of eight, which takes 5 % more time.
// at_once blocks run at a time. Each block prefetches the offsets of the block that is at_once blocks later.
template <bool kAllFlat>
__global__ void __launch_bounds__(kPackThreads, (kAllFlat ? kPackBlocks : 7))
    pack_kernel(const __grid_constant__ PackParams p, const __grid_constant__ PackGrid g, std::uint32_t at_once) {
  if (kAllFlat && threadIdx.x == 0) {  // only for the first array: blocks of the other arrays read the same offsets
    if (blockIdx.x < at_once) prefetch_offsets(p.cu_seqlens, g.shares[0], blockIdx.x);
    prefetch_offsets(p.cu_seqlens, g.shares[0], blockIdx.x + at_once);
  }
  allow_next_kernel();
  wait_for_previous_kernel();
  pack_block<PlainMemory, kAllFlat>(p, g, blockIdx.x, static_cast<int>(threadIdx.x));
}

__global__ void __launch_bounds__(kPositionThreads) pack_positions_kernel(const __grid_constant__ PackLayoutParams p) {
  // Two tiles alternate between two buffers, so no tile waits until all warps have read the previous tile's counts.
  __shared__ std::int32_t of_warps[2][kPositionWarps];
  const std::int64_t row = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned below = (1u << lane) - 1;
  std::int32_t* positions = p.positions + row * p.num_tokens;
  std::int32_t before = 0;
  int which = 0;
#pragma unroll 1
  for (std::int64_t tile = 0; tile < p.num_tokens; tile += kPositionTile, which ^= 1) {
    const std::int64_t first = tile + warp * 32 * kPositionTokens + lane;
    unsigned kept[kPositionTokens];
    std::int32_t of_warp = 0;
    bool is_kept[kPositionTokens];
#pragma unroll
    for (int k = 0; k < kPositionTokens; ++k) {
      const std::int64_t t = first + 32 * k;
      is_kept[k] = t < p.num_tokens && counts(p.mask, row * p.mask.row_stride + t);
    }
#pragma unroll
    for (int k = 0; k < kPositionTokens; ++k) {
      kept[k] = __ballot_sync(0xffffffffu, is_kept[k]);
      of_warp += __popc(kept[k]);
    }
    if (lane == 0) of_warps[which][warp] = of_warp;
    __syncthreads();
    std::int32_t mine = before;
#pragma unroll
    for (int w = 0; w < kPositionWarps; ++w) {
      mine += w < warp ? of_warps[which][w] : 0;
      before += of_warps[which][w];
    }
#pragma unroll
    for (int k = 0; k < kPositionTokens; ++k) {
      const std::int64_t t = first + 32 * k;
      if (t < p.num_tokens) positions[t] = is_kept[k] ? mine + __popc(kept[k] & below) : -1;
      mine += __popc(kept[k]);
    }
  }
  if (threadIdx.x == 0) p.cu_seqlens[row + 1] = before;
}

__global__ void __launch_bounds__(kPackScanThreads) pack_scan_kernel(const __grid_constant__ PackLayoutParams p) {
  __shared__ PackScanShared shared;
  pack_scan_block<PlainMemory>(p, static_cast<int>(threadIdx.x), shared, [] { __syncthreads(); });
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void pack_layout(const PackLayoutParams& p, cudaStream_t stream) {
  if (p.mask.data != nullptr && p.num_sequences > 0) {
    pack_positions_kernel<<<static_cast<unsigned>(p.num_sequences), kPositionThreads, 0, stream>>>(p);
    check(cudaGetLastError(), "launch of pack_layout");
  }
  pack_scan_kernel<<<1, kPackScanThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of pack_layout");
}

void pack(const PackParams& p, const PackGrid& g, cudaStream_t stream) {
  const auto at_once = static_cast<std::uint32_t>(kPackBlocks * multiprocessors(current_device()));
  launch_dependent<kOverlap>(g.all_flat ? pack_kernel<true> : pack_kernel<false>, static_cast<int>(g.blocks),
                             kPackThreads, 0, stream, p, g, at_once);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
