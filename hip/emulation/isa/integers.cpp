// Vector instructions on integers of 16, 32 and 64 bits, and instructions that move values between lanes.
#include <algorithm>

#include "operands.h"

namespace rlk::hip::isa {
namespace {

u32 reversed(u32 a) {
  u32 x = 0;
  for (int k = 0; k < 32; ++k) x |= (a >> k & 1) << (31 - k);
  return x;
}
i32 low24(u32 a) { return i32(a << 8) >> 8; }
u32 leading_signs(u32 a) {
  const u32 x = a ^ u32(i32(a) >> 31);
  return x ? u32(__builtin_clz(x)) : ~0u;
}
u32 picked_bytes(u32 high, u32 low, u32 selectors) {  // v_perm_b32
  const u64 from = u64(high) << 32 | low;
  u32 x = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 s = selectors >> (8 * k) & 255;
    u32 byte = u32(from >> (8 * (s & 7))) & 0xff;
    if (s >= 13)
      byte = 0xff;
    else if (s == 12)
      byte = 0;
    else if (s >= 8)
      byte = (from >> (16 * (s - 8) + 15) & 1) ? 0xff : 0;
    x |= byte << (8 * k);
  }
  return x;
}
u32 field(u32 a, u32 at, u32 n) {
  at &= 31, n &= 31;
  return n ? (a >> at) & ((1u << n) - 1) : 0;
}
u32 signed_field(u32 a, u32 at, u32 n) {
  at &= 31, n &= 31;
  if (!n) return 0;
  return at + n >= 32 ? u32(i32(a) >> at) : u32(i32(a << (32 - at - n)) >> (32 - n));
}

// The operands are the destination, the carry out, two sources, and perhaps a carry in.
template <bool subtracts, bool reversed, bool takes_carry>
void with_carry(Wave& w, const Instruction& i) {
  Lanes<u32> own[2], x;
  const u32 *a = read_bits(w, i.operands[2], own[0]), *b = read_bits(w, i.operands[3], own[1]);
  if (reversed) std::swap(a, b);
  const u64 in = takes_carry ? read_scalar(w, i.operands[4], 64) : 0;
  u64 out = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 carry = in >> l & 1;
    const u64 sum = subtracts ? u64(a[l]) - b[l] - carry : u64(a[l]) + b[l] + carry;
    x[l] = u32(sum);
    out |= (sum >> 32 & 1) << l;
  }
  out &= w.exec();
  write_result(w, i, x);
  write_mask(w, i.operands[1], out);
}

template <class F>
Function shift64(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own;
    const u32* a = read_bits(w, i.operands[1], own);
    Lanes<u64> b = read_pairs(w, i.operands[2], false);
    for (int l = 0; l < kLanes; ++l) b[l] = F{}(b[l], a[l] & 63);
    write_pairs(w, i.operands[0], b);
  };
}
// a * b + c in 64 bits. f(a, b, c, &x) writes the sum to x and returns whether it overflows.
template <class F>
Function multiply_add64(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2];
    const u32 *a = read_bits(w, i.operands[2], own[0]), *b = read_bits(w, i.operands[3], own[1]);
    Lanes<u64> c = read_pairs(w, i.operands[4], false);
    u64 mask = 0;
    for (int l = 0; l < kLanes; ++l) mask |= u64(F{}(a[l], b[l], c[l], &c[l])) << l;
    mask &= w.exec();
    write_pairs(w, i.operands[0], c);
    write_mask(w, i.operands[1], mask);
  };
}

