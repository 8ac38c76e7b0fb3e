// THE CONTRACT of `silu_mul` and `gelu_mul`: y = act(gate) * up, and its gradients.
// Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they show;
// sigmoid, erf, tanh and exp are defined in docs/math.md.
//
// For an element g of `gate` and an element u of `up`:
//   m = -88 where g < -88, else g
//   silu     : s = sigmoid(g)
//              a = fl(m * s)
//   gelu     : w = fl(1 + erf(fl(g * kSqrtHalf)))
//              a = fl(fl(0.5 * m) * w)
//   gelu_tanh: t = tanh(fl(kSqrtTwoOverPi * fma(fl(kGeluCubic * fl(g * g)), g, g)));  w = fl(1 + t)
//              a = fl(fl(0.5 * m) * w)
//   b = a, or, with round_before_mul, a rounded to dtype
//   y = round(fl(b * u)) to dtype, nearest even
// Backward, from dy, with c = g limited to [-88, 88]:
//   silu     : a' = fl(s * fma(c, fl(1 - s), 1))
//   gelu     : a' = fma(c, fl(kInvSqrtTwoPi * exp(fl(-0.5 * fl(c * c)))), fl(0.5 * w))
//   gelu_tanh: a' = fma(fl(fl(0.5 * c) * fma(-t, t, 1)),
//                  fl(kSqrtTwoOverPi * fma(kGeluCubicTimes3, fl(c * c), 1)), fl(0.5 * w))
//   d_gate = round(fl(fl(dy * u) * a'));  d_up = round(fl(dy * b)); to dtype.
// The derivative of a rounding is taken as 1, so only d_up uses the rounded b.
// With the limits of +-88, an infinite g gives the limit value of each function: act(-Inf) = -0, act(+Inf) = +Inf;
// a'(-Inf) is a zero, a'(+Inf) = 1. The limits change no result of a finite g: sigmoid is +0 below -0x1.5d589ep+6, so
// silu is -0 there, and gelu is -0 below about -5.5.
// An infinity of one array times a zero of the other is NaN, as in IEEE. Every NaN result is the canonical NaN. An
// element has the same bits in any number of rows, at any position and stride, and on every backend. All functions
// enqueue their work on `stream`; they neither allocate nor synchronise. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

constexpr float kSqrtHalf = 0x1.6a09e6p-1f;         // fl32(1 / sqrt 2)
constexpr float kSqrtTwoOverPi = 0x1.988454p-1f;    // fl32(sqrt(2 / pi))
constexpr float kInvSqrtTwoPi = 0x1.988454p-2f;     // fl32(1 / sqrt(2 pi)), half of kSqrtTwoOverPi
constexpr float kGeluCubic = 0x1.6e4e26p-5f;        // fl32(0.044715)
constexpr float kGeluCubicTimes3 = 0x1.12ba9ep-3f;  // fl32(3 * 0.044715)
constexpr float kGateLimit = 88.0f;

enum class Activation : std::uint8_t { kSilu, kGelu, kGeluTanh };

// Matrices may have any row layout; columns are contiguous. A packed matrix [num_rows, 2 * columns] holds `gate` in the
// first `columns` columns and `up` in the rest. An output may be an input of the same layout (in place).
struct GatedMulParams {
  const void* gate = nullptr;  // [num_rows, columns], dtype
  const void* up = nullptr;    // [num_rows, columns], dtype
  void* y = nullptr;           // [num_rows, columns], dtype
  RowLayout gate_rows, up_rows, y_rows;
  std::int64_t num_rows = 0, columns = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16, kFloat32
  Activation activation = Activation::kSilu;
  bool round_before_mul = false;
};
void gated_mul(const GatedMulParams& p, Device device, Stream stream);

struct GatedMulBackwardParams {
  const void* dy = nullptr;    // [num_rows, columns], dtype
  const void* gate = nullptr;  // [num_rows, columns], dtype
  const void* up = nullptr;    // [num_rows, columns], dtype
  void* d_gate = nullptr;      // [num_rows, columns], dtype, or null: not wanted
  void* d_up = nullptr;        // [num_rows, columns], dtype, or null: not wanted
  RowLayout dy_rows, gate_rows, up_rows, d_gate_rows, d_up_rows;
  std::int64_t num_rows = 0, columns = 0;
  DType dtype = DType::kBFloat16;
  Activation activation = Activation::kSilu;
  bool round_before_mul = false;
};
void gated_mul_backward(const GatedMulBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
