// CUDA backend of labels and masks: what would corrupt memory, which architecture's kernels run.
#include "rlk/ops/shift_labels_packed.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {
namespace {

int checked_capability(int device) {
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("shift_labels_packed: built for compute capability 8.0 and later");
  return capability;
}

}  // namespace

void shift_labels_packed(const ShiftLabelsParams& p, int device, Stream stream) {
  check_shift_labels(p);
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  checked_capability(device) == 90 ? shift_labels_packed_sm90(p, to_stream(stream))
                                   : shift_labels_packed_sm80(p, to_stream(stream));
}

void loss_mask_from_spans(const SpanMaskParams& p, int device, Stream stream) {
  check_span_mask(p);
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  checked_capability(device) == 90 ? loss_mask_from_spans_sm90(p, to_stream(stream))
                                   : loss_mask_from_spans_sm80(p, to_stream(stream));
}

void tool_mask(const ToolMaskParams& p, int device, Stream stream) {
  check_tool_mask(p);
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  checked_capability(device) == 90 ? tool_mask_sm90(p, to_stream(stream)) : tool_mask_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
