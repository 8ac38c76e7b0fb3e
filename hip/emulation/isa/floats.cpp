// Vector instructions on floats. Denormals are kept, as in the kernels' float mode. A NaN result is the first NaN
// operand, made quiet. If no operand is a NaN, the result is 0x7fc00000.
#include <algorithm>
#include <limits>

#include "operands.h"

namespace rlk::hip::isa {
namespace {

bool is_nan(u32 x) { return (x & 0x7fffffff) > 0x7f800000; }
bool is_signalling(u32 x) { return is_nan(x) && !(x & 0x400000); }
u32 quiet(u32 x) { return x | 0x400000; }
int exponent(u32 x) { return int(x >> 23 & 255); }

u32 result(float x, u32 a) {
  if (!is_nan(as_bits(x))) return as_bits(x);
  return is_nan(a) ? quiet(a) : 0x7fc00000;
}
u32 result(float x, u32 a, u32 b) { return is_nan(a) ? result(x, a) : result(x, b); }
u32 result(float x, u32 a, u32 b, u32 c) { return is_nan(a) ? result(x, a) : result(x, b, c); }

u32 finished(const Instruction& i, u32 x) {
  if (i.output_factor == 1 && !i.clamp) return x;
  float f = as_float(x) * i.output_factor;
  if (i.clamp) f = std::isnan(f) || f < 0 ? 0.0f : std::min(f, 1.0f);
  return as_bits(f);
}

// The maximum and minimum of two operands. -0 is less than +0. If one operand is a quiet NaN, the result is the other
// operand.
u32 larger(u32 a, u32 b) {
  if (is_signalling(a) || is_signalling(b)) return quiet(is_signalling(a) ? a : b);
  if (is_nan(a) || is_nan(b)) return is_nan(a) ? b : a;
  if (as_float(a) == 0 && as_float(b) == 0) return a & b;
  return as_float(a) >= as_float(b) ? a : b;
}
u32 smaller(u32 a, u32 b) {
  if (is_signalling(a) || is_signalling(b)) return quiet(is_signalling(a) ? a : b);
  if (is_nan(a) || is_nan(b)) return is_nan(a) ? b : a;
  if (as_float(a) == 0 && as_float(b) == 0) return a | b;
  return as_float(a) < as_float(b) ? a : b;
}

u32 fused(u32 a, u32 b, u32 c) { return result(std::fmaf(as_float(a), as_float(b), as_float(c)), a, b, c); }
u32 flushed(u32 x) { return exponent(x) ? x : x & 0x80000000; }
u32 unfused(u32 a, u32 b, u32 c) {  // v_mad_f32 and similar instructions round twice, and treat denormals as zeros
  a = flushed(a), b = flushed(b), c = flushed(c);
  const u32 product = flushed(as_bits(as_float(a) * as_float(b)));
  return flushed(result(as_float(product) + as_float(c), a, b, c));
}

// Approximate results are off by at most one ulp. For one input in eight, the result is the float on the other side of
// the exact value. With RLK_ISA_ULPS = 0 all results are rounded correctly.
u32 approximated(double exact, u32 input) {
  static const bool exactly = setting("RLK_ISA_ULPS", "1") == "0";
  const float x = float(exact);
  if (exactly || !std::isfinite(x) || double(x) == exact || std::fabs(x) < 0x1p-125f || (input * 2654435761u) >> 29) {
    return as_bits(x);
  }
  return (exact > x) == (x > 0) ? as_bits(x) + 1 : as_bits(x) - 1;
}

template <class T>
T saturated(double x) {
  if (std::isnan(x)) return 0;
  x = std::trunc(x);
  if (x <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= double(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(x);
}

// The next functions are the three instructions of a division, as AMD's description of the instruction set defines
// them. The description leaves one case open, in which 1/d is denormal but n/d is not. In that case this function
// scales the divisor by 2^-64.
u32 division_scaled(u32 value, u32 divisor, u32 dividend, bool& scaled) {
  const float d = as_float(divisor), n = as_float(dividend);
  const auto by = [&](int e) { return as_bits(std::ldexp(as_float(value), e)); };
  scaled = false;
  if (n == 0 || d == 0) return 0x7fc00000;
  if (exponent(dividend) - exponent(divisor) >= 96) {
    scaled = true;
    return value == divisor ? by(64) : value;
  }
  if (std::fabs(d) < 0x1p-126f) return by(64);
  const bool small_inverse = std::fabs(1.0 / double(d)) < 0x1p-126, small_quotient = std::fabs(n / d) < 0x1p-126f;
  if (small_inverse && small_quotient) {
    scaled = true;
    return value == divisor ? by(-64) : value;
  }
  if (small_inverse) return by(-64);
  if (small_quotient) {
    scaled = true;
    return value == dividend ? by(64) : value;
  }
  return exponent(dividend) <= 23 ? by(64) : value;
}
u32 division_fixed(u32 quotient, u32 divisor, u32 dividend) {
  const u32 sign = (divisor ^ dividend) & 0x80000000u;
  const float d = as_float(divisor), n = as_float(dividend);
  if (is_nan(dividend)) return quiet(dividend);
  if (is_nan(divisor)) return quiet(divisor);
  if ((d == 0 && n == 0) || (std::isinf(d) && std::isinf(n))) return 0xffc00000;
  if (d == 0 || std::isinf(n)) return sign | 0x7f800000;
  if (std::isinf(d) || n == 0) return sign;
  if (exponent(dividend) - exponent(divisor) < -150) return sign;
  // if a quotient overflows, its refinement gives a NaN; the result is then infinite
  if (is_nan(quotient)) return sign | 0x7f800000;
  return sign | (quotient & 0x7fffffff);
}

template <class F>
Function float1(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own, x;
    const u32* a = read_floats(w, i.operands[1], own);
    for (int l = 0; l < kLanes; ++l) x[l] = finished(i, F{}(a[l]));
    write_result(w, i, x);
  };
}
template <class F>
Function float2(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2], x;
    const u32 *a = read_floats(w, i.operands[1], own[0]), *b = read_floats(w, i.operands[2], own[1]);
    for (int l = 0; l < kLanes; ++l) x[l] = finished(i, F{}(a[l], b[l]));
    write_result(w, i, x);
  };
}
// An operation with three operands. `third` is the index of the last operand, or 0 if that is the destination.
template <int third = 3, class F>
Function float3(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own[3], x;
    const u32 *a = read_floats(w, i.operands[1], own[0]), *b = read_floats(w, i.operands[2], own[1]);
    const u32* c = read_floats(w, i.operands[third], own[2]);
    for (int l = 0; l < kLanes; ++l) x[l] = finished(i, F{}(a[l], b[l], c[l]));
    write_result(w, i, x);
  };
}

