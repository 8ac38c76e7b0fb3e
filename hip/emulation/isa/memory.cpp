// Loads, stores and atomics of global memory and of a block's LDS. Global memory is the host's memory.
#include <algorithm>

#include "operands.h"
#include "races.h"

namespace rlk::hip::isa {
namespace {

int words_of(const Instruction& i) { return std::max(1, i.bytes / 4); }

// The register's content after a load of less than 32 bits.
u32 extended(const Instruction& i, u32 x, u32 before) {
  switch (i.extension) {
    case Instruction::kSigned8:
      return u32(i32(std::int8_t(x)));
    case Instruction::kSigned16:
      return u32(i32(i16(x)));
    case Instruction::kLowHalf:
      return (before & 0xffff0000) | x;
    case Instruction::kHighHalf:
      return (before & 0xffff) | x << 16;
    default:
      return x;
  }
}
std::array<u8, 16> stored(const Wave& w, const Instruction& i, int first, int lane) {
  u32 words[4] = {};
  for (int k = 0; k < words_of(i); ++k) words[k] = w.v[first + k][lane];
  if (i.extension == Instruction::kHighHalf) words[0] >>= 16;
  std::array<u8, 16> bytes;
  std::memcpy(bytes.data(), words, sizeof(words));
  return bytes;
}
bool is_misaligned(u64 address, int bytes) { return address % u64(std::min(bytes, 4)) != 0; }

Lanes<u64> global_addresses(const Wave& w, const Operand& of, const Operand& base, i64 offset) {
  Lanes<u64> x;
  const u64 from = base.kind == Operand::kScalar ? read_scalar(w, base, 64) : 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 high = base.kind == Operand::kScalar ? 0 : u64(w.v[of.index + 1][l]) << 32;
    x[l] = from + (high | w.v[of.index][l]) + u64(offset);
  }
  return x;
}

void global_load(Wave& w, const Instruction& i) {  // operands: destination, address, base
  const Lanes<u64> at = global_addresses(w, i.operands[1], i.operands[2], i.offset);
  const int to = i.operands[0].index;
  u32 got[4][kLanes] = {};
  for (int l = 0; l < kLanes; ++l) {
    if (!w.on(l)) continue;
    if (is_misaligned(at[l], i.bytes)) note(w, i, "a load off its alignment", at[l]);
    note_global(w, i, at[l], i.bytes, Access::kLoad);
    u32 x[4] = {};
    std::memcpy(x, reinterpret_cast<const void*>(at[l]), i.bytes);
    x[0] = extended(i, x[0], w.v[to][l]);
    for (int k = 0; k < words_of(i); ++k) got[k][l] = x[k];
  }
  for (int k = 0; k < words_of(i); ++k) write_register(w, to + k, got[k]);
}

void global_store(Wave& w, const Instruction& i) {  // operands: address, data, base
  Stores stores;
  stores.address = global_addresses(w, i.operands[0], i.operands[2], i.offset);
  for (int l = 0; l < kLanes; ++l) {
    stores.on[l] = w.on(l);
    stores.value[l] = stored(w, i, i.operands[1].index, l);
  }
  check_lanes(w, i, stores, i.bytes);
  for (int l = 0; l < kLanes; ++l) {
    if (!stores.on[l]) continue;
    const u64 at = stores.address[l];
    if (is_misaligned(at, i.bytes)) note(w, i, "a store off its alignment", at);
    note_global(w, i, at, i.bytes, Access::kStore, stores.value[l].data());
    std::memcpy(reinterpret_cast<void*>(at), stores.value[l].data(), i.bytes);
  }
}

u64 combined(const std::string& operation, u64 before, u64 x, int bytes) {
  if (operation == "add") return before + x;
  if (operation == "sub") return before - x;
  if (operation == "or") return before | x;
  if (operation == "and") return before & x;
  if (operation == "xor") return before ^ x;
  if (operation == "umax") return std::max(before, x);
  if (operation == "umin") return std::min(before, x);
  if (operation == "swap" || operation == "wrxchg") return x;
  if (operation == "smax")
    return bytes == 4 ? u64(u32(std::max(i32(before), i32(x)))) : u64(std::max(i64(before), i64(x)));
  if (operation == "smin")
    return bytes == 4 ? u64(u32(std::min(i32(before), i32(x)))) : u64(std::min(i64(before), i64(x)));
  if (operation == "add_f32") return as_bits(as_float(u32(before)) + as_float(u32(x)));
  stop("no atomic " + operation);
}
u64 data_of(const Wave& w, const Operand& o, int lane, int bytes) {
  return bytes == 8 ? u64(w.v[o.index + 1][lane]) << 32 | w.v[o.index][lane] : w.v[o.index][lane];
}
void return_value(Wave& w, const Instruction& i, int lane, u64 x) {
  if (!i.returns) return;
  w.v[i.operands[0].index][lane] = u32(x);
  if (i.bytes == 8) w.v[i.operands[0].index + 1][lane] = u32(x >> 32);
}

// operands: destination if the atomic returns a value, then address, data, base
void global_atomic(Wave& w, const Instruction& i) {
  const int first = i.returns;
  const Lanes<u64> at = global_addresses(w, i.operands[first], i.operands[first + 2], i.offset);
  for (int l = 0; l < kLanes; ++l) {
    if (!w.on(l)) continue;
    note_global(w, i, at[l], i.bytes, Access::kAtomic);
    u64 before = 0;
    std::memcpy(&before, reinterpret_cast<const void*>(at[l]), i.bytes);
    const u64 now = combined(i.name, before, data_of(w, i.operands[first + 1], l, i.bytes), i.bytes);
    std::memcpy(reinterpret_cast<void*>(at[l]), &now, i.bytes);
    return_value(w, i, l, before);
  }
}

// a wave number that no block has; marks a byte that several waves have read
constexpr u64 kSeveralWaves = 31ull << 33;
u64 with_reader(u64 before, u64 me) {
  const bool same_epoch = ((before ^ me) & 0x1fffffffeull) == 0;
  return before && before >> 33 != me >> 33 && same_epoch ? me | kSeveralWaves : me;
}

// Records an access of n bytes of LDS, and returns whether all bytes are in the block's LDS.
bool note_lds(Wave& w, const Instruction& i, u64 at, int n, Access access, const u8* value = nullptr) {
  Block& b = *w.block;
  const bool writes = access != Access::kLoad;
  if (at + n > b.lds.size()) {
    fault(w, i, writes ? "LDS STORE OUT OF BOUNDS" : "LDS LOAD OUT OF BOUNDS", at);
    return false;
  }
  const u64 me = accessor(w, access == Access::kAtomic);
  for (u64 k = at; k < at + n; ++k) {
    if (writes) {
      const bool same = value && b.lds[k] == value[k - at] && b.written[k];
      if (races(b.lds_writer[k], me)) {
        same ? note(w, i, "two waves store one value in LDS", k) : fault(w, i, "LDS RACE write-write", k);
      }
      if (races(b.lds_reader[k], me)) {
        same ? note(w, i, "a wave stores what LDS holds and another reads it", k)
             : fault(w, i, "LDS RACE read-write", k);
      }
      b.lds_writer[k] = me;
      b.written[k] = 1;
    } else {
      if (!b.written[k]) note(w, i, "LDS read of what nobody wrote", k);
      if (races(b.lds_writer[k], me)) fault(w, i, "LDS RACE write-read", k);
      b.lds_reader[k] = with_reader(b.lds_reader[k], me);
    }
  }
  return true;
}

u64 lds_address(const Wave& w, const Instruction& i, const Operand& of, int lane, bool second) {
  const u64 step = u64(i.bytes) * i.pair_scale;
  const u64 offset = i.pair_scale ? step * (second ? i.offset1 : i.offset0) : u64(i.offset);
  return u32(w.v[of.index][lane] + offset);
}

void lds_load(Wave& w, const Instruction& i) {  // operands: destination, address; loads one or two elements
  const int count = i.pair_scale ? 2 : 1, words = words_of(i), to = i.operands[0].index;
  u32 got[8][kLanes] = {};
  for (int l = 0; l < kLanes; ++l) {
    if (!w.on(l)) continue;
    for (int k = 0; k < count; ++k) {
      const u64 at = lds_address(w, i, i.operands[1], l, k);
      if (is_misaligned(at, i.bytes)) note(w, i, "a load off its alignment in LDS", at);
      u32 x[4] = {};
      if (note_lds(w, i, at, i.bytes, Access::kLoad)) std::memcpy(x, &w.block->lds[at], i.bytes);
      x[0] = extended(i, x[0], w.v[to][l]);
      for (int j = 0; j < words; ++j) got[k * words + j][l] = x[j];
    }
  }
  for (int j = 0; j < words * count; ++j) write_register(w, to + j, got[j]);
}

// operands: address, data, and a second data operand if two elements are stored
void lds_store(Wave& w, const Instruction& i) {
  for (int k = 0; k < (i.pair_scale ? 2 : 1); ++k) {
    Stores stores;
    for (int l = 0; l < kLanes; ++l) {
      stores.on[l] = w.on(l);
      stores.address[l] = lds_address(w, i, i.operands[0], l, k);
      stores.value[l] = stored(w, i, i.operands[1 + k].index, l);
    }
    check_lanes(w, i, stores, i.bytes);
    for (int l = 0; l < kLanes; ++l) {
      if (!stores.on[l]) continue;
      const u64 at = stores.address[l];
      if (is_misaligned(at, i.bytes)) note(w, i, "a store off its alignment in LDS", at);
      if (!note_lds(w, i, at, i.bytes, Access::kStore, stores.value[l].data())) continue;
      std::memcpy(&w.block->lds[at], stores.value[l].data(), i.bytes);
    }
  }
}

// operands: destination if the atomic returns a value, then address, data
void lds_atomic(Wave& w, const Instruction& i) {
  const int first = i.returns;
  for (int l = 0; l < kLanes; ++l) {
    if (!w.on(l)) continue;
    const u64 at = lds_address(w, i, i.operands[first], l, false);
    if (at < w.block->written.size() && !w.block->written[at]) fault(w, i, "LDS ATOMIC on what nobody wrote", at);
    if (!note_lds(w, i, at, i.bytes, Access::kAtomic)) continue;
    u64 before = 0;
    std::memcpy(&before, &w.block->lds[at], i.bytes);
    const u64 now = combined(i.name, before, data_of(w, i.operands[first + 1], l, i.bytes), i.bytes);
    std::memcpy(&w.block->lds[at], &now, i.bytes);
    return_value(w, i, l, before);
  }
}

struct Width {
  int bytes;
  Instruction::Extension extension;
};
Function with_width(const std::map<std::string, Width>& widths, const std::string& name, Instruction& i, Function f) {
  const auto found = widths.find(name);
  if (found == widths.end()) return nullptr;
  i.bytes = found->second.bytes;
  i.extension = found->second.extension;
  return f;
}

}  // namespace

