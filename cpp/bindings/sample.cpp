// Python's entry to sample.
#include "rlk/ops/sample.h"

#include <algorithm>
#include <optional>
#include <string>

#include "call.h"
#include "draw_args.h"
#include "logprob_args.h"

namespace rlk::bindings {
namespace {

constexpr int kWantsLogprob = 1, kWantsRaw = 2;

template <class Params>
std::int64_t workspace_bytes(const Params& p, Device device) {
  return sample_workspace_bytes(p, device);
}

// The parts of rule 5 that columns [start, start + columns) are; none where none of them is valid.
PartRange read_parts(std::int64_t vocab_size, std::int64_t valid_vocab, std::int64_t start, std::int64_t columns) {
  if (columns == 0 || start >= valid_vocab) return {};
  const PartRange parts = parts_of_columns(vocab_size, valid_vocab, start, columns);
  if (parts.count == 0) refuse_parts(vocab_size, start, columns, "");
  return parts;
}

// How each row is drawn: what all three calls are told of it.
class DrawnRows {
 public:
  DrawnRows(nb::handle seed, nb::handle sample_id, nb::handle position, nb::handle temperature, nb::handle top_k,
            nb::handle top_p, nb::handle min_p, nb::handle greedy, nb::handle allowed, Device device, SampleParams* p)
      : arguments_(seed, sample_id, position, temperature, top_k, min_p, greedy, device, p),
        shares_(top_p, "top_p", kFloat32, p->num_rows, device),
        mask_(allowed, device, p) {
    p->top_p = floats_of(shares_, top_p, "top_p");
  }

 private:
  DrawArguments arguments_;
  RowArray shares_;
  AllowedArgument mask_;
};

// What bias and penalties were applied to, and what they found wrong; or nothing.
class Unprocessed {
 public:
  Unprocessed(nb::handle logits, nb::handle row_status, Device device, SampleParams* p)
      : known_(row_status, "row_status", kInt32, p->num_rows, device) {
    if (!logits.is_none()) {
      const TensorView& v = logits_.emplace(logits, "logits", kFloats).view();
      p->raw_logits = v.data;
      p->raw_stride = v.stride(0);
      p->raw_dtype = v.dtype;
    }
    if (known_) p->row_status = static_cast<const std::int32_t*>(known_->view().data);
  }

 private:
  std::optional<Array> logits_;
  const RowArray known_;
};

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
  const DrawnRows drawn(seed, sample_id, position, temperature, top_k, top_p, min_p, greedy, allowed, v.device, &p);
  const Unprocessed raw(raw_logits, row_status, v.device, &p);
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

nb::object partial(nb::handle logits, nb::handle seed, nb::handle sample_id, nb::handle position,
                   nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p, nb::handle greedy,
                   nb::handle allowed, nb::handle raw_logits, nb::handle row_status, nb::handle vocab_start,
                   nb::handle vocab_size, nb::handle valid_vocab, int exp, int order, std::int64_t max_top_k,
                   int random_stream, bool takes_raw, nb::handle allocate, std::uintptr_t stream) {
  SamplePartialParams p;
  const Array x = read_logits(logits, &p, vocab_size, "logits_shard");
  const TensorView& v = x.view();
  read_valid_vocab(valid_vocab, &p);
  const std::int64_t start = read_vocab_start(vocab_start, p.vocab_size, v.shape[1]);
  p.parts = read_parts(p.vocab_size, p.valid_vocab, start, v.shape[1]);
  p.most_top_k = max_top_k;
  p.random_stream = random_stream;
  p.takes_raw = takes_raw;
  const DrawnRows drawn(seed, sample_id, position, temperature, top_k, top_p, min_p, greedy, allowed, v.device, &p);
  const Unprocessed raw(raw_logits, row_status, v.device, &p);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  return Results("sample", logits, v.device, allocate, stream)
      .add(&p.payload, {p.num_rows, payload_words(max_top_k)})
      .run(rlk::sample_partial, &p, workspace_bytes<SamplePartialParams>);
}

nb::object merge(nb::handle payloads, nb::handle seed, nb::handle sample_id, nb::handle position,
                 nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p, nb::handle greedy,
                 nb::handle allowed, nb::handle vocab_size, nb::handle valid_vocab, int exp, int order,
                 std::int64_t kept_capacity, int random_stream, int wants, nb::handle allocate, std::uintptr_t stream) {
  SampleMergeParams p;
  const Array x(payloads, "payloads", kInt32);
  const TensorView& v = x.view();
  const std::int64_t candidates = v.ndim == 3 ? (v.shape[2] - kPayloadHead) / kCandidateWords : -1;
  if (candidates < 0 || candidates > kMostCandidates || v.shape[2] != payload_words(candidates) || v.shape[0] < 1 ||
      v.shape[0] > kNumParts || !v.is_contiguous()) {
    argument_error(x,
                   "expected a contiguous array of shape [shards, num_rows, 16 + 3 * max_top_k], with 1 to 8 shards "
                   "and max_top_k up to 256, got shape " +
                       shape_text(x.shape()));
  }
  p.payload = static_cast<const std::int32_t*>(v.data);
  p.num_shards = static_cast<std::int32_t>(v.shape[0]);
  p.num_rows = v.shape[1];
  p.most_top_k = candidates;
  p.vocab_size = read_vocab_size(vocab_size);
  read_valid_vocab(valid_vocab, &p);
  p.random_stream = random_stream;
  const DrawnRows drawn(seed, sample_id, position, temperature, top_k, top_p, min_p, greedy, allowed, v.device, &p);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  p.kept_capacity = std::max<std::int64_t>(kept_capacity, 0);
  return Results("sample", payloads, v.device, allocate, stream)
      .add(&p.ids, {p.num_rows})
      .add(&p.logprob, {p.num_rows}, wants & kWantsLogprob)
      .add(&p.raw_logprob, {p.num_rows}, wants & kWantsRaw)
      .add(&p.kept_ids, {kept_capacity}, kept_capacity >= 0)
      .add(&p.kept_offsets, {p.num_rows + 1}, kept_capacity >= 0)
      .add(&p.status, {p.num_rows})
      .run(rlk::sample_merge, &p, workspace_bytes<SampleMergeParams>);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "sample", &tokens);
  define(m, "sample_partial", &partial);
  define(m, "sample_merge", &merge);
});

}  // namespace
}  // namespace rlk::bindings