// v_pk_*_f32 computes two results from two registers of each operand. Modifiers select the register that a result uses.
template <int count, class F>
Function packed(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> x[2];
    for (int half = 0; half < 2; ++half) {
      Lanes<u32> from[3] = {};
      for (int k = 0; k < count; ++k) {
        const Operand& o = i.operands[1 + k];
        const int at = half ? i.op_sel_hi[k] : i.op_sel[k];
        const u32 flip = (half ? i.neg_hi[k] : i.neg_lo[k]) ? 0x80000000u : 0;
        for (int l = 0; l < kLanes; ++l) {
          from[k][l] = flip ^ (o.kind == Operand::kVector   ? w.v[o.index + at][l]
                               : o.kind == Operand::kScalar ? w.s[o.index + at]
                               : at                         ? 0
                                                            : u32(read_scalar(w, o, 32, true)));
        }
        if (o.kind == Operand::kConstant && at && (o.is_float || o.bits)) fault(w, i, "high half of a constant");
      }
      for (int l = 0; l < kLanes; ++l) x[half][l] = finished(i, F{}(from[0][l], from[1][l], from[2][l]));
    }
    write_register(w, i.operands[0].index, x[0].data());
    write_register(w, i.operands[0].index + 1, x[1].data());
  };
}

void add_arithmetic(Table& t) {
  t["v_add_f32"] = float2([](u32 a, u32 b) { return result(as_float(a) + as_float(b), a, b); });
  t["v_sub_f32"] = float2([](u32 a, u32 b) { return result(as_float(a) - as_float(b), a, b); });
  t["v_subrev_f32"] = float2([](u32 a, u32 b) { return result(as_float(b) - as_float(a), a, b); });
  t["v_mul_f32"] = float2([](u32 a, u32 b) { return result(as_float(a) * as_float(b), a, b); });
  t["v_max_f32"] = float2([](u32 a, u32 b) { return larger(a, b); });
  t["v_min_f32"] = float2([](u32 a, u32 b) { return smaller(a, b); });
  t["v_max3_f32"] = float3([](u32 a, u32 b, u32 c) { return larger(larger(a, b), c); });
  t["v_min3_f32"] = float3([](u32 a, u32 b, u32 c) { return smaller(smaller(a, b), c); });
  t["v_med3_f32"] = float3([](u32 a, u32 b, u32 c) {
    if (is_nan(a) || is_nan(b) || is_nan(c)) return smaller(smaller(a, b), c);
    return larger(smaller(a, b), smaller(larger(a, b), c));
  });
  for (const char* name : {"v_fma_f32", "v_fmaak_f32", "v_fmamk_f32"}) {
    t[name] = float3([](u32 a, u32 b, u32 c) { return fused(a, b, c); });
  }
  for (const char* name : {"v_mad_f32", "v_madak_f32", "v_madmk_f32"}) {
    t[name] = float3([](u32 a, u32 b, u32 c) { return unfused(a, b, c); });
  }
  t["v_fmac_f32"] = float3<0>([](u32 a, u32 b, u32 c) { return fused(a, b, c); });
  t["v_mac_f32"] = float3<0>([](u32 a, u32 b, u32 c) { return unfused(a, b, c); });
  t["v_pk_fma_f32"] = packed<3>([](u32 a, u32 b, u32 c) { return fused(a, b, c); });
  t["v_pk_mul_f32"] = packed<2>([](u32 a, u32 b, u32) { return result(as_float(a) * as_float(b), a, b); });
  t["v_pk_add_f32"] = packed<2>([](u32 a, u32 b, u32) { return result(as_float(a) + as_float(b), a, b); });
  t["v_pk_mov_b32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> x[2];
    for (int k = 0; k < 2; ++k) {
      const Operand& o = i.operands[1 + k];
      for (int l = 0; l < kLanes; ++l) {
        x[k][l] = o.kind == Operand::kVector   ? w.v[o.index + i.op_sel[k]][l]
                  : o.kind == Operand::kScalar ? w.s[o.index + i.op_sel[k]]
                                               : u32(read_scalar(w, o, 32, true));
      }
    }
    write_register(w, i.operands[0].index, x[0].data());
    write_register(w, i.operands[0].index + 1, x[1].data());
  };
}