void add_bits(Table& t) {
  for (const char* name : {"v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"}) {
    t[name] = int1([](u32 a) { return a; });
  }
  t["v_not_b32"] = int1([](u32 a) { return ~a; });
  t["v_bfrev_b32"] = int1([](u32 a) { return reversed(a); });
  t["v_ffbl_b32"] = int1([](u32 a) { return a ? u32(__builtin_ctz(a)) : ~0u; });
  t["v_ffbh_u32"] = int1([](u32 a) { return a ? u32(__builtin_clz(a)) : ~0u; });
  t["v_ffbh_i32"] = int1([](u32 a) { return leading_signs(a); });
  t["v_and_b32"] = int2([](u32 a, u32 b) { return a & b; });
  t["v_or_b32"] = int2([](u32 a, u32 b) { return a | b; });
  t["v_xor_b32"] = int2([](u32 a, u32 b) { return a ^ b; });
  t["v_xnor_b32"] = int2([](u32 a, u32 b) { return ~(a ^ b); });
  t["v_lshlrev_b32"] = int2([](u32 a, u32 b) { return b << (a & 31); });
  t["v_lshrrev_b32"] = int2([](u32 a, u32 b) { return b >> (a & 31); });
  t["v_ashrrev_i32"] = int2([](u32 a, u32 b) { return i32(b) >> (a & 31); });
  t["v_bcnt_u32_b32"] = int2([](u32 a, u32 b) { return u32(__builtin_popcount(a)) + b; });
  t["v_bfm_b32"] = int2([](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); });
  t["v_pack_b32_f16"] = int2([](u32 a, u32 b) { return (a & 0xffff) | b << 16; });
  t["v_lshl_or_b32"] = int3([](u32 a, u32 b, u32 c) { return a << (b & 31) | c; });
  t["v_and_or_b32"] = int3([](u32 a, u32 b, u32 c) { return (a & b) | c; });
  t["v_or3_b32"] = int3([](u32 a, u32 b, u32 c) { return a | b | c; });
  t["v_bfi_b32"] = int3([](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); });
  t["v_alignbit_b32"] = int3([](u32 a, u32 b, u32 c) { return (u64(a) << 32 | b) >> (c & 31); });
  t["v_alignbyte_b32"] = int3([](u32 a, u32 b, u32 c) { return (u64(a) << 32 | b) >> (8 * (c & 3)); });
  t["v_bfe_u32"] = int3([](u32 a, u32 b, u32 c) { return field(a, b, c); });
  t["v_bfe_i32"] = int3([](u32 a, u32 b, u32 c) { return signed_field(a, b, c); });
  t["v_perm_b32"] = int3([](u32 a, u32 b, u32 c) { return picked_bytes(a, b, c); });
  t["v_cndmask_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2], x;
    const u32 *a = read_floats(w, i.operands[1], own[0]), *b = read_floats(w, i.operands[2], own[1]);
    const u64 mask = read_scalar(w, i.operands[3], 64);
    for (int l = 0; l < kLanes; ++l) x[l] = mask >> l & 1 ? b[l] : a[l];
    write_result(w, i, x);
  };
  t["v_mov_b64"] = [](Wave& w, const Instruction& i) {
    write_pairs(w, i.operands[0], read_pairs(w, i.operands[1], false));
  };
  t["v_lshlrev_b64"] = shift64([](u64 x, u32 by) { return x << by; });
  t["v_lshrrev_b64"] = shift64([](u64 x, u32 by) { return x >> by; });
  t["v_ashrrev_i64"] = shift64([](u64 x, u32 by) { return u64(i64(x) >> by); });
}

