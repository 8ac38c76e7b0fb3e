// Dispatch of linear by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/linear.h"

#include "cpp/cpu/linear.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/linear/linear.h"
#endif
#if RLK_WITH_HIP
#include "hip/linear/linear.h"
#endif

namespace rlk {

void require_linear_backend(Device device) { require_backend("linear", device); }

void linear(const LinearParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::linear(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::linear(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::linear(p, device.index, stream);
#endif
  no_backend("linear", device);
}

void linear_input_grad(const LinearInputGradParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::linear_input_grad(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::linear_input_grad(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::linear_input_grad(p, device.index, stream);
#endif
  no_backend("linear", device);
}

void linear_weight_grad(const LinearWeightGradParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::linear_weight_grad(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::linear_weight_grad(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::linear_weight_grad(p, device.index, stream);
#endif
  no_backend("linear", device);
}

void linear_bias_grad(const LinearBiasGradParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::linear_bias_grad(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::linear_bias_grad(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::linear_bias_grad(p, device.index, stream);
#endif
  no_backend("linear", device);
}

void tree_sum(const TreeSumParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::tree_sum(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::tree_sum(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::tree_sum(p, device.index, stream);
#endif
  no_backend("linear", device);
}

std::vector<LinearProducts> linear_vendor_products(Device device) {
  require_linear_backend(device);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::linear_vendor_products(device.index);
#endif
  return {};
}

}  // namespace rlk
