// The bodies of all kernels of logprob, for logprob_kernels.hip.
#pragma once

#include "backward.h"
#include "forward.h"
#include "hip/common/half_wave.h"
#include "kernels/vocabulary/logprob_smoothing.h"

namespace rlk::hip {

struct SmoothingBlock {
  RLK_DEVICE int lane() const { return team_lane(); }
  RLK_DEVICE int number() const { return team_id(); }
  RLK_DEVICE float shuffle_xor(float value, int mask) const { return rlk::hip::shuffle_xor(value, mask); }
  RLK_DEVICE void barrier() const { block_barrier(); }
  RLK_DEVICE float* nodes() const { return reinterpret_cast<float*>(lds()); }
};
template <class T>
RLK_DEVICE void smoothing_kernel(const LogprobParams& p, const GroupGrid& grid, std::int64_t first_row) {
  smooth_row<T>(SmoothingBlock(), p, grid, first_row + block_id_x());
}

RLK_DEVICE void merge_kernel(const LogprobMergeParams& p) {
  const std::int64_t row = std::int64_t{block_id_x()} * kMergeThreads + thread_id();
  if (row < p.num_rows) merge_row(p, row);
}

}  // namespace rlk::hip
