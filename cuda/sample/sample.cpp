// CUDA backend of sample: checks of memory safety, which architecture's kernels run.
#include "rlk/ops/sample.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

void sample(const SampleParams& p, int device, Stream stream) {
  check_sample(p);
  if (p.num_rows == 0 && p.kept_offsets == nullptr) return;
  const DeviceGuard guard(device);
  if (p.num_rows == 0) {
    check(cudaMemsetAsync(p.kept_offsets, 0, sizeof *p.kept_offsets, to_stream(stream)), "clearing of sample");
    return;
  }
  RLK_CHECK(p.workspace != nullptr, "sample: a workspace is given");
  RLK_CUDA_IN_USE("sample", device, sample)(p, to_stream(stream));
}

void process_logits(const ProcessLogitsParams& p, int device, Stream stream) {
  check_process_logits(p);
  if (p.num_rows == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("process_logits", device, process_logits)(p, to_stream(stream));
}

}  // namespace rlk::cuda
