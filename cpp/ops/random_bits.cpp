// Dispatch of random_bits by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/random_bits.h"

#include "cpp/cpu/random_bits.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/random_bits/random_bits.h"
#endif
#if RLK_WITH_HIP
#include "hip/random_bits/random_bits.h"
#endif

namespace rlk {

void require_random_bits_backend(Device device) { require_backend("random_bits", device); }

void random_bits(const RandomBitsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::random_bits(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::random_bits(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::random_bits(p, device.index, stream);
#endif
  no_backend("random_bits", device);
}

}  // namespace rlk