void add_functions(Table& t) {
  for (const char* name : {"v_rcp_f32", "v_rcp_iflag_f32"}) {
    t[name] = float1([](u32 a) { return is_nan(a) ? quiet(a) : approximated(1.0 / double(as_float(a)), a); });
  }
  t["v_sqrt_f32"] = float1([](u32 a) {
    return is_nan(a) ? quiet(a) : as_float(a) < 0 ? 0x7fc00000 : approximated(std::sqrt(double(as_float(a))), a);
  });
  t["v_rsq_f32"] = float1([](u32 a) {
    return is_nan(a) ? quiet(a) : as_float(a) < 0 ? 0x7fc00000 : approximated(1.0 / std::sqrt(double(as_float(a))), a);
  });
  t["v_exp_f32"] = float1([](u32 a) { return is_nan(a) ? quiet(a) : approximated(std::exp2(double(as_float(a))), a); });
  t["v_log_f32"] = float1([](u32 a) {
    return is_nan(a) ? quiet(a) : as_float(a) < 0 ? 0x7fc00000 : approximated(std::log2(double(as_float(a))), a);
  });
  t["v_trunc_f32"] = float1([](u32 a) { return result(std::trunc(as_float(a)), a); });
  t["v_floor_f32"] = float1([](u32 a) { return result(std::floor(as_float(a)), a); });
  t["v_ceil_f32"] = float1([](u32 a) { return result(std::ceil(as_float(a)), a); });
  t["v_rndne_f32"] = float1([](u32 a) { return result(std::nearbyint(as_float(a)), a); });
  t["v_ldexp_f32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own[2], x;
    const u32 *a = read_floats(w, i.operands[1], own[0]), *b = read_bits(w, i.operands[2], own[1]);
    for (int l = 0; l < kLanes; ++l) {
      x[l] = finished(i, result(std::ldexp(as_float(a[l]), std::clamp(i32(b[l]), -1000, 1000)), a[l]));
    }
    write_result(w, i, x);
  };
  t["v_div_fixup_f32"] = float3([](u32 a, u32 b, u32 c) { return division_fixed(a, b, c); });
  // The result is rounded once, because the sum is scaled before it is rounded.
  t["v_div_fmas_f32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own[3], x;
    const u32 *a = read_floats(w, i.operands[1], own[0]), *b = read_floats(w, i.operands[2], own[1]);
    const u32* c = read_floats(w, i.operands[3], own[2]);
    for (int l = 0; l < kLanes; ++l) {
      if (!(w.vcc() >> l & 1)) {
        x[l] = fused(a[l], b[l], c[l]);
        continue;
      }
      const double sum = std::fma(double(as_float(a[l])), double(as_float(b[l])), double(as_float(c[l])));
      x[l] = result(float(sum * (exponent(c[l]) > 127 ? 0x1p64 : 0x1p-64)), a[l], b[l], c[l]);
    }
    write_result(w, i, x);
  };
  t["v_div_scale_f32"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own[3], x;
    const u32 *a = read_floats(w, i.operands[2], own[0]), *b = read_floats(w, i.operands[3], own[1]);
    const u32* c = read_floats(w, i.operands[4], own[2]);
    u64 mask = 0;
    for (int l = 0; l < kLanes; ++l) {
      bool scaled;
      x[l] = division_scaled(a[l], b[l], c[l], scaled);
      mask |= u64(scaled) << l;
    }
    mask &= w.exec();
    write_result(w, i, x);
    write_mask(w, i.operands[1], mask);
  };
}

