// The kernels of pack under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and for
// the emulation.
#include "hip/pack/copy.h"

RLK_KERNEL(rlk::kPackThreads)
rlk_pack_copy(rlk::PackParams p, std::int64_t first_block, rlk::PackGrid g) {
  rlk::pack_block<rlk::hip::GlobalMemory>(p, g, static_cast<std::uint32_t>(first_block + rlk::hip::block_id_x()),
                                          rlk::hip::thread_id());
}
RLK_KERNEL(rlk::hip::kPositionThreads)
rlk_pack_positions(rlk::PackLayoutParams p, std::int64_t first_block) {
  rlk::hip::pack_positions_kernel(p, first_block);
}
RLK_KERNEL(rlk::kPackScanThreads)
rlk_pack_scan(rlk::PackLayoutParams p, std::int64_t) { rlk::hip::pack_scan_kernel(p); }
