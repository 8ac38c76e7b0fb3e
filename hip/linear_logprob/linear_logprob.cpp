// The host side of linear_logprob on HIP launches the kernels that copy scored rows.
#include "hip/common/launch.h"
#include "kernels/vocabulary/scored_rows.h"
#include "rlk/backends.h"

namespace rlk::hip {

void scored_rows(const ScoredRowsParams& p, int device, Stream stream) {
  if (p.num_rows == 0 || p.row_bytes == 0) return;
  const bool vectors = scored_rows_have_vectors(p);
  const RowSplit split = split_rows(p.row_bytes / (vectors ? 16 : 2), kScoredUnits, kScoredLog2Threads);
  launch_blocks(device, stream, {1 << kScoredLog2Threads, 0},
                std::string("rlk_linear_logprob_rows_") + (vectors ? "vectors" : "halves"),
                blocks_of(split, p.num_rows), p, split);
}

}  // namespace rlk::hip
