// Labels and masks of tokens: each block computes one tile of tokens. A mask of turns depends on earlier tokens, so a
// warp or a block computes the mask of a whole sequence. The header kernels/tokens/labels.h, shared with the CPU and
// HIP, has the formulas. All architectures share this source; each has its own machine code.
#include "../common/kernels.h"
#include "kernels/tokens/labels.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__global__ void __launch_bounds__(kTileThreads) shift_labels_kernel(const __grid_constant__ ShiftLabelsParams p) {
  __shared__ std::int64_t shared[2];
  shift_labels_block<PlainMemory>(p, blockIdx.x, static_cast<int>(threadIdx.x), shared, [] { __syncthreads(); });
}
__global__ void __launch_bounds__(kTileThreads) span_mask_kernel(const __grid_constant__ SpanMaskParams p) {
  __shared__ std::int64_t shared[2];
  span_mask_block<PlainMemory>(p, blockIdx.x, static_cast<int>(threadIdx.x), shared, [] { __syncthreads(); });
}
// Number of groups of 32 positions whose ids a warp loads together.
constexpr int kTurnGroups = 8;
constexpr int kTurnWarps = 8;  // warps per block

struct TurnGroup {
  unsigned opens, closes;  // bit i: position i of the group opens, or closes, a turn

  __device__ __forceinline__ TurnGroup of(int lane) const {
    return {__shfl_sync(0xffffffffu, opens, lane), __shfl_sync(0xffffffffu, closes, lane)};
  }
  // Whether a turn is open after the positions whose bits are set in `below`. `before`: whether a turn is open before
  // the group.
  __device__ __forceinline__ bool open(unsigned below, bool before) const {
    const unsigned events = (opens | closes) & below;
    return events == 0 ? before : (opens >> (31 - __clz(static_cast<int>(events))) & 1) != 0;
  }
};

