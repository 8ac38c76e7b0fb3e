// Scalar instructions: moves, logic, arithmetic, comparisons, branches, loads.
#include <algorithm>

#include "operands.h"
#include "races.h"

namespace rlk::hip::isa {
namespace {

u64 cut(u64 x, int bits) { return bits == 32 ? u64(u32(x)) : x; }

// An operation on two operands of the same width. SCC tells whether the result is not 0.
template <int bits, class F>
void logic(Wave& w, const Instruction& i) {
  const u64 x = cut(F{}(read_scalar(w, i.operands[1], bits), read_scalar(w, i.operands[2], bits)), bits);
  write_scalar(w, i.operands[0], x, bits);
  w.scc = x != 0;
}
template <class F>
void add_logic(F, Table& t, const std::string& name) {
  t["s_" + name + "_b32"] = logic<32, F>;
  t["s_" + name + "_b64"] = logic<64, F>;
}
template <class F>
Function save_exec(F) {
  return [](Wave& w, const Instruction& i) {
    const u64 s = read_scalar(w, i.operands[1], 64), exec = w.exec();
    write_scalar(w, i.operands[0], exec, 64);
    w.set_exec(F{}(s, exec));
    w.scc = w.exec() != 0;
  };
}

// Adds an instruction for 32 bits and one for 64 bits to the table. Both instructions call f(w, i, bits).
template <class F>
void add_both(F, Table& t, const std::string& name) {
  t["s_" + name + "_b32"] = [](Wave& w, const Instruction& i) { F{}(w, i, 32); };
  t["s_" + name + "_b64"] = [](Wave& w, const Instruction& i) { F{}(w, i, 64); };
}
u64 arg(const Wave& w, const Instruction& i, int k, int bits) { return read_scalar(w, i.operands[k], bits); }
void set(Wave& w, const Instruction& i, u64 x, int bits) { write_scalar(w, i.operands[0], x, bits); }

// Operations on 32 bits. With word_scc, SCC tells whether the result is not 0.
template <class F>
Function word(F) {
  return [](Wave& w, const Instruction& i) { set(w, i, u32(F{}(u32(arg(w, i, 1, 32)), u32(arg(w, i, 2, 32)))), 32); };
}
template <class F>
Function word_scc(F) {
  return [](Wave& w, const Instruction& i) {
    const u32 x = u32(F{}(u32(arg(w, i, 1, 32)), u32(arg(w, i, 2, 32))));
    set(w, i, x, 32);
    w.scc = x != 0;
  };
}
// Makes an instruction from a function f of two 32-bit operands and a carry. The low 32 bits of f are the result, and
// bit 32 is the new SCC.
template <class F>
Function word_carry(F) {
  return [](Wave& w, const Instruction& i) {
    const u64 x = F{}(arg(w, i, 1, 32), arg(w, i, 2, 32), u64(w.scc));
    set(w, i, u32(x), 32);
    w.scc = x >> 32 & 1;
  };
}
template <class F>
Function word1(F) {
  return [](Wave& w, const Instruction& i) { set(w, i, u32(F{}(u32(arg(w, i, 1, 32)))), 32); };
}

template <class T>
T extract(T x, u32 control) {  // `control` holds an offset in its low bits and a width from bit 16 on
  constexpr u32 kBits = 8 * sizeof(T);
  const u32 n = control >> 16 & 127, at = control & (kBits - 1);
  if (!n) return 0;
  if (n + at >= kBits) return T(x >> at);
  return T(T(x << (kBits - n - at)) >> (kBits - n));
}
template <class T>
void bit_field(Wave& w, const Instruction& i) {
  constexpr int bits = 8 * sizeof(T);
  const T x = extract<T>(T(arg(w, i, 1, bits)), u32(arg(w, i, 2, 32)));
  set(w, i, u64(x), bits);
  w.scc = x != 0;
}

template <class F>
void add_compare(F, Table& t, const std::string& name) {
  t["s_cmp_" + name + "_i32"] = [](Wave& w, const Instruction& i) {
    w.scc = F{}(i64(i32(arg(w, i, 0, 32))), i64(i32(arg(w, i, 1, 32))));
  };
  t["s_cmp_" + name + "_u32"] = [](Wave& w, const Instruction& i) {
    w.scc = F{}(i64(arg(w, i, 0, 32)), i64(arg(w, i, 1, 32)));
  };
  t["s_cmpk_" + name + "_i32"] = [](Wave& w, const Instruction& i) {
    w.scc = F{}(i64(i32(arg(w, i, 0, 32))), i64(i16(i.operands[1].bits)));
  };
  t["s_cmpk_" + name + "_u32"] = [](Wave& w, const Instruction& i) {
    w.scc = F{}(i64(arg(w, i, 0, 32)), i64(u16(i.operands[1].bits)));
  };
}
template <class F>
Function branch(F) {
  return [](Wave& w, const Instruction& i) {
    if (F{}(w)) w.pc = i.target;
  };
}
u64 after(const Wave& w, const Instruction& i) {
  return reinterpret_cast<u64>(w.block->code->base) + i.address + i.size_bytes;
}
void jump(Wave& w, u64 to) { w.pc = w.block->code->at.at(to - reinterpret_cast<u64>(w.block->code->base)); }

void add_moves(Table& t) {
  add_both([](Wave& w, const Instruction& i, int bits) { set(w, i, arg(w, i, 1, bits), bits); }, t, "mov");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        if (w.scc) set(w, i, arg(w, i, 1, bits), bits);
      },
      t, "cmov");
  add_both(
      [](Wave& w, const Instruction& i, int bits) { set(w, i, w.scc ? arg(w, i, 1, bits) : arg(w, i, 2, bits), bits); },
      t, "cselect");
  t["s_movk_i32"] = [](Wave& w, const Instruction& i) { set(w, i, u32(i32(i16(i.operands[1].bits))), 32); };
  t["s_cmovk_i32"] = [](Wave& w, const Instruction& i) {
    if (w.scc) set(w, i, u32(i32(i16(i.operands[1].bits))), 32);
  };
  t["s_pack_ll_b32_b16"] = word([](u32 a, u32 b) { return (a & 0xffff) | b << 16; });
  t["s_pack_lh_b32_b16"] = word([](u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000); });
  t["s_pack_hh_b32_b16"] = word([](u32 a, u32 b) { return a >> 16 | (b & 0xffff0000); });
  t["s_sext_i32_i8"] = word1([](u32 a) { return i32(std::int8_t(a)); });
  t["s_sext_i32_i16"] = word1([](u32 a) { return i32(i16(a)); });
}

