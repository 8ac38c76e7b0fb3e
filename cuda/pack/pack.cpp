// CUDA backend of pack: what would corrupt memory, the launches, which architecture's kernels run.
#include "rlk/ops/pack.h"

#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/pack_check.h"

namespace rlk::cuda {
namespace {

int checked_capability(int device) {
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("pack: built for compute capability 8.0 and later");
  return capability;
}

}  // namespace

void pack_layout(const PackLayoutParams& p, int device, Stream stream) {
  check_pack_layout(p);
  const DeviceGuard guard(device);
  const int capability = checked_capability(device);
  capability == 90 ? pack_layout_sm90(p, to_stream(stream)) : pack_layout_sm80(p, to_stream(stream));
}

void pack(const PackParams& p, int device, Stream stream) {
  check_pack(p);
  const DeviceGuard guard(device);
  const int capability = checked_capability(device);
  for_each_pack_launch(p, [&](const PackGrid& g) {
    capability == 90 ? pack_sm90(p, g, to_stream(stream)) : pack_sm80(p, g, to_stream(stream));
  });
}

}  // namespace rlk::cuda
