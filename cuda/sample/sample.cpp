// CUDA backend of sample: what would corrupt memory, which architecture's kernels run.
#include "rlk/ops/sample.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

void sample(const SampleParams& p, int device, Stream stream) {
  check_sample(p);
  if (p.num_rows == 0 && p.kept_offsets == nullptr) return;
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("sample: built for compute capability 8.0 and later");
  if (p.num_rows == 0) {
    check(cudaMemsetAsync(p.kept_offsets, 0, sizeof *p.kept_offsets, to_stream(stream)), "clearing of sample");
    return;
  }
  RLK_CHECK(p.workspace != nullptr, "sample: a workspace is given");
  capability == 90 ? sample_sm90(p, to_stream(stream)) : sample_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
