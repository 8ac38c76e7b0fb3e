// Python's entry to logprob: fields move from checked arguments to the contract's params, outputs come from the caller.
#include <algorithm>
#include <vector>

#include "define.h"
#include "gil.h"
#include "logprob_outputs.h"
#include "module.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

nb::object forward(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                   nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                   nb::handle kept_ids, nb::handle kept_offsets, int exp, int returns, nb::handle out,
                   nb::handle allocate, std::uintptr_t stream) {
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          kept_ids, kept_offsets, nb::none(), nb::none(), exp});
  const Caller caller = make_caller(logits, call.device(), allocate, stream);
  const Outputs outputs(call, caller, returns, out);
  LogprobParams p{call.input()};
  outputs.point(&p);
  const nb::object workspace = take_workspace(caller, logprob_workspace_bytes(p, caller.device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::logprob(p, call.device(), caller.stream);
  }
  return outputs.result(returns);
}

// An eager call on a plain CUDA tensor without gradient, kept set or given outputs: what a decode step costs on the
// host. NotImplemented sends every other call the general way.
nb::object eager(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                 nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                 nb::handle exp, int returns) {
  if (!may_bypass_dispatcher({logits})) return nb::borrow(Py_NotImplemented);
  int mode = 1;
  if (!exp.is_none()) {
    const bool portable = PyUnicode_Check(exp.ptr()) && PyUnicode_CompareWithASCIIString(exp.ptr(), "portable") == 0;
    if (!portable) return nb::borrow(Py_NotImplemented);
    mode = 0;
  }
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          nb::none(), nb::none(), nb::none(), nb::none(), mode});
  if (call.device().type != DeviceType::kCuda) return nb::borrow(Py_NotImplemented);
  const Caller caller = make_caller(logits, call.device(), nb::none(), 0);
  const Outputs outputs(call, caller, returns, nb::none());
  LogprobParams p{call.input()};
  outputs.point(&p);
  const nb::object workspace = take_workspace(caller, logprob_workspace_bytes(p, caller.device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::logprob(p, call.device(), caller.stream);
  }
  return outputs.result(returns);
}

nb::object partial(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                   nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                   nb::handle kept_ids, nb::handle kept_offsets, int exp, nb::handle vocab_start, nb::handle vocab_size,
                   nb::handle allocate, std::uintptr_t stream) {
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          kept_ids, kept_offsets, vocab_start, vocab_size, exp});
  const Caller caller = make_caller(logits, call.device(), allocate, stream);
  std::vector<std::int64_t> shape(call.rows_shape().begin(), call.rows_shape().end());
  shape.push_back(kStatsFields);
  const Caller::Fresh stats = caller.empty(shape, DType::kFloat32);
  LogprobParams p{call.input()};
  p.stats = static_cast<float*>(stats.data);
  const nb::object workspace = take_workspace(caller, logprob_workspace_bytes(p, caller.device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::logprob(p, call.device(), caller.stream);
  }
  return stats.array;
}

// stats: [num_shards, ..., 5].
nb::object merge(nb::handle stats, nb::handle temperature, int returns, nb::handle allocate, std::uintptr_t stream) {
  const Array s(stats, "stats", "float32");
  const TensorView& v = s.view();
  if (v.dtype != DType::kFloat32)
    throw nb::type_error((std::string("stats: expected dtype float32, got ") + name_of(v.dtype)).c_str());
  const std::string got = shape_text(s.shape());
  if (v.ndim < 2 || v.shape[v.ndim - 1] != kStatsFields || !v.is_contiguous()) {
    throw nb::value_error(("stats: expected a contiguous array of shape [shards, ..., 5], got " + got).c_str());
  }
  const std::int64_t shards = v.shape[0];
  if (shards != 1 && shards != 2 && shards != 4 && shards != 8) {
    throw nb::value_error(("stats: expected 1, 2, 4 or 8 shards (first dimension), got " + got).c_str());
  }
  const std::span<const std::int64_t> rows = s.shape().subspan(1, v.ndim - 2);
  LogprobMergeParams p;
  p.stats = static_cast<const float*>(v.data);
  p.num_shards = static_cast<std::int32_t>(shards);
  p.num_rows = v.num_elements() / shards / kStatsFields;
  std::optional<Array> t;
  if (PyCapsule_CheckExact(temperature.ptr()) || exchange_api(temperature)) {
    t.emplace(temperature, "temperature", "float32");
    if (t->view().dtype != DType::kFloat32) {
      throw nb::type_error(
          (std::string("temperature: expected dtype float32, got ") + name_of(t->view().dtype)).c_str());
    }
    if (!(t->view().device == v.device)) {
      throw nb::value_error(
          ("temperature: expected device " + name_of(v.device) + " (that of stats), got " + name_of(t->view().device))
              .c_str());
    }
    if (!std::ranges::equal(t->shape(), rows) || !t->view().is_contiguous()) {
      throw nb::value_error(("temperature: expected a contiguous array of shape " + shape_text(rows)).c_str());
    }
    p.temperature = static_cast<const float*>(t->view().data);
  } else {
    p.temperature_value = read_temperature_value(temperature);
  }
  require_backend("logprob", v.device);
  const Caller caller = make_caller(stats, v.device, allocate, stream);
  const Outputs outputs(rows, caller, returns);
  outputs.point(&p);
  {
    const ReleasedGil released;
    rlk::logprob_merge(p, v.device, caller.stream);
  }
  return outputs.result(returns);
}

