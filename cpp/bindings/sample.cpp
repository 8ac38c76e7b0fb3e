// Python's entry to sample: fields move from checked arguments to the contract's params, outputs come from the caller.
#include "rlk/ops/sample.h"

#include <optional>
#include <string>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "row_array.h"
#include "row_integers.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

constexpr int kWantsLogprob = 1, kWantsRaw = 2;

nb::object tokens(nb::handle logits, nb::handle seed, nb::handle sample_id, nb::handle position, nb::handle temperature,
                  nb::handle top_k, nb::handle top_p, nb::handle min_p, nb::handle greedy, nb::handle allowed,
                  nb::handle raw_logits, nb::handle row_status, nb::handle valid_vocab, int exp, int order,
                  std::int64_t kept_capacity, int wants, nb::handle allocate, std::uintptr_t stream) {
  SampleParams p;
  const Array x = read_logits(logits, "sample", &p);
  const TensorView& v = x.view();
  p.valid_vocab = valid_vocab.is_none() ? p.vocab_size : read_integer(valid_vocab, "valid_vocab", "an integer");
  if (p.valid_vocab < 1 || p.valid_vocab > p.vocab_size) {
    argument_error("valid_vocab", "expected an integer in [1, " + std::to_string(p.vocab_size) + "], got " +
                                      std::to_string(p.valid_vocab));
  }
  const RowIntegersArgument seeds(seed, "seed", p.num_rows, &v.device);
  const RowIntegersArgument samples(sample_id, "sample_id", p.num_rows, &v.device);
  const RowIntegersArgument positions(position, "position", p.num_rows, &v.device);
  const RowIntegersArgument firsts(top_k, "top_k", p.num_rows, &v.device);
  p.seed = seeds.rows();
  p.sample_id = samples.rows();
  p.position = positions.rows();
  p.top_k = firsts.rows();
  const auto rows = [&](nb::handle given, const char* name, const char* dtypes) {
    return RowArray(given, name, dtypes, p.num_rows, v.device);
  };
  const RowArray temperatures = rows(temperature, "temperature", "float32"), shares = rows(top_p, "top_p", "float32"),
                 least = rows(min_p, "min_p", "float32"), flags = rows(greedy, "greedy", "bool");
  p.temperature = floats_of(temperatures, temperature, "temperature");
  p.top_p = floats_of(shares, top_p, "top_p");
  p.min_p = floats_of(least, min_p, "min_p");
  if (flags) {
    if (flags->view().dtype != DType::kBool) dtype_error(flags.array(), "bool");
    p.is_greedy = static_cast<const std::uint8_t*>(flags->view().data);
    p.greedy_stride = flags.stride();
  } else {
    if (!PyBool_Check(greedy.ptr())) {
      throw nb::type_error(("greedy: expected a bool or an array of them, got " + kind_of(greedy)).c_str());
    }
    p.greedy = greedy.ptr() == Py_True;
  }
  std::optional<Array> mask;
  if (!allowed.is_none()) {
    mask.emplace(allowed, "allowed", "int32");
    const TensorView& m = mask->view();
    if (m.dtype != DType::kInt32) dtype_error(*mask, "int32");
    require_device(*mask, v.device);
    const std::int64_t words = (p.valid_vocab + 31) / 32;
    if (m.ndim != 2 || m.shape[0] != p.num_rows || m.shape[1] < words) {
      argument_error("allowed", "expected shape [" + std::to_string(p.num_rows) + ", " + std::to_string(words) +
                                    "] or wider, got " + shape_text(mask->shape()));
    }
    require_columns(*mask);
    p.allowed = static_cast<const std::int32_t*>(m.data);
    p.allowed_stride = m.stride(0);
  }
  std::optional<Array> raw;
  if (!raw_logits.is_none()) {
    raw.emplace(raw_logits, "logits", "float32, bfloat16 or float16");
    p.raw_logits = raw->view().data;
    p.raw_stride = raw->view().stride(0);
    p.raw_dtype = raw->view().dtype;
  }
  const RowArray known = rows(row_status, "row_status", "int32");
  if (known) p.row_status = static_cast<const std::int32_t*>(known->view().data);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  const Caller caller = make_caller(logits, v.device, allocate, stream);
  const std::int64_t of_rows[] = {p.num_rows}, of_offsets[] = {p.num_rows + 1}, of_kept[] = {kept_capacity};
  nb::object results[6];  // in the order of the tuple
  const auto fresh = [&](int i, std::span<const std::int64_t> shape, DType dtype) {
    const Caller::Fresh out = caller.empty(shape, dtype);
    results[i] = out.array;
    return out.data;
  };
  for (nb::object& result : results) result = nb::none();
  p.ids = static_cast<std::int64_t*>(fresh(0, of_rows, DType::kInt64));
  if (wants & kWantsLogprob) p.logprob = static_cast<float*>(fresh(1, of_rows, DType::kFloat32));
  if (wants & kWantsRaw) p.raw_logprob = static_cast<float*>(fresh(2, of_rows, DType::kFloat32));
  if (kept_capacity >= 0) {
    p.kept_capacity = kept_capacity;
    p.kept_ids = static_cast<std::int32_t*>(fresh(3, of_kept, DType::kInt32));
    p.kept_offsets = static_cast<std::int64_t*>(fresh(4, of_offsets, DType::kInt64));
  }
  p.status = static_cast<std::int32_t*>(fresh(5, of_rows, DType::kInt32));
  const nb::object workspace = take_workspace(caller, sample_workspace_bytes(p, caller.device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::sample(p, v.device, caller.stream);
  }
  return nb::make_tuple(results[0], results[1], results[2], results[3], results[4], results[5]);
}

}  // namespace

void bind_sample(nb::module_& m) { define(m, "sample", &tokens); }

}  // namespace rlk::bindings