void add_bits(Table& t) {
  add_logic([](u64 a, u64 b) { return a & b; }, t, "and");
  add_logic([](u64 a, u64 b) { return a | b; }, t, "or");
  add_logic([](u64 a, u64 b) { return a ^ b; }, t, "xor");
  add_logic([](u64 a, u64 b) { return a & ~b; }, t, "andn2");
  add_logic([](u64 a, u64 b) { return a | ~b; }, t, "orn2");
  add_logic([](u64 a, u64 b) { return ~(a & b); }, t, "nand");
  add_logic([](u64 a, u64 b) { return ~(a | b); }, t, "nor");
  add_logic([](u64 a, u64 b) { return ~(a ^ b); }, t, "xnor");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 x = cut(~arg(w, i, 1, bits), bits);
        set(w, i, x, bits);
        w.scc = x != 0;
      },
      t, "not");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 a = arg(w, i, 1, bits);
        u64 x = 0;
        for (int k = 0; k < bits; ++k) x |= (a >> k & 1) << (bits - 1 - k);
        set(w, i, x, bits);
      },
      t, "brev");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 x = cut(arg(w, i, 1, bits) << (arg(w, i, 2, 32) & (bits - 1)), bits);
        set(w, i, x, bits);
        w.scc = x != 0;
      },
      t, "lshl");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 x = arg(w, i, 1, bits) >> (arg(w, i, 2, 32) & (bits - 1));
        set(w, i, x, bits);
        w.scc = x != 0;
      },
      t, "lshr");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 n = arg(w, i, 1, 32) & (bits - 1), at = arg(w, i, 2, 32) & (bits - 1);
        set(w, i, cut(((1ull << n) - 1) << at, bits), bits);
      },
      t, "bfm");
  add_both([](Wave& w, const Instruction& i,
              int bits) { w.scc = !(arg(w, i, 0, bits) >> (arg(w, i, 1, 32) & (bits - 1)) & 1); },
           t, "bitcmp0");
  add_both([](Wave& w, const Instruction& i,
              int bits) { w.scc = arg(w, i, 0, bits) >> (arg(w, i, 1, 32) & (bits - 1)) & 1; },
           t, "bitcmp1");
  add_both([](Wave& w, const Instruction& i,
              int bits) { set(w, i, arg(w, i, 0, bits) & ~(1ull << (arg(w, i, 1, 32) & (bits - 1))), bits); },
           t, "bitset0");
  add_both([](Wave& w, const Instruction& i,
              int bits) { set(w, i, arg(w, i, 0, bits) | 1ull << (arg(w, i, 1, 32) & (bits - 1)), bits); },
           t, "bitset1");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 a = arg(w, i, 1, bits);
        set(w, i, a ? __builtin_ctzll(a) : ~0u, 32);
      },
      t, "ff1_i32");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 a = cut(~arg(w, i, 1, bits), bits);
        set(w, i, a ? __builtin_ctzll(a) : ~0u, 32);
      },
      t, "ff0_i32");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u32 x = __builtin_popcountll(arg(w, i, 1, bits));
        set(w, i, x, 32);
        w.scc = x != 0;
      },
      t, "bcnt1_i32");
  add_both(
      [](Wave& w, const Instruction& i, int bits) {
        const u64 a = arg(w, i, 1, bits);
        set(w, i, a ? __builtin_clzll(a) - (64 - bits) : ~0u, 32);
      },
      t, "flbit_i32");
  t["s_flbit_i32"] = word1([](u32 a) {
    const u32 x = a ^ u32(i32(a) >> 31);
    return x ? u32(__builtin_clz(x)) : ~0u;
  });
  t["s_flbit_i32_i64"] = [](Wave& w, const Instruction& i) {
    const u64 a = arg(w, i, 1, 64), x = a ^ u64(i64(a) >> 63);
    set(w, i, x ? __builtin_clzll(x) : ~0u, 32);
  };
  t["s_bfe_u32"] = bit_field<u32>;
  t["s_bfe_i32"] = bit_field<i32>;
  t["s_bfe_u64"] = bit_field<u64>;
  t["s_bfe_i64"] = bit_field<i64>;
  t["s_ashr_i32"] = word_scc([](u32 a, u32 b) { return i32(a) >> (b & 31); });
  t["s_ashr_i64"] = [](Wave& w, const Instruction& i) {
    const i64 x = i64(arg(w, i, 1, 64)) >> (arg(w, i, 2, 32) & 63);
    set(w, i, u64(x), 64);
    w.scc = x != 0;
  };
  t["s_and_saveexec_b64"] = save_exec([](u64 s, u64 e) { return s & e; });
  t["s_or_saveexec_b64"] = save_exec([](u64 s, u64 e) { return s | e; });
  t["s_xor_saveexec_b64"] = save_exec([](u64 s, u64 e) { return s ^ e; });
  t["s_andn2_saveexec_b64"] = save_exec([](u64 s, u64 e) { return s & ~e; });
  t["s_orn2_saveexec_b64"] = save_exec([](u64 s, u64 e) { return s | ~e; });
  t["s_andn1_saveexec_b64"] = save_exec([](u64 s, u64 e) { return ~s & e; });
  t["s_orn1_saveexec_b64"] = save_exec([](u64 s, u64 e) { return ~s | e; });
  t["s_nand_saveexec_b64"] = save_exec([](u64 s, u64 e) { return ~(s & e); });
  t["s_nor_saveexec_b64"] = save_exec([](u64 s, u64 e) { return ~(s | e); });
  t["s_xnor_saveexec_b64"] = save_exec([](u64 s, u64 e) { return ~(s ^ e); });
}

