// Python's entry to sample.
#include "rlk/ops/sample.h"

#include <algorithm>

#include "call.h"
#include "row_array.h"

namespace rlk::bindings {
namespace {

constexpr int kWantsLogprob = 1, kWantsRaw = 2;

template <class Params>
std::int64_t workspace_bytes(const Params& p, Device device) {
  return sample_workspace_bytes(p, device);
}

// The parts of rule 5 that columns [start, start + columns) make up; none if no column is valid.
PartRange read_parts(std::int64_t vocab_size, std::int64_t valid_vocab, std::int64_t start, std::int64_t columns) {
  if (columns == 0 || start >= valid_vocab) return {};
  const PartRange parts = parts_of_columns(vocab_size, valid_vocab, start, columns);
  if (parts.count == 0) refuse_parts(vocab_size, start, columns, "");
  return parts;
}

// Reads logits before bias and penalties, and the statuses of rows; nothing if no bias or penalty was applied.
void read_unprocessed(Frame* frame, nb::handle logits, nb::handle row_status, Device device, SampleParams* p) {
  const VectorArgument known(frame, row_status, "row_status", kInt32, p->num_rows, "", device);
  p->row_status = known.data<std::int32_t>();
  if (const Array* const raw = frame->optional(logits, "logits", kFloats)) {
    p->raw_logits = raw->data();
    p->raw_stride = raw->view().stride(0);
    p->raw_dtype = raw->view().dtype;
  }
}

nb::object tokens(Frame* frame, nb::handle logits, nb::tuple rows, nb::handle raw_logits, nb::handle row_status,
                  nb::handle valid_vocab, int exp, int order, std::int64_t kept_capacity, std::int64_t n_logprobs,
                  int random_stream, int wants) {
  SampleParams p;
  const Array& x = read_logits(frame, logits, &p);
  const TensorView& v = x.view();
  read_valid_vocab(valid_vocab, &p);
  const std::int64_t most = std::min(kTopLogprobs, p.valid_vocab);
  require(n_logprobs >= 0 && n_logprobs <= most, "n_logprobs", "an integer in [0, ", most, "], got ", n_logprobs);
  p.n_logprobs = n_logprobs;
  p.random_stream = random_stream;
  read_drawn_rows(frame, rows, v.device, &p);
  read_unprocessed(frame, raw_logits, row_status, v.device, &p);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  p.kept_capacity = std::max<std::int64_t>(kept_capacity, 0);
  return Results("sample", x, frame)
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

// Reads payloads of the rounds before, and the width of the widest shard.
void read_earlier_rounds(Frame* frame, const nb::tuple& given, nb::handle widest, const TensorView& logits,
                         SamplePartialParams* p) {
  if (p->round == 0) return;
  p->widest = widest.is_none() ? logits.shape[1] : read_integer(widest, "max_shard", "an integer");
  require(p->widest >= logits.shape[1] && p->widest <= p->vocab_size, "max_shard", "an integer in [", logits.shape[1],
          ", ", p->vocab_size, "], got ", p->widest);
  p->sorted_columns = p->round == 1 && p->parts.count > 0 ? columns_of_shard(*p) : 0;
  for (int k = 1; k < p->round; ++k) {
    const Array& payloads = frame->read(entry(given, k - 1), "earlier", kInt32, logits.device);
    const TensorView& v = payloads.view();
    if (k == 1) p->num_shards = static_cast<std::int32_t>(v.ndim == 3 ? v.shape[0] : 0);
    require(p->num_shards >= 1 && p->num_shards <= kNumParts, "earlier", "payloads of 1 to 8 shards, got shape ",
            payloads.shape());
    const std::int64_t words = round_words(k, p->vocab_size, p->widest, p->num_shards);
    require(v.ndim == 3 && v.shape[0] == p->num_shards && v.shape[1] == p->num_rows && v.shape[2] == words &&
                v.is_contiguous(),
            "earlier", "a contiguous array of shape [", p->num_shards, ", ", p->num_rows, ", ", words, "] for round ",
            k, ", got shape ", payloads.shape());
    p->before[k - 1] = static_cast<const std::int32_t*>(v.data);
  }
}

nb::object partial(Frame* frame, nb::handle logits, nb::tuple rows, nb::handle raw_logits, nb::handle row_status,
                   nb::tuple before, nb::handle vocab_start, nb::handle vocab_size, nb::handle valid_vocab, int exp,
                   int order, std::int64_t max_top_k, int random_stream, bool takes_raw, int round, nb::handle widest,
                   bool keeps) {
  SamplePartialParams p;
  const Array& x = read_logits(frame, logits, &p, vocab_size, "logits_shard");
  const TensorView& v = x.view();
  read_valid_vocab(valid_vocab, &p);
  const std::int64_t start = read_vocab_start(vocab_start, p.vocab_size, v.shape[1]);
  p.parts = read_parts(p.vocab_size, p.valid_vocab, start, v.shape[1]);
  if (round == 0) p.most_top_k = max_top_k;
  p.random_stream = random_stream;
  p.takes_raw = takes_raw;
  p.round = round;
  read_earlier_rounds(frame, before, widest, v, &p);
  read_drawn_rows(frame, rows, v.device, &p);
  read_unprocessed(frame, raw_logits, row_status, v.device, &p);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  p.kept_capacity = keeps ? p.num_rows * v.shape[1] : 0;
  const std::int64_t words =
      round == 0 ? payload_words(max_top_k) : round_words(round, p.vocab_size, p.widest, p.num_shards);
  return Results("sample", x, frame)
      .add(&p.payload, {p.num_rows, words})
      .add(&p.kept_ids, {p.kept_capacity}, keeps)
      .add(&p.kept_offsets, {p.num_rows + 1}, keeps)
      .run(rlk::sample_partial, &p, workspace_bytes<SamplePartialParams>);
}

nb::object merge(Frame* frame, nb::handle payloads, nb::tuple rows, nb::handle vocab_size, nb::handle valid_vocab,
                 int exp, int order, std::int64_t kept_capacity, int random_stream, int wants, bool in_rounds) {
  SampleMergeParams p;
  const Array& x = frame->read(payloads, "payloads", kInt32);
  const TensorView& v = x.view();
  const std::int64_t candidates = v.ndim == 3 ? (v.shape[2] - kPayloadHead) / kCandidateWords : -1;
  require(candidates >= 0 && candidates <= kMostCandidates && v.shape[2] == payload_words(candidates) &&
              v.shape[0] >= 1 && v.shape[0] <= kNumParts && v.is_contiguous(),
          x,
          "a contiguous array of shape [shards, num_rows, 16 + 3 * max_top_k], with 1 to 8 shards and max_top_k up to "
          "256, got shape ",
          x.shape());
  p.payload = static_cast<const std::int32_t*>(v.data);
  p.num_shards = static_cast<std::int32_t>(v.shape[0]);
  p.num_rows = v.shape[1];
  require(!in_rounds || candidates == 0, x, "shape [shards, num_rows, 16], as round 4 gives, got shape ", x.shape());
  p.in_rounds = in_rounds;
  if (!in_rounds) p.most_top_k = candidates;
  p.vocab_size = read_vocab_size(vocab_size);
  read_valid_vocab(valid_vocab, &p);
  p.random_stream = random_stream;
  read_drawn_rows(frame, rows, v.device, &p);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  p.order = static_cast<SampleOrder>(order);
  p.kept_capacity = std::max<std::int64_t>(kept_capacity, 0);
  return Results("sample", x, frame)
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
