// Python's entry to silu_mul and gelu_mul.
#include "rlk/ops/silu_mul.h"

#include <optional>

#include "call.h"
#include "linear_args.h"

namespace rlk::bindings {
namespace {

// gate and up in two arrays, or in one array whose last dimension holds gate, then up.
struct GateAndUp {
  RowsArgument first;
  std::optional<RowsArgument> second;
  std::int64_t columns;

  GateAndUp(Frame* frame, nb::handle gate, nb::handle up)
      : first(frame, gate, up.is_none() ? "gate_up" : "gate"), columns(first.columns / (up.is_none() ? 2 : 1)) {
    require_columns_below(first, up.is_none() ? 31 : 30);
    if (!up.is_none()) {
      second.emplace(frame, up, "up");
      check_like(*second, first);
    } else {
      require(first.columns % 2 == 0, first.array, "an even last dimension, whose halves are gate and up, got shape ",
              first.array.shape());
    }
  }
  Sizes shape() const { return shape_with(first.leading(), columns); }
  // The start of up in a packed array that has the shape and dtype of `first`; null stays null.
  template <class Byte>
  Byte* half_way(Byte* packed) const {
    return packed == nullptr ? nullptr : packed + columns * size_of(first.view().dtype);
  }

  template <class Params>
  void fill(Params* p, int activation, bool round_before_mul) const {
    first.lead(&p->gate, &p->gate_rows, p);
    p->up = second ? second->view().data : half_way(static_cast<const unsigned char*>(p->gate));
    p->up_rows = second ? second->rows : first.rows;
    p->columns = columns;
    p->activation = static_cast<Activation>(activation);
    p->round_before_mul = round_before_mul;
  }
};

nb::object forward(Frame* frame, nb::handle gate, nb::handle up, int activation, bool round_before_mul) {
  const GateAndUp in(frame, gate, up);
  GatedMulParams p;
  in.fill(&p, activation, round_before_mul);
  p.y_rows = contiguous_rows(p.num_rows, p.columns);
  return Results("silu_mul", in.first.array, frame).add(&p.y, in.shape(), p.dtype).run(gated_mul, p);
}

// Returns d_gate_up for a packed array, else (d_gate or None, d_up or None).
nb::object backward(Frame* frame, nb::handle dy, nb::handle gate, nb::handle up, int activation, bool round_before_mul,
                    bool return_d_gate, bool return_d_up) {
  const GateAndUp in(frame, gate, up);
  const RowsArgument g(frame, dy, "dy");
  check_same(g.array, in.first.array);
  const Sizes shape = in.shape();
  check_shape(g.array, shape, "the result");
  GatedMulBackwardParams p;
  in.fill(&p, activation, round_before_mul);
  g.put(&p.dy, &p.dy_rows);
  p.d_gate_rows = p.d_up_rows = contiguous_rows(p.num_rows, in.first.columns);
  Results results("silu_mul", in.first.array, frame);
  if (in.second) {
    results.add(&p.d_gate, shape, p.dtype, return_d_gate).add(&p.d_up, shape, p.dtype, return_d_up);
  } else {
    results.add(&p.d_gate, in.first.array.shape(), p.dtype);
    p.d_up = in.half_way(static_cast<unsigned char*>(p.d_gate));
  }
  return results.run(gated_mul_backward, p);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "gated_mul", &forward);
  define_eager<&forward, 2>(m, "gated_mul_eager");
  define(m, "gated_mul_backward", &backward);
});

}  // namespace
}  // namespace rlk::bindings
