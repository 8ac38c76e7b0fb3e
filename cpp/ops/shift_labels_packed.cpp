// Dispatch of shift_labels_packed and its relatives by the device of their arguments. A backend that this build lacks is an error, never
// another path.
#include "rlk/ops/shift_labels_packed.h"

#include "cpp/cpu/shift_labels_packed.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/shift_labels_packed/shift_labels_packed.h"
#endif
#if RLK_WITH_HIP
#include "hip/shift_labels_packed/shift_labels_packed.h"
#endif

namespace rlk {

void require_shift_labels_packed_backend(Device device) { require_backend("shift_labels_packed", device); }

void shift_labels_packed(const ShiftLabelsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::shift_labels_packed(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::shift_labels_packed(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::shift_labels_packed(p, device.index, stream);
#endif
  no_backend("shift_labels_packed", device);
}

void loss_mask_from_spans(const SpanMaskParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::loss_mask_from_spans(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::loss_mask_from_spans(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::loss_mask_from_spans(p, device.index, stream);
#endif
  no_backend("loss_mask_from_spans", device);
}

void tool_mask(const ToolMaskParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::tool_mask(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::tool_mask(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::tool_mask(p, device.index, stream);
#endif
  no_backend("tool_mask", device);
}

}  // namespace rlk
