// Dispatch of sequence_logprob by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/sequence_logprob.h"

#include "cpp/cpu/sequence_logprob.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/sequence_logprob/sequence_logprob.h"
#endif
#if RLK_WITH_HIP
#include "hip/sequence_logprob/sequence_logprob.h"
#endif

namespace rlk {

void require_sequence_logprob_backend(Device device) { require_backend("sequence_logprob", device); }

void sequence_logprob(const SequenceLogprobParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::sequence_logprob(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::sequence_logprob(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::sequence_logprob(p, device.index, stream);
#endif
  no_backend("sequence_logprob", device);
}

void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::sequence_logprob_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::sequence_logprob_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::sequence_logprob_backward(p, device.index, stream);
#endif
  no_backend("sequence_logprob", device);
}

}  // namespace rlk
