// Dispatch of covariance_mask by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/covariance_mask.h"

#include "cpp/cpu/covariance_mask.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/covariance_mask/covariance_mask.h"
#endif
#if RLK_WITH_HIP
#include "hip/covariance_mask/covariance_mask.h"
#endif

namespace rlk {

void require_covariance_mask_backend(Device device) { require_backend("covariance_mask", device); }

std::int64_t covariance_mask_workspace_bytes([[maybe_unused]] const CovarianceMaskParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::covariance_mask_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::covariance_mask_workspace_bytes(p);
#endif
  no_backend("covariance_mask", device);
}

void covariance_mask(const CovarianceMaskParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::covariance_mask(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::covariance_mask(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::covariance_mask(p, device.index, stream);
#endif
  no_backend("covariance_mask", device);
}

}  // namespace rlk
