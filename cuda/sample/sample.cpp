// CUDA backend of sample: checks of memory safety, and the architecture that runs it.
#include "rlk/ops/sample.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

namespace {

// Whether there are rows. If not, it writes the offsets of the empty kept sets.
bool has_rows(const SampleParams& p, Stream stream) {
  if (p.num_rows == 0 && p.kept_offsets != nullptr) {
    check(cudaMemsetAsync(p.kept_offsets, 0, sizeof *p.kept_offsets, to_stream(stream)), "clearing of sample");
  }
  RLK_CHECK(p.num_rows == 0 || p.workspace != nullptr, "sample: a workspace is given");
  return p.num_rows > 0;
}

}  // namespace

void sample(const SampleParams& p, int device, Stream stream) {
  check_sample(p, true);
  const DeviceGuard guard(device);
  if (has_rows(p, stream)) RLK_CUDA_IN_USE("sample", device, sample)(p, to_stream(stream));
}

void sample_partial(const SamplePartialParams& p, int device, Stream stream) {
  check_sample_partial(p);
  const DeviceGuard guard(device);
  if (has_rows(p, stream)) RLK_CUDA_IN_USE("sample", device, sample_partial)(p, to_stream(stream));
}

void sample_merge(const SampleMergeParams& p, int device, Stream stream) {
  check_sample_merge(p);
  const DeviceGuard guard(device);
  if (has_rows(p, stream)) RLK_CUDA_IN_USE("sample", device, sample_merge)(p, to_stream(stream));
}

void process_logits(const ProcessLogitsParams& p, int device, Stream stream) {
  check_process_logits(p, true);
  if (p.num_rows == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("process_logits", device, process_logits)(p, to_stream(stream));
}

}  // namespace rlk::cuda
