// A launch: blocks run one after another, and their waves in the order of RLK_STANDIN_ORDER.
#pragma once

#include <string>

#include "machine.h"

namespace rlk::hip::isa {

struct Grid {
  u32 x, y, threads, lds_bytes;
};

// Runs all blocks. If a wave touched invalid memory or never ended, reports it and returns false.
bool run_launch(Code& code, const Kernel& kernel, const Grid& grid, void** arguments);

// Pages that stand for a device's memory. Kernels may always touch them, the host only while the pages are open.
void register_device_memory(u64 address, u64 bytes);
void forget_device_memory(u64 address);
void close_device_memory(bool close);

}  // namespace rlk::hip::isa
