// Finds races. A race is two accesses of the same byte by different waves. At least one of them is a write, no barrier
// separates them, and they are not both atomic.
#pragma once

#include "machine.h"

namespace rlk::hip::isa {

// An accessor is a number made of the block, the wave, the wave's number of passed barriers, and whether the access is
// atomic. 0 stands for no accessor.
inline u64 accessor(const Wave& w, bool atomic) {
  return u64(w.block->number + 1) << 38 | u64(w.number) << 33 | u64(w.epoch & 0x7fffffff) << 1 | u64(atomic);
}
inline bool races(u64 a, u64 b) {
  if (!a || !b || (a & b & 1)) return false;
  if (a >> 38 != b >> 38) return true;
  const bool same_epoch = ((a ^ b) & 0x1fffffffeull) == 0;
  return a >> 33 != b >> 33 && same_epoch;
}

bool watches_races();    // RLK_ISA_RACES
void forget_accesses();  // forgets all accesses; must be called when a launch begins
enum class Access { kLoad, kScalarLoad, kStore, kAtomic };
// Records an access of n bytes of global memory and reports races. Call the function before the access. `value` is the
// value of a store.
void note_global(Wave& w, const Instruction& i, u64 address, int n, Access access, const u8* value = nullptr);

// The lanes of one store instruction. Each lane stores n bytes.
struct Stores {
  Lanes<u64> address;
  Lanes<bool> on;
  Lanes<std::array<u8, 16>> value;
};
void check_lanes(Wave& w, const Instruction& i, const Stores& stores, int n);

}  // namespace rlk::hip::isa
