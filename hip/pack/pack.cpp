// The host side of pack on HIP checks memory safety and launches the kernels.
#include "rlk/ops/pack.h"

#include "hip/common/launch.h"
#include "kernels/packing/pack_check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void pack_layout(const PackLayoutParams& p, int device, Stream stream) {
  check_pack_layout(p);
  if (p.mask.data != nullptr && p.num_sequences > 0) {
    launch_blocks(device, stream, {kPositionThreads, kPositionLds}, "rlk_pack_positions", p.num_sequences, p);
  }
  launch_blocks(device, stream, {kPackScanThreads, kScanLds}, "rlk_pack_scan", 1, p);
}

void pack(const PackParams& p, int device, Stream stream) {
  check_pack(p);
  for_each_pack_launch(p, [&](const PackGrid& g) {
    launch_blocks(device, stream, {kPackThreads, 0}, "rlk_pack_copy", g.blocks, p, g);
  });
}

}  // namespace rlk::hip
