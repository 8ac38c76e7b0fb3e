// Python's entry to sample.
#include "rlk/ops/sample.h"

#include <algorithm>
#include <optional>
#include <string>

#include "call.h"
#include "draw_args.h"

namespace rlk::bindings {
namespace {

constexpr int kWantsLogprob = 1, kWantsRaw = 2;

nb::object tokens(nb::handle logits, nb::handle seed, nb::handle sample_id, nb::handle position, nb::handle temperature,
                  nb::handle top_k, nb::handle top_p, nb::handle min_p, nb::handle greedy, nb::handle allowed,
                  nb::handle raw_logits, nb::handle row_status, nb::handle valid_vocab, int exp, int order,
                  std::int64_t kept_capacity, std::int64_t n_logprobs, int random_stream, int wants,
                  nb::handle allocate, std::uintptr_t stream) {
  SampleParams p;
  const Array x = read_logits(logits, &p);
  const TensorView& v = x.view();
  read_valid_vocab(valid_vocab, &p);
  const std::int64_t most = std::min(kTopLogprobs, p.valid_vocab);
  if (n_logprobs < 0 || n_logprobs > most) {
    argument_error("n_logprobs",
                   "expected an integer in [0, " + std::to_string(most) + "], got " + std::to_string(n_logprobs));
  }
  p.n_logprobs = n_logprobs;
  p.random_stream = random_stream;
  const DrawArguments arguments(seed, sample_id, position, temperature, top_k, min_p, greedy, v.device, &p);
  const RowArray shares(top_p, "top_p", kFloat32, p.num_rows, v.device);
  p.top_p = floats_of(shares, top_p, "top_p");
  std::optional<Array> mask;
  if (!allowed.is_none()) {
    const TensorView& m = mask.emplace(allowed, "allowed", kInt32).view();
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
  const RowArray known(row_status, "row_status", kInt32, p.num_rows, v.device);
  if (known) p.row_status = static_cast<const std::int32_t*>(known->view().data);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  p.kept_capacity = std::max<std::int64_t>(kept_capacity, 0);
  return Results("sample", logits, v.device, allocate, stream)
      .add(&p.ids, {p.num_rows})
      .add(&p.logprob, {p.num_rows}, wants & kWantsLogprob)
      .add(&p.raw_logprob, {p.num_rows}, wants & kWantsRaw)
      .add(&p.top_ids, {p.num_rows, n_logprobs}, n_logprobs > 0 && wants & kWantsLogprob)
      .add(&p.top_logprobs, {p.num_rows, n_logprobs}, n_logprobs > 0 && wants & kWantsLogprob)
      .add(&p.raw_top_ids, {p.num_rows, n_logprobs}, n_logprobs > 0 && wants & kWantsRaw)
      .add(&p.raw_top_logprobs, {p.num_rows, n_logprobs}, n_logprobs > 0 && wants & kWantsRaw)
      .add(&p.kept_ids, {kept_capacity}, kept_capacity >= 0)
      .add(&p.kept_offsets, {p.num_rows + 1}, kept_capacity >= 0)
      .add(&p.status, {p.num_rows})
      .run(rlk::sample, &p, sample_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "sample", &tokens); });

}  // namespace
}  // namespace rlk::bindings