void add_conversions(Table& t) {
  t["v_cvt_u32_f32"] = float1([](u32 a) { return saturated<u32>(as_float(a)); });
  t["v_cvt_i32_f32"] = float1([](u32 a) { return u32(saturated<i32>(as_float(a))); });
  t["v_cvt_f16_f32"] = float1([](u32 a) {
    return is_nan(a) ? (a >> 16 & 0x8000) | 0x7e00 | (a >> 13 & 0x1ff) : u32(float_to_half(as_float(a)));
  });
  t["v_cvt_f32_f16"] = [](Wave& w, const Instruction& i) {
    Lanes<u32> own, x;
    const Operand& o = i.operands[1];
    const u32* a = read_bits(w, o, own, 16);
    for (int l = 0; l < kLanes; ++l) {
      const u16 half = u16((a[l] & (o.absolute ? 0x7fff : 0xffff)) ^ (o.negate ? 0x8000 : 0));
      x[l] = finished(i, as_bits(half_to_float(half)));
    }
    write_result(w, i, x);
  };
  t["v_cvt_f32_u32"] = int1([](u32 a) { return as_bits(float(a)); });
  t["v_cvt_f32_i32"] = int1([](u32 a) { return as_bits(float(i32(a))); });
  t["v_cvt_f32_ubyte0"] = int1([](u32 a) { return as_bits(float(a & 255)); });
  t["v_cvt_f32_ubyte1"] = int1([](u32 a) { return as_bits(float(a >> 8 & 255)); });
  t["v_cvt_f32_ubyte2"] = int1([](u32 a) { return as_bits(float(a >> 16 & 255)); });
  t["v_cvt_f32_ubyte3"] = int1([](u32 a) { return as_bits(float(a >> 24)); });
}