template <class Id>
__device__ __forceinline__ void mask_of_turns(const ToolMaskParams& p, const Id* all_ids, int warps) {
  __shared__ std::uint8_t
      open_of_warps[2][kTurnWarps];  // 2: no marker; two buffers, so that no tile waits for the previous tile
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int member = warps == 1 ? 0 : warp;
  const std::int64_t sequence = warps == 1 ? std::int64_t{blockIdx.x} * kTurnWarps + warp : blockIdx.x;
  if (sequence >= p.num_sequences) return;
  const bool packed = p.cu_seqlens.data != nullptr;
  const Span span = span_of(p.cu_seqlens, p.num_tokens, sequence);
  const std::int64_t first = packed ? span.begin : sequence * p.ids_stride;
  const Id* ids = all_ids + first;
  std::uint8_t* mask = p.mask + (packed ? span.begin : sequence * p.num_tokens);
  const std::int64_t begin_id = p.begin.ids[p.begin.length - 1], end_id = p.end.ids[p.end.length - 1];
  bool carried = false;
  int which = 0;
#pragma unroll 1
  for (std::int64_t tile = 0; tile < span.length; tile += warps * 32 * kTurnGroups, which ^= 1) {
    const std::int64_t at = tile + member * 32 * kTurnGroups + lane;
    Id id[kTurnGroups];
#pragma unroll
    for (int k = 0; k < kTurnGroups; ++k) {
      id[k] = 0;
      if (at + 32 * k < span.length) id[k] = ids[at + 32 * k];
    }
    TurnGroup mine = {0, 0};  // lane k has the turns of group k
#pragma unroll
    for (int k = 0; k < kTurnGroups; ++k) {
      const bool exists = at + 32 * k < span.length;
      const TurnGroup group = {__ballot_sync(0xffffffffu, exists && id[k] == begin_id),
                               __ballot_sync(0xffffffffu, exists && id[k] == end_id)};
      if (lane == k) mine = group;
    }
    if (__any_sync(0xffffffffu, (mine.opens | mine.closes) != 0)) {  // found a marker's last id: compare the rest
#pragma unroll 1
      for (int k = 0; k < kTurnGroups; ++k) {
        const TurnGroup last = mine.of(k);
        const bool opens = (last.opens >> lane & 1) != 0 && ends_at<PlainMemory>(p, p.begin, first, at + 32 * k);
        const bool closes =
            !opens && (last.closes >> lane & 1) != 0 && ends_at<PlainMemory>(p, p.end, first, at + 32 * k);
        const TurnGroup group = {__ballot_sync(0xffffffffu, opens), __ballot_sync(0xffffffffu, closes)};
        if (lane == k) mine = group;
      }
    }
    bool open = carried;
    if (warps > 1) {
      const unsigned groups = __ballot_sync(0xffffffffu, (mine.opens | mine.closes) != 0);
      const TurnGroup last = mine.of(groups == 0 ? 0 : 31 - __clz(static_cast<int>(groups)));
      if (lane == 0) open_of_warps[which][warp] = groups == 0 ? 2 : last.open(0xffffffffu, false) ? 1 : 0;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kTurnWarps; ++w) {
        if (w == warp) open = carried;
        const std::uint8_t after = open_of_warps[which][w];
        carried = after == 2 ? carried : after == 1;
      }
    }
    if (p.include_end && !__any_sync(0xffffffffu, (mine.opens | mine.closes) != 0)) {  // no marker, as in most tiles
#pragma unroll
      for (int k = 0; k < kTurnGroups; ++k) {
        if (at + 32 * k < span.length) mask[at + 32 * k] = open ? 1 : 0;
      }
      continue;
    }
#pragma unroll 1
    for (int k = 0; k < kTurnGroups; ++k) {
      const std::int64_t t = at + 32 * k;
      const TurnGroup group = mine.of(k);
      const bool is_open = group.open((1u << lane) - 1, open);
      if (t < span.length) mask[t] = is_open && turn_goes_on<PlainMemory>(p, first, span.length, t) ? 1 : 0;
      open = group.open(0xffffffffu, open);
    }
    if (warps == 1) carried = open;
  }
}
__global__ void __launch_bounds__(32 * kTurnWarps, 4)  // without this minimum of 4 blocks ptxas spills
    tool_mask_kernel(const __grid_constant__ ToolMaskParams p, int warps) {
  p.dtype == DType::kInt64 ? mask_of_turns(p, static_cast<const std::int64_t*>(p.ids), warps)
                           : mask_of_turns(p, static_cast<const std::int32_t*>(p.ids), warps);
}

inline unsigned tile_blocks(std::int64_t items) {
  RLK_CHECK(tiles_of(items) < std::int64_t{1} << 31, "too many tokens for one launch");
  return static_cast<unsigned>(tiles_of(items));
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void shift_labels_packed(const ShiftLabelsParams& p, cudaStream_t stream) {
  shift_labels_kernel<<<tile_blocks(p.num_tokens / p.cp_size), kTileThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of shift_labels_packed");
}

void loss_mask_from_spans(const SpanMaskParams& p, cudaStream_t stream) {
  const std::int64_t items = p.cu_seqlens.data != nullptr ? p.num_tokens : p.num_sequences * p.num_tokens;
  if (items == 0) return;
  span_mask_kernel<<<tile_blocks(items), kTileThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of loss_mask_from_spans");
}

void tool_mask(const ToolMaskParams& p, cudaStream_t stream) {
  if (p.cu_seqlens.data != nullptr) {  // clears tokens outside every sequence
    check(cudaMemsetAsync(p.mask, 0, static_cast<std::size_t>(p.num_tokens), stream), "clearing of tool_mask");
  }
  if (p.num_sequences == 0) return;
  // The host does not know the lengths of packed sequences, so it uses their mean length.
  const std::int64_t length = p.cu_seqlens.data != nullptr ? p.num_tokens / p.num_sequences : p.num_tokens;
  const int warps = length <= 32 * kTurnGroups ? 1 : kTurnWarps, sequences = kTurnWarps / warps;
  tool_mask_kernel<<<static_cast<unsigned>((p.num_sequences + sequences - 1) / sequences), 32 * kTurnWarps, 0,
                     stream>>>(p, warps);
  check(cudaGetLastError(), "launch of tool_mask");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
