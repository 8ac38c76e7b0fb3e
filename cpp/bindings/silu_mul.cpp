// Python's entry to silu_mul and gelu_mul: fields move from checked arguments to the contract's params, outputs come from
// the caller.
#include "rlk/ops/silu_mul.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "torch_state.h"

namespace rlk::bindings {
namespace {

void check_like(const RowsArgument& a, const RowsArgument& like) {
  check_same(a.array, like.array);
  if (std::ranges::equal(a.array.shape(), like.array.shape())) return;
  throw nb::value_error((std::string(a.array.name()) + ": expected shape " + shape_text(like.array.shape()) +
                         " (that of " + like.array.name() + "), got " + shape_text(a.array.shape()))
                            .c_str());
}

// gate and up, or both of them in one array, half of whose last dimension each has.
struct GateAndUp {
  RowsArgument first;
  std::optional<RowsArgument> second;
  std::int64_t columns;

  GateAndUp(nb::handle gate, nb::handle up)
      : first(gate, up.is_none() ? "gate_up" : "gate"), columns(first.columns / (up.is_none() ? 2 : 1)) {
    require_backend("silu_mul", first.view().device);
    require_columns_below(first, up.is_none() ? 31 : 30);
    if (!up.is_none()) {
      second.emplace(up, "up");
      check_like(*second, first);
    } else if (first.columns % 2 != 0) {
      throw nb::value_error(("gate_up: expected an even last dimension, whose halves are gate and up, got shape " +
                             shape_text(first.array.shape()))
                                .c_str());
    }
  }
  std::vector<std::int64_t> shape() const { return first.shape_with(columns); }
  // Where up is in an array that looks like `first`.
  template <class Byte>
  Byte* half_way(Byte* packed) const {
    return packed == nullptr ? nullptr : packed + columns * size_of(first.view().dtype);
  }

  template <class Params>
  void fill(Params* p, int activation, bool round_before_mul) const {
    p->gate = first.view().data;
    p->gate_rows = first.rows;
    p->up = second ? second->view().data : half_way(static_cast<const unsigned char*>(p->gate));
    p->up_rows = second ? second->rows : first.rows;
    p->num_rows = first.num_rows;
    p->columns = columns;
    p->dtype = first.view().dtype;
    p->activation = static_cast<Activation>(activation);
    p->round_before_mul = round_before_mul;
  }
};

nb::object forward(nb::handle gate, nb::handle up, int activation, bool round_before_mul, nb::handle allocate,
                   std::uintptr_t stream) {
  const GateAndUp in(gate, up);
  const Device device = in.first.view().device;
  GatedMulParams p;
  in.fill(&p, activation, round_before_mul);
  const Caller caller = make_caller(gate, device, allocate, stream);
  Caller::Fresh y = caller.empty(in.shape(), p.dtype);
  p.y = y.data;
  p.y_rows = contiguous_rows(p.num_rows, p.columns);
  {
    const ReleasedGil released;
    gated_mul(p, device, caller.stream);
  }
  return y.array;
}

// An eager call on plain CUDA tensors without gradient: what a decode step costs on the host. NotImplemented sends every
// other call the general way.
nb::object eager(nb::handle gate, nb::handle up, int activation, bool round_before_mul) {
  if (!may_bypass_dispatcher({gate, up})) return nb::borrow(Py_NotImplemented);
  return forward(gate, up, activation, round_before_mul, nb::none(), 0);
}

// d_gate_up, or (d_gate or None, d_up or None).
nb::object backward(nb::handle dy, nb::handle gate, nb::handle up, int activation, bool round_before_mul,
                    bool return_d_gate, bool return_d_up, nb::handle allocate, std::uintptr_t stream) {
  const GateAndUp in(gate, up);
  const RowsArgument g(dy, "dy");
  check_same(g.array, in.first.array);
  const std::vector<std::int64_t> shape = in.shape();
  if (!std::ranges::equal(g.array.shape(), shape)) {
    throw nb::value_error(
        ("dy: expected shape " + shape_text(shape) + " (that of the result), got " + shape_text(g.array.shape()))
            .c_str());
  }
  const Device device = in.first.view().device;
  GatedMulBackwardParams p;
  in.fill(&p, activation, round_before_mul);
  p.dy = g.view().data;
  p.dy_rows = g.rows;
  const Caller caller = make_caller(gate, device, allocate, stream);
  nb::object first = nb::none(), second = nb::none();
  p.d_gate_rows = p.d_up_rows = contiguous_rows(p.num_rows, in.first.columns);
  if (!in.second) {
    Caller::Fresh fresh = caller.empty(in.first.array.shape(), p.dtype);
    p.d_gate = fresh.data;
    p.d_up = in.half_way(static_cast<unsigned char*>(fresh.data));
    first = std::move(fresh.array);
  } else {
    const auto make = [&](bool wanted, void** data, nb::object* array) {
      if (!wanted) return;
      Caller::Fresh fresh = caller.empty(shape, p.dtype);
      *data = fresh.data;
      *array = std::move(fresh.array);
    };
    make(return_d_gate, &p.d_gate, &first);
    make(return_d_up, &p.d_up, &second);
  }
  {
    const ReleasedGil released;
    gated_mul_backward(p, device, caller.stream);
  }
  return in.second ? nb::object(nb::make_tuple(first, second)) : first;
}

}  // namespace

void bind_silu_mul(nb::module_& m) {
  define(m, "gated_mul", &forward);
  define(m, "gated_mul_eager", &eager);
  define(m, "gated_mul_backward", &backward);
}

}  // namespace rlk::bindings
