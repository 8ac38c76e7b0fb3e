// Inner loops of silu_mul, compiled once per instruction set.
#include "silu_mul_simd.h"

#include "simd.h"
#include "simd_memory.h"
// After simd.h, which decides how the functions of math/ are compiled.
#include "rlk/kernels/silu_mul_activation.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

template <class F>
RLK_HD void with_type_and_activation(const GatedMulPiece& piece, const F& f) {
  with_type(piece.dtype, [&](auto t) { with_activation(piece.activation, [&](auto a) { f(t, a); }); });
}

void forward(const GatedMulPiece& piece) {
  with_type_and_activation(piece, [&](auto t, auto a) {
    using T = decltype(t);
    for_each_vector(piece.columns, [&](std::int64_t k, int count) {
      Floats b = activated<decltype(a)::value, false>(load_at<T>(piece.gate, k, count)).value;
      if (piece.round_before_mul) b = rounded<T>(b);
      store_at<T>(piece.y, k, count, mul_rn(b, load_at<T>(piece.up, k, count)));
    });
  });
}

void backward(const GatedMulPiece& piece) {
  with_type_and_activation(piece, [&](auto t, auto a) {
    using T = decltype(t);
    for_each_vector(piece.columns, [&](std::int64_t k, int count) {
      const Activated<Floats> r = activated<decltype(a)::value, true>(load_at<T>(piece.gate, k, count));
      const Floats dy = load_at<T>(piece.dy, k, count), u = load_at<T>(piece.up, k, count);
      if (piece.d_gate != nullptr) store_at<T>(piece.d_gate, k, count, mul_rn(mul_rn(dy, u), r.slope));
      const Floats b = piece.round_before_mul ? rounded<T>(r.value) : r.value;
      if (piece.d_up != nullptr) store_at<T>(piece.d_up, k, count, mul_rn(dy, b));
    });
  });
}

}  // namespace

const SiluMulLanes silu_mul_simd = {forward, backward};

}  // namespace rlk::cpu::RLK_CPU_ISA