void add_arithmetic(Table& t) {
  for (const char* name : {"v_add_u32", "v_add_i32"}) t[name] = int2([](u32 a, u32 b) { return a + b; });
  for (const char* name : {"v_sub_u32", "v_sub_i32"}) t[name] = int2([](u32 a, u32 b) { return a - b; });
  t["v_subrev_u32"] = int2([](u32 a, u32 b) { return b - a; });
  t["v_mul_lo_u32"] = int2([](u32 a, u32 b) { return a * b; });
  t["v_mul_hi_u32"] = int2([](u32 a, u32 b) { return u64(a) * b >> 32; });
  t["v_mul_hi_i32"] = int2([](u32 a, u32 b) { return u64(i64(i32(a)) * i32(b)) >> 32; });
  t["v_mul_u32_u24"] = int2([](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); });
  t["v_mul_hi_u32_u24"] = int2([](u32 a, u32 b) { return u64(a & 0xffffff) * (b & 0xffffff) >> 32; });
  t["v_mul_i32_i24"] = int2([](u32 a, u32 b) { return i64(low24(a)) * low24(b); });
  t["v_mul_hi_i32_i24"] = int2([](u32 a, u32 b) { return u64(i64(low24(a)) * low24(b)) >> 32; });
  t["v_max_u32"] = int2([](u32 a, u32 b) { return std::max(a, b); });
  t["v_min_u32"] = int2([](u32 a, u32 b) { return std::min(a, b); });
  t["v_max_i32"] = int2([](u32 a, u32 b) { return std::max(i32(a), i32(b)); });
  t["v_min_i32"] = int2([](u32 a, u32 b) { return std::min(i32(a), i32(b)); });
  t["v_add_u16"] = int2([](u32 a, u32 b) { return (a + b) & 0xffff; });
  t["v_sub_u16"] = int2([](u32 a, u32 b) { return (a - b) & 0xffff; });
  t["v_subrev_u16"] = int2([](u32 a, u32 b) { return (b - a) & 0xffff; });
  t["v_mul_lo_u16"] = int2([](u32 a, u32 b) { return (a * b) & 0xffff; });
  t["v_lshlrev_b16"] = int2([](u32 a, u32 b) { return (b << (a & 15)) & 0xffff; });
  t["v_lshrrev_b16"] = int2([](u32 a, u32 b) { return (b & 0xffff) >> (a & 15); });
  t["v_ashrrev_i16"] = int2([](u32 a, u32 b) { return u16(i16(b) >> (a & 15)); });
  t["v_max_u16"] = int2([](u32 a, u32 b) { return std::max(a & 0xffff, b & 0xffff); });
  t["v_min_u16"] = int2([](u32 a, u32 b) { return std::min(a & 0xffff, b & 0xffff); });
  t["v_max_i16"] = int2([](u32 a, u32 b) { return u16(std::max(i16(a), i16(b))); });
  t["v_min_i16"] = int2([](u32 a, u32 b) { return u16(std::min(i16(a), i16(b))); });
  t["v_add3_u32"] = int3([](u32 a, u32 b, u32 c) { return a + b + c; });
  t["v_lshl_add_u32"] = int3([](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; });
  t["v_add_lshl_u32"] = int3([](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); });
  t["v_xad_u32"] = int3([](u32 a, u32 b, u32 c) { return (a ^ b) + c; });
  t["v_mad_u32_u24"] = int3([](u32 a, u32 b, u32 c) { return (a & 0xffffff) * (b & 0xffffff) + c; });
  t["v_mad_i32_i24"] = int3([](u32 a, u32 b, u32 c) { return u32(i64(low24(a)) * low24(b)) + c; });
  t["v_max3_u32"] = int3([](u32 a, u32 b, u32 c) { return std::max({a, b, c}); });
  t["v_min3_u32"] = int3([](u32 a, u32 b, u32 c) { return std::min({a, b, c}); });
  t["v_max3_i32"] = int3([](u32 a, u32 b, u32 c) { return std::max({i32(a), i32(b), i32(c)}); });
  t["v_min3_i32"] = int3([](u32 a, u32 b, u32 c) { return std::min({i32(a), i32(b), i32(c)}); });
  t["v_med3_u32"] = int3([](u32 a, u32 b, u32 c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
  t["v_med3_i32"] = int3([](u32 a, u32 b, u32 c) {
    return std::max(std::min(i32(a), i32(b)), std::min(std::max(i32(a), i32(b)), i32(c)));
  });
  t["v_sad_u32"] = int3([](u32 a, u32 b, u32 c) { return (a > b ? a - b : b - a) + c; });
  for (const char* name : {"v_mad_u16", "v_mad_legacy_u16"}) {
    t[name] = int3([](u32 a, u32 b, u32 c) { return (a * b + c) & 0xffff; });
  }
  t["v_add_co_u32"] = with_carry<false, false, false>;
  t["v_addc_co_u32"] = with_carry<false, false, true>;
  t["v_sub_co_u32"] = with_carry<true, false, false>;
  t["v_subb_co_u32"] = with_carry<true, false, true>;
  t["v_subrev_co_u32"] = with_carry<true, true, false>;
  t["v_subbrev_co_u32"] = with_carry<true, true, true>;
  t["v_mad_u64_u32"] =
      multiply_add64([](u32 a, u32 b, u64 c, u64* x) { return __builtin_add_overflow(u64(a) * b, c, x); });
  t["v_mad_i64_i32"] = multiply_add64([](u32 a, u32 b, u64 c, u64* x) {
    i64 sum;
    const bool over = __builtin_add_overflow(i64(i32(a)) * i32(b), i64(c), &sum);
    *x = u64(sum);
    return over;
  });
  t["v_lshl_add_u64"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own;
    Lanes<u64> a = read_pairs(w, i.operands[1], false);
    const u32* b = read_bits(w, i.operands[2], own);
    const Lanes<u64> c = read_pairs(w, i.operands[3], false);
    for (int l = 0; l < kLanes; ++l) a[l] = (a[l] << (b[l] & 7)) + c[l];
    write_pairs(w, i.operands[0], a);
  };
}

}  // namespace