Function global_access(const std::string& name, Instruction& i) {
  static const std::map<std::string, Width> widths = {
      {"ubyte", {1, Instruction::kZero}},
      {"sbyte", {1, Instruction::kSigned8}},
      {"ushort", {2, Instruction::kZero}},
      {"sshort", {2, Instruction::kSigned16}},
      {"short_d16", {2, Instruction::kLowHalf}},
      {"short_d16_hi", {2, Instruction::kHighHalf}},
      {"byte", {1, Instruction::kZero}},
      {"short", {2, Instruction::kZero}},
      {"byte_d16_hi", {1, Instruction::kHighHalf}},
      {"dword", {4, Instruction::kZero}},
      {"dwordx2", {8, Instruction::kZero}},
      {"dwordx3", {12, Instruction::kZero}},
      {"dwordx4", {16, Instruction::kZero}},
  };
  if (starts(name, "global_load_")) return with_width(widths, name.substr(12), i, global_load);
  if (starts(name, "global_store_")) return with_width(widths, name.substr(13), i, global_store);
  if (!starts(name, "global_atomic_") || i.operands.size() != (i.returns ? 4u : 3u)) return nullptr;
  i.bytes = ends(name, "_x2") ? 8 : 4;
  i.name = name.substr(14, name.size() - 14 - (i.bytes == 8 ? 3 : 0));
  return global_atomic;
}