void add_arithmetic(Table& t) {
  t["s_add_u32"] = word_carry([](u64 a, u64 b, u64) { return a + b; });
  t["s_addc_u32"] = word_carry([](u64 a, u64 b, u64 c) { return a + b + c; });
  // if the difference is negative, bit 32 and all higher bits are set
  t["s_sub_u32"] = word_carry([](u64 a, u64 b, u64) { return a - b; });
  t["s_subb_u32"] = word_carry([](u64 a, u64 b, u64 c) { return a - b - c; });
  t["s_add_i32"] = word_carry([](u64 a, u64 b, u64) {
    i32 x;
    const u64 over = __builtin_add_overflow(i32(a), i32(b), &x);
    return over << 32 | u32(x);
  });
  t["s_sub_i32"] = word_carry([](u64 a, u64 b, u64) {
    i32 x;
    const u64 over = __builtin_sub_overflow(i32(a), i32(b), &x);
    return over << 32 | u32(x);
  });
  t["s_addk_i32"] = [](Wave& w, const Instruction& i) {
    i32 x;
    w.scc = __builtin_add_overflow(i32(arg(w, i, 0, 32)), i32(i16(i.operands[1].bits)), &x);
    set(w, i, u32(x), 32);
  };
  t["s_mulk_i32"] = [](Wave& w, const Instruction& i) {
    set(w, i, u32(arg(w, i, 0, 32)) * u32(i32(i16(i.operands[1].bits))), 32);
  };
  t["s_abs_i32"] = [](Wave& w, const Instruction& i) {
    const i32 a = i32(arg(w, i, 1, 32));
    const u32 x = a < 0 ? 0u - u32(a) : u32(a);
    set(w, i, x, 32);
    w.scc = x != 0;
  };
  t["s_mul_i32"] = word([](u32 a, u32 b) { return a * b; });
  t["s_mul_hi_u32"] = word([](u32 a, u32 b) { return u64(a) * b >> 32; });
  t["s_mul_hi_i32"] = word([](u32 a, u32 b) { return u64(i64(i32(a)) * i32(b)) >> 32; });
  t["s_min_i32"] =
      word_carry([](u64 a, u64 b, u64) { return u64(i32(a) < i32(b)) << 32 | u32(std::min(i32(a), i32(b))); });
  t["s_min_u32"] = word_carry([](u64 a, u64 b, u64) { return u64(a < b) << 32 | std::min(a, b); });
  t["s_max_i32"] =
      word_carry([](u64 a, u64 b, u64) { return u64(i32(a) >= i32(b)) << 32 | u32(std::max(i32(a), i32(b))); });
  t["s_max_u32"] = word_carry([](u64 a, u64 b, u64) { return u64(a >= b) << 32 | std::max(a, b); });
  t["s_lshl1_add_u32"] =
      word_carry([](u64 a, u64 b, u64) { return u64((a << 1) + b > 0xffffffff) << 32 | u32((a << 1) + b); });
  t["s_lshl2_add_u32"] =
      word_carry([](u64 a, u64 b, u64) { return u64((a << 2) + b > 0xffffffff) << 32 | u32((a << 2) + b); });
  t["s_lshl3_add_u32"] =
      word_carry([](u64 a, u64 b, u64) { return u64((a << 3) + b > 0xffffffff) << 32 | u32((a << 3) + b); });
  t["s_lshl4_add_u32"] =
      word_carry([](u64 a, u64 b, u64) { return u64((a << 4) + b > 0xffffffff) << 32 | u32((a << 4) + b); });
}