// Layout of a given dlogits; raises where it does not fit logits, overlaps itself, or overlaps logits without being them.
RowLayout gradient_layout(const Array& out, const Array& logits) {
  const TensorView& v = out.view();
  const TensorView& x = logits.view();
  const auto refuse = [](const std::string& message) { value_error("out: " + message); };
  if (v.dtype != x.dtype) {
    throw nb::type_error(
        (std::string("out: expected dtype ") + name_of(x.dtype) + " (that of logits), got " + name_of(v.dtype))
            .c_str());
  }
  if (!(v.device == x.device)) {
    refuse("expected device " + name_of(x.device) + " (that of logits), got " + name_of(v.device));
  }
  if (!std::ranges::equal(out.shape(), logits.shape())) {
    refuse("expected shape " + shape_text(logits.shape()) + ", got " + shape_text(out.shape()));
  }
  if (v.read_only) throw nb::buffer_error("out: is read-only");
  if (overlaps_itself(v)) refuse("expected strides that do not overlap");
  if (v.num_elements() > 0 && v.shape[v.ndim - 1] > 1 && v.stride(v.ndim - 1) != 1)
    refuse("expected a contiguous last dimension (stride 1)");
  bool same = v.data == x.data;
  for (int i = 0; i < v.ndim && same; ++i) same = x.shape[i] == 1 || v.stride(i) == x.stride(i);
  if (!same && ranges_overlap(v, x)) refuse("overlaps logits without being logits itself");
  const auto layout = row_layout(v, v.ndim - 1);
  if (!layout) refuse("expected leading dimensions that collapse to at most two strides");
  return *layout;
}

nb::object backward(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                    nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                    nb::handle kept_ids, nb::handle kept_offsets, int exp, nb::handle vocab_start,
                    nb::handle vocab_size, nb::handle lse, nb::handle entropy, nb::handle dlogprob, nb::handle dlse,
                    nb::handle dentropy, nb::handle out, nb::handle allocate, std::uintptr_t stream) {
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          kept_ids, kept_offsets, vocab_start, vocab_size, exp});
  LogprobBackwardParams p;
  static_cast<LogprobInput&>(p) = call.input();
  std::vector<Array> rows;
  rows.reserve(5);
  const auto read = [&](nb::handle h, const char* name, RowLayout* layout) -> const float* {
    if (h.is_none()) return nullptr;
    rows.emplace_back(h, name, "float32");
    call.check_rows(rows.back(), DType::kFloat32, layout);
    return static_cast<const float*>(rows.back().view().data);
  };
  p.lse = read(lse, "lse", nullptr);
  if (lse.is_none()) throw nb::type_error("lse: expected the lse that logprob returned, got None");
  p.entropy = read(entropy, "entropy", nullptr);
  p.dlogprob = read(dlogprob, "dlogprob", &p.dlogprob_rows);
  p.dlse = read(dlse, "dlse", &p.dlse_rows);
  p.dentropy = read(dentropy, "dentropy", &p.dentropy_rows);
  if (!dentropy.is_none() && entropy.is_none())
    throw nb::type_error("entropy: expected the entropy that logprob returned, got None");

  const Caller caller = make_caller(logits, call.device(), allocate, stream);
  const TensorView& x = call.logits().view();
  nb::object dlogits;
  std::optional<Array> given;
  if (out.is_none()) {
    Caller::Fresh fresh = caller.empty(call.logits().shape(), x.dtype);
    dlogits = std::move(fresh.array);
    p.dlogits = fresh.data;
    p.dlogits_rows = {.inner = p.num_rows > 0 ? p.num_rows : 1, .outer_stride = 0, .inner_stride = p.num_columns};
  } else {
    given.emplace(out, "out", name_of(x.dtype));
    p.dlogits_rows = gradient_layout(*given, call.logits());
    call.check_apart(*given, false);
    for (const Array& row : rows) {
      if (ranges_overlap(given->view(), row.view())) {
        throw nb::value_error((std::string("out: may share memory with ") + row.name()).c_str());
      }
    }
    p.dlogits = given->view().data;
    dlogits = nb::borrow(out);
  }
  {
    const ReleasedGil released;
    rlk::logprob_backward(p, call.device(), caller.stream);
  }
  return dlogits;
}

}  // namespace

void bind_logprob(nb::module_& m) {
  define(m, "logprob", &forward);
  define(m, "logprob_eager", &eager);
  define(m, "logprob_partial", &partial);
  define(m, "logprob_merge", &merge);
  define(m, "logprob_backward", &backward);
}

}  // namespace rlk::bindings
