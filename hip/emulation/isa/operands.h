// Functions that read and write operands with their modifiers: lanes of vector registers, scalars and constants.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>

#include "machine.h"
#include "reports.h"

namespace rlk::hip::isa {

inline float as_float(u32 x) { return std::bit_cast<float>(x); }
inline u32 as_bits(float x) { return std::bit_cast<u32>(x); }
inline float half_to_float(u16 x) { return _cvtsh_ss(x); }
inline u16 float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// of_float: the instruction works on floats. A 32-bit literal of a 64-bit float instruction is the high half of a
// double.
inline u64 read_scalar(const Wave& w, const Operand& o, int bits, bool of_float = false) {
  if (o.kind == Operand::kScalar) {
    if (o.index == kScc) return w.scc;
    return bits == 64 ? w.pair(o.index) : w.s[o.index];
  }
  if (o.kind != Operand::kConstant) stop("no scalar operand");
  if (o.is_float) {
    if (bits == 64) return std::bit_cast<u64>(o.value);
    return bits == 16 ? u64(float_to_half(float(o.value))) : as_bits(float(o.value));
  }
  if (bits == 64) return o.is_literal && of_float ? o.bits << 32 : o.bits;
  return u32(o.bits);
}
inline void write_scalar(Wave& w, const Operand& o, u64 x, int bits) {
  if (bits == 64)
    w.set_pair(o.index, x);
  else
    w.s[o.index] = u32(x);
}

inline u32 part_of(u32 x, const Operand& o) {
  if (o.part < kWord0) {
    x = x >> (8 * o.part) & 0xff;
    return o.sign_extend ? u32(i32(std::int8_t(x))) : x;
  }
  if (o.part < kDword) {
    x = x >> (16 * (o.part - kWord0)) & 0xffff;
    return o.sign_extend ? u32(i32(i16(x))) : x;
  }
  return x;
}

// Returns a pointer to the operand's bits in every lane. If a register holds these bits, the pointer points into the
// register. Otherwise the bits are written to `own`.
inline const u32* read_bits(const Wave& w, const Operand& o, Lanes<u32>& own, int bits = 32) {
  if (o.kind == Operand::kVector) {
    if (o.part == kDword) return w.v[o.index];
    for (int l = 0; l < kLanes; ++l) own[l] = part_of(w.v[o.index][l], o);
  } else {
    own.fill(part_of(u32(read_scalar(w, o, bits, true)), o));
  }
  return own.data();
}
// Returns the bits of every lane after the operand's modifiers abs and neg.
inline const u32* read_floats(const Wave& w, const Operand& o, Lanes<u32>& own) {
  const u32* bits = read_bits(w, o, own);
  if (!o.negate && !o.absolute) return bits;
  const u32 keep = o.absolute ? 0x7fffffffu : ~0u, flip = o.negate ? 0x80000000u : 0;
  for (int l = 0; l < kLanes; ++l) own[l] = (bits[l] & keep) ^ flip;
  return own.data();
}
inline Lanes<u64> read_pairs(const Wave& w, const Operand& o, bool of_float) {
  Lanes<u64> x;
  if (o.kind == Operand::kVector) {
    for (int l = 0; l < kLanes; ++l) x[l] = u64(w.v[o.index + 1][l]) << 32 | w.v[o.index][l];
  } else {
    x.fill(read_scalar(w, o, 64, of_float));
  }
  if (of_float) {
    constexpr u64 kSign = 1ull << 63;
    for (u64& y : x) y = (o.absolute ? y & ~kSign : y) ^ (o.negate ? kSign : 0);
  }
  return x;
}

// Writes a vector register. Lanes that are inactive keep their values.
inline void write_register(Wave& w, int index, const u32* x) {
  const u64 exec = w.exec();
  if (exec == ~0ull) {
    std::memcpy(w.v[index], x, sizeof(w.v[index]));
    return;
  }
  for (int l = 0; l < kLanes; ++l) w.v[index][l] = exec >> l & 1 ? x[l] : w.v[index][l];
}
inline void write_pairs(Wave& w, const Operand& o, const Lanes<u64>& x) {
  Lanes<u32> low, high;
  for (int l = 0; l < kLanes; ++l) {
    low[l] = u32(x[l]);
    high[l] = u32(x[l] >> 32);
  }
  write_register(w, o.index, low.data());
  write_register(w, o.index + 1, high.data());
}
inline void write_result(Wave& w, const Instruction& i, Lanes<u32>& x) {
  const int to = i.operands[0].index;
  if (i.to_part != kDword) {
    const bool is_byte = i.to_part < kWord0;
    const int width = is_byte ? 8 : 16, at = is_byte ? 8 * i.to_part : 16 * (i.to_part - kWord0);
    const u32 mask = is_byte ? 0xff : 0xffff;
    for (int l = 0; l < kLanes; ++l) {
      u32 y = (x[l] & mask) << at;
      if (i.unused == Instruction::kSignExtend && (x[l] >> (width - 1) & 1)) y |= ~0u << at;
      if (i.unused == Instruction::kPreserve) y |= w.v[to][l] & ~(mask << at);
      x[l] = y;
    }
  }
  write_register(w, to, x.data());
}
inline void write_mask(Wave& w, const Operand& o, u64 mask) { w.set_pair(o.index, mask); }

// Makes the function of an instruction from a function of one lane, as in int1([](u32 a) { return ~a; }).
template <class F>
Function int1(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own, x;
    const u32* a = read_bits(w, i.operands[1], own);
    for (int l = 0; l < kLanes; ++l) x[l] = u32(F{}(a[l]));
    write_result(w, i, x);
  };
}
template <class F>
Function int2(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2], x;
    const u32 *a = read_bits(w, i.operands[1], own[0]), *b = read_bits(w, i.operands[2], own[1]);
    for (int l = 0; l < kLanes; ++l) x[l] = u32(F{}(a[l], b[l]));
    write_result(w, i, x);
  };
}
template <class F>
Function int3(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own[3], x;
    const u32 *a = read_bits(w, i.operands[1], own[0]), *b = read_bits(w, i.operands[2], own[1]);
    const u32* c = read_bits(w, i.operands[3], own[2]);
    for (int l = 0; l < kLanes; ++l) x[l] = u32(F{}(a[l], b[l], c[l]));
    write_result(w, i, x);
  };
}

}  // namespace rlk::hip::isa
