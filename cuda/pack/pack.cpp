// CUDA backend of pack: checks memory safety, plans the launches, and calls the kernels for the GPU's architecture.
#include "rlk/ops/pack.h"

#include "../common/kernels.h"
#include "kernels/packing/pack_check.h"
#include "kernels/packing/pack_copy.h"
#include "kernels/packing/pack_scan.h"
#include "rlk/backends.h"

namespace rlk::cuda {
void pack_layout(const PackLayoutParams& p, int device, Stream stream) {
  check_pack_layout(p);
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("pack", device, pack_layout)(p, to_stream(stream));
}

void pack(const PackParams& p, int device, Stream stream) {
  check_pack(p);
  const DeviceGuard guard(device);
  for_each_pack_launch(p, [&](const PackGrid& g) { RLK_CUDA_IN_USE("pack", device, pack)(p, g, to_stream(stream)); });
}

}  // namespace rlk::cuda
