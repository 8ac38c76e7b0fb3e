// Host side of what linear_logprob needs of CUDA.
#include "linear_logprob.h"

#include "../common/launch.h"
#include "kernels.h"

namespace rlk::cuda {

void scored_rows(const ScoredRowsParams& p, int device, Stream stream) {
  if (p.num_rows == 0 || p.row_bytes == 0) return;
  const DeviceGuard guard(device);
  if (compute_capability(device) < 80) throw Unsupported("linear_logprob: built for compute capability 8.0 and later");
  scored_rows_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