Function lds_access(const std::string& name, Instruction& i) {
  static const std::map<std::string, Width> widths = {
      {"b8", {1, Instruction::kZero}},
      {"u8", {1, Instruction::kZero}},
      {"i8", {1, Instruction::kSigned8}},
      {"b16", {2, Instruction::kZero}},
      {"u16", {2, Instruction::kZero}},
      {"i16", {2, Instruction::kSigned16}},
      {"u16_d16", {2, Instruction::kLowHalf}},
      {"u16_d16_hi", {2, Instruction::kHighHalf}},
      {"b8_d16_hi", {1, Instruction::kHighHalf}},
      {"b16_d16_hi", {2, Instruction::kHighHalf}},
      {"b32", {4, Instruction::kZero}},
      {"b64", {8, Instruction::kZero}},
      {"b96", {12, Instruction::kZero}},
      {"b128", {16, Instruction::kZero}},
  };
  if (starts(name, "ds_read") || starts(name, "ds_write")) {
    const bool loads = starts(name, "ds_read");
    const std::string rest = name.substr(loads ? 7 : 8);
    i.pair_scale = starts(rest, "2st64_") ? 64 : starts(rest, "2_") ? 1 : 0;
    return with_width(widths, rest.substr(rest.find('_') + 1), i, loads ? lds_load : lds_store);
  }
  if (!starts(name, "ds_") || starts(name, "ds_swizzle")) return nullptr;
  std::string rest = name.substr(3);  // for example add_u32 or add_rtn_u32
  i.returns = rest.find("_rtn") != std::string::npos;
  if (i.returns) rest.erase(rest.find("_rtn"), 4);
  i.bytes = ends(rest, "64") ? 8 : 4;
  const char type = rest[rest.size() - 3];
  const std::string operation = rest.substr(0, rest.find('_'));
  i.name = operation == "max" || operation == "min" ? (type == 'u' ? "u" : "s") + operation : operation;
  return lds_atomic;
}

}  // namespace rlk::hip::isa
