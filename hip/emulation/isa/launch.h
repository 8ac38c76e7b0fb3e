// A launch. Blocks run one after another. RLK_STANDIN_ORDER sets the order of the waves of a block.
#pragma once

#include <string>

#include "machine.h"

namespace rlk::hip::isa {

struct Grid {
  u32 x, y, threads, lds_bytes;
};

// Runs all blocks. If a wave accesses invalid memory or does not end, the function reports it and returns false.
bool run_launch(Code& code, const Kernel& kernel, const Grid& grid, void** arguments);

// Pages that stand for a device's memory. Kernels may always access these pages. The host may access the pages only
// while they are open.
void register_device_memory(u64 address, u64 bytes);
void forget_device_memory(u64 address);
void close_device_memory(bool close);

}  // namespace rlk::hip::isa