double as_double(u64 x) { return std::bit_cast<double>(x); }
template <class F>
Function double1(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u64> a = read_pairs(w, i.operands[1], true);
    for (u64& x : a) x = std::bit_cast<u64>(F{}(as_double(x)));
    write_pairs(w, i.operands[0], a);
  };
}
template <class F>
Function double2(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u64> a = read_pairs(w, i.operands[1], true);
    const Lanes<u64> b = read_pairs(w, i.operands[2], true);
    for (int l = 0; l < kLanes; ++l) a[l] = std::bit_cast<u64>(F{}(as_double(a[l]), as_double(b[l])));
    write_pairs(w, i.operands[0], a);
  };
}
template <int third>
void double_fused(Wave& w, const Instruction& i) {
  Lanes<u64> a = read_pairs(w, i.operands[1], true);
  const Lanes<u64> b = read_pairs(w, i.operands[2], true), c = read_pairs(w, i.operands[third], true);
  for (int l = 0; l < kLanes; ++l)
    a[l] = std::bit_cast<u64>(std::fma(as_double(a[l]), as_double(b[l]), as_double(c[l])));
  write_pairs(w, i.operands[0], a);
}
template <class F>
Function from_double(F) {
  return [](Wave& w, const Instruction& i) {
    const Lanes<u64> a = read_pairs(w, i.operands[1], true);
    Lanes<u32> x;
    for (int l = 0; l < kLanes; ++l) x[l] = F{}(as_double(a[l]));
    write_result(w, i, x);
  };
}
template <class F>
Function to_double(F) {
  return [](Wave& w, const Instruction& i) {
    Lanes<u32> own;
    Lanes<u64> x;
    const u32* a = read_floats(w, i.operands[1], own);
    for (int l = 0; l < kLanes; ++l) x[l] = std::bit_cast<u64>(double(F{}(a[l])));
    write_pairs(w, i.operands[0], x);
  };
}

}  // namespace

void add_floats(Table& t) {
  add_arithmetic(t);
  add_functions(t);
  add_conversions(t);
}

void add_doubles(Table& t) {
  t["v_add_f64"] = double2([](double a, double b) { return a + b; });
  t["v_mul_f64"] = double2([](double a, double b) { return a * b; });
  t["v_max_f64"] = double2([](double a, double b) { return std::fmax(a, b); });
  t["v_min_f64"] = double2([](double a, double b) { return std::fmin(a, b); });
  t["v_fma_f64"] = double_fused<3>;
  t["v_fmac_f64"] = double_fused<0>;
  t["v_trunc_f64"] = double1([](double a) { return std::trunc(a); });
  t["v_floor_f64"] = double1([](double a) { return std::floor(a); });
  t["v_ceil_f64"] = double1([](double a) { return std::ceil(a); });
  t["v_rndne_f64"] = double1([](double a) { return std::nearbyint(a); });
  t["v_ldexp_f64"] = [](Wave& w, const Instruction& i) {
    Lanes<u64> a = read_pairs(w, i.operands[1], true);
    Lanes<u32> own;
    const u32* b = read_bits(w, i.operands[2], own);
    for (int l = 0; l < kLanes; ++l) {
      a[l] = std::bit_cast<u64>(std::ldexp(as_double(a[l]), std::clamp(i32(b[l]), -5000, 5000)));
    }
    write_pairs(w, i.operands[0], a);
  };
  t["v_cvt_u32_f64"] = from_double([](double x) { return saturated<u32>(x); });
  t["v_cvt_i32_f64"] = from_double([](double x) { return u32(saturated<i32>(x)); });
  t["v_cvt_f32_f64"] = from_double([](double x) { return as_bits(float(x)); });
  t["v_cvt_f64_u32"] = to_double([](u32 a) { return a; });
  t["v_cvt_f64_i32"] = to_double([](u32 a) { return i32(a); });
  t["v_cvt_f64_f32"] = to_double([](u32 a) { return as_float(a); });
}

}  // namespace rlk::hip::isa
