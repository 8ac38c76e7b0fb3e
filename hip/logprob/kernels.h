// What the kernels of logprob do, for the file that names them and for the host's launches.
#pragma once

#include "backward.h"
#include "forward.h"

namespace rlk::hip {

RLK_DEVICE void merge_kernel(const LogprobMergeParams& p) {
  const std::int64_t row = std::int64_t{block_id_x()} * kMergeThreads + thread_id();
  if (row < p.num_rows) merge_row(p, row);
}

}  // namespace rlk::hip