void add_integers(Table& t) {
  add_bits(t);
  add_arithmetic(t);
}

void add_lanes(Table& t) {
  t["v_mbcnt_lo_u32_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2], x;
    const u32 *a = read_bits(w, i.operands[1], own[0]), *b = read_bits(w, i.operands[2], own[1]);
    for (int l = 0; l < kLanes; ++l) x[l] = b[l] + __builtin_popcount(a[l] & (l >= 32 ? ~0u : (1u << l) - 1));
    write_result(w, i, x);
  };
  t["v_mbcnt_hi_u32_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2], x;
    const u32 *a = read_bits(w, i.operands[1], own[0]), *b = read_bits(w, i.operands[2], own[1]);
    for (int l = 0; l < kLanes; ++l) x[l] = b[l] + (l <= 32 ? 0 : __builtin_popcount(a[l] & ((1u << (l - 32)) - 1)));
    write_result(w, i, x);
  };
  t["v_readfirstlane_b32"] = [](Wave& w, const Instruction& i) {
    const Operand& from = i.operands[1];
    const int lane = w.exec() ? __builtin_ctzll(w.exec()) : 0;
    w.s[i.operands[0].index] = from.kind == Operand::kVector ? w.v[from.index][lane] : u32(read_scalar(w, from, 32));
  };
  t["v_readlane_b32"] = [](Wave& w, const Instruction& i) {
    w.s[i.operands[0].index] = w.v[i.operands[1].index][read_scalar(w, i.operands[2], 32) & 63];
  };
  t["v_writelane_b32"] = [](Wave& w, const Instruction& i) {
    w.v[i.operands[0].index][read_scalar(w, i.operands[2], 32) & 63] = u32(read_scalar(w, i.operands[1], 32));
  };
  t["v_swap_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> a, b;
    std::memcpy(a.data(), w.v[i.operands[0].index], sizeof(a));
    std::memcpy(b.data(), w.v[i.operands[1].index], sizeof(b));
    write_register(w, i.operands[0].index, b.data());
    write_register(w, i.operands[1].index, a.data());
  };
  t["ds_bpermute_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> x;
    for (int l = 0; l < kLanes; ++l) {
      const int from = int((w.v[i.operands[1].index][l] + i.offset) >> 2 & 63);
      if (w.on(l) && !w.on(from)) fault(w, i, "BPERMUTE from a lane that is off", l);
      x[l] = w.on(from) ? w.v[i.operands[2].index][from] : 0;
    }
    write_register(w, i.operands[0].index, x.data());
  };
  t["ds_permute_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> x{};
    for (int l = 0; l < kLanes; ++l) {
      if (w.on(l)) x[(w.v[i.operands[1].index][l] + i.offset) >> 2 & 63] = w.v[i.operands[2].index][l];
    }
    write_register(w, i.operands[0].index, x.data());
  };
}

}  // namespace rlk::hip::isa
