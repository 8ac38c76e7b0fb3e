// CUDA backend of sample: checks memory safety, then calls the kernels for the GPU's architecture.
#include "rlk/ops/sample.h"

#include "../common/kernels.h"
#include "kernels/sample/check.h"
#include "kernels/sample/process_logits.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {

namespace {

// Whether there are rows. Without rows, the function writes the offsets of the empty kept sets.
bool has_rows(const SampleParams& p, Stream stream) {
  if (p.num_rows == 0 && p.kept_offsets != nullptr) {
    check(cudaMemsetAsync(p.kept_offsets, 0, sizeof *p.kept_offsets, to_stream(stream)), "clearing of sample");
  }
  RLK_CHECK(p.num_rows == 0 || p.workspace != nullptr, "sample: a workspace is given");
  return p.num_rows > 0;
}

// Names the plan of a call by the properties that select its kernels: the exponential, and the cuts. Cuts need more
// passes over the logits.
std::string plan_of(const SampleParams& p) {
  std::string plan = p.exp == Exp::kHardware ? "hardware exp" : "portable exp";
  if (cuts(p.top_k, 0)) plan += ", top_k";
  if (cuts(p.top_p, 1.0f)) plan += ", top_p";
  if (cuts(p.min_p, 0.0f)) plan += ", min_p";
  return plan;
}

}  // namespace

void sample(const SampleParams& p, int device, Stream stream) {
  check_sample(p, true);
  if (p.process != nullptr) check_process_logits(*p.process, true);
  const DeviceGuard guard(device);
  if (!has_rows(p, stream)) return;
  note_plan([&] { return plan_of(p); });
  RLK_CUDA_IN_USE("sample", device, sample)(p, to_stream(stream));
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
