// CUDA backend of labels and masks: checks memory safety, then calls the kernels for the GPU's architecture.
#include "rlk/ops/shift_labels_packed.h"

#include "../common/kernels.h"
#include "kernels/tokens/labels.h"
#include "rlk/backends.h"

namespace rlk::cuda {
void shift_labels_packed(const ShiftLabelsParams& p, int device, Stream stream) {
  check_shift_labels(p);
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("shift_labels_packed", device, shift_labels_packed)(p, to_stream(stream));
}

void loss_mask_from_spans(const SpanMaskParams& p, int device, Stream stream) {
  check_span_mask(p);
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("shift_labels_packed", device, loss_mask_from_spans)(p, to_stream(stream));
}

void tool_mask(const ToolMaskParams& p, int device, Stream stream) {
  check_tool_mask(p);
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("shift_labels_packed", device, tool_mask)(p, to_stream(stream));
}

}  // namespace rlk::cuda