void add_control(Table& t) {
  add_compare([](i64 a, i64 b) { return a == b; }, t, "eq");
  add_compare([](i64 a, i64 b) { return a != b; }, t, "lg");
  add_compare([](i64 a, i64 b) { return a > b; }, t, "gt");
  add_compare([](i64 a, i64 b) { return a >= b; }, t, "ge");
  add_compare([](i64 a, i64 b) { return a < b; }, t, "lt");
  add_compare([](i64 a, i64 b) { return a <= b; }, t, "le");
  t["s_cmp_eq_u64"] = [](Wave& w, const Instruction& i) { w.scc = arg(w, i, 0, 64) == arg(w, i, 1, 64); };
  t["s_cmp_lg_u64"] = [](Wave& w, const Instruction& i) { w.scc = arg(w, i, 0, 64) != arg(w, i, 1, 64); };
  t["s_branch"] = branch([](const Wave&) { return true; });
  t["s_cbranch_scc0"] = branch([](const Wave& w) { return !w.scc; });
  t["s_cbranch_scc1"] = branch([](const Wave& w) { return w.scc; });
  t["s_cbranch_vccz"] = branch([](const Wave& w) { return w.vcc() == 0; });
  t["s_cbranch_vccnz"] = branch([](const Wave& w) { return w.vcc() != 0; });
  t["s_cbranch_execz"] = branch([](const Wave& w) { return w.exec() == 0; });
  t["s_cbranch_execnz"] = branch([](const Wave& w) { return w.exec() != 0; });
  t["s_endpgm"] = [](Wave& w, const Instruction&) { w.done = true; };
  t["s_barrier"] = [](Wave& w, const Instruction&) { w.waiting = true; };
  t["s_getpc_b64"] = [](Wave& w, const Instruction& i) { set(w, i, after(w, i), 64); };
  t["s_setpc_b64"] = [](Wave& w, const Instruction& i) { jump(w, arg(w, i, 0, 64)); };
  t["s_swappc_b64"] = [](Wave& w, const Instruction& i) {
    const u64 to = arg(w, i, 1, 64);
    set(w, i, after(w, i), 64);
    jump(w, to);
  };
  // Instructions for waits and caches do nothing: memory is coherent here, and an instruction ends before the next one
  // begins.
  for (const char* name : {"s_nop", "s_waitcnt", "s_waitcnt_vscnt", "s_sleep", "s_setprio", "s_clause",
                           "s_sched_barrier", "s_inst_prefetch", "buffer_wbl2", "buffer_inv", "buffer_wbinvl1",
                           "buffer_wbinvl1_vol", "buffer_invl2", "s_dcache_inv", "s_icache_inv", "v_nop"}) {
    t[name] = [](Wave&, const Instruction&) {};
  }
}

void load_scalars(Wave& w, const Instruction& i) {
  const Operand& by = i.operands[2];
  u64 address =
      arg(w, i, 1, 64) + i.offset + (by.kind == Operand::kConstant ? u64(i64(i32(by.bits))) : read_scalar(w, by, 32));
  if (address & 3) fault(w, i, "SCALAR LOAD off 4 bytes", address);
  address &= ~3ull;
  const int n = i.operands[0].num_registers;
  note_global(w, i, address, 4 * n, Access::kScalarLoad);
  u32 x[16];
  std::memcpy(x, reinterpret_cast<const void*>(address), 4 * n);
  for (int k = 0; k < n; ++k) w.s[i.operands[0].index + k] = x[k];
}

}  // namespace

void add_scalar(Table& t) {
  add_moves(t);
  add_bits(t);
  add_arithmetic(t);
  add_control(t);
  for (const char* name : {"s_load_dword", "s_load_dwordx2", "s_load_dwordx4", "s_load_dwordx8", "s_load_dwordx16"}) {
    t[name] = load_scalars;
  }
}

}  // namespace rlk::hip::isa
