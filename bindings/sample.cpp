// Bindings of the operators that draw tokens: `sample` and its shards, `linear_sample`, `process_logits` and
// `random_bits`.
// A parameter of the rows is an array with one element per row, or a single number for all rows.
#include "rlk/ops/sample.h"

#include <algorithm>

#include "call.h"
#include "rlk/ops/linear_sample.h"
#include "rlk/ops/random_bits.h"

namespace rlk::bindings {
namespace {

constexpr int kWantsLogprob = 1, kWantsRaw = 2;

std::int64_t read_vocab_size(nb::handle given) {
  const std::int64_t size = read_integer(given, "vocab_size", "an integer");
  require(size >= 1 && size <= kSampleVocab, "vocab_size", "an integer in [1, ", kSampleVocab, "], got ", size);
  return size;
}

// Checks logits [num_rows, vocab_size], and sets their address, sizes and strides in `p`. `vocab_size` is None, or the
// size of the vocabulary to which these columns belong.
template <class Params>
const Array& read_logits(Frame* frame, nb::handle given, Params* p, nb::handle vocab_size = nb::none(),
                         const char* name = "logits") {
  const Array& x = frame->read(given, name, kFloats);
  const bool whole = vocab_size.is_none();
  require_shape(x->ndim == 2, x, "shape [num_rows, vocab_size]");
  require(x->shape[1] >= (whole ? 1 : 0) && x->shape[1] <= kSampleVocab, x, "1 to ", kSampleVocab, " columns, got ",
          x->shape[1]);
  require_columns(x);
  p->logits = x->data;
  p->dtype = x->dtype;
  p->num_rows = x->shape[0];
  p->vocab_size = whole ? x->shape[1] : read_vocab_size(vocab_size);
  p->logits_stride = x->stride(0);
  return x;
}

// The first column of a shard.
std::int64_t read_vocab_start(nb::handle given, std::int64_t vocab_size, std::int64_t columns) {
  const std::int64_t start = given.is_none() ? 0 : read_integer(given, "vocab_start", "an integer");
  require(start >= 0 && start <= vocab_size && columns <= vocab_size - start, "vocab_start",
          "0 <= vocab_start and vocab_start + ", columns, " (columns of the shard) <= vocab_size, got vocab_start ",
          start, ", vocab_size ", vocab_size);
  return start;
}

// Reads parameters of the rows. Each is an array with one element per row, or a number for all rows. Python has checked
// the numbers.
struct RowReader {
  Frame* frame;
  std::int64_t num_rows;

  RowIntegers integers(nb::handle given, const char* name) const {
    const VectorArgument a = array(given, name, kIndices);
    if (a.array()) return a.integers();
    return {.value = read_integer(given, name, "an integer or an array of them")};
  }
  RowFloats numbers(nb::handle given, const char* name) const {
    const VectorArgument a = array(given, name, kFloat32);
    if (a.array()) return {a.floats(), 0.0f, a.stride()};
    return {nullptr, static_cast<float>(read_number(given, name)), 0};
  }
  VectorArgument array(nb::handle given, const char* name, const Dtypes& dtypes) const {
    return {frame, is_array(given) ? given : nb::none(), name, dtypes, num_rows, ""};
  }
};

void read_valid_vocab(nb::handle given, SampleParams* p) {
  p->valid_vocab = given.is_none() ? p->vocab_size : read_integer(given, "valid_vocab", "an integer");
  require(p->valid_vocab > 0 && p->valid_vocab <= p->vocab_size, "valid_vocab", "an integer in [1, ", p->vocab_size,
          "], got ", p->valid_vocab);
}

// Reads the arguments that decide how each row's token is drawn: arrays with one element per row, or numbers for all
// rows. `allowed` has a bit for each column. `allowed` and top_p may be None.
void read_drawn_rows(Frame* frame, const nb::tuple& rows, int exp, SampleParams* p) {
  p->exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  const auto [seed, sample_id, position, temperature, top_k, top_p, min_p, greedy, allowed] = entries<9>(rows);
  const RowReader read{frame, p->num_rows};
  RLK_FILL(*p, read.integers, seed, sample_id, position, top_k)
  RLK_FILL(*p, read.numbers, temperature, min_p)
  const VectorArgument of_greedy = read.array(greedy, "greedy", kBool);
  of_greedy.put(&p->is_greedy, &p->greedy_stride);
  p->greedy = greedy.ptr() == Py_True;
  if (!of_greedy.array() && !PyBool_Check(greedy.ptr())) {
    type_error("greedy", "a bool or an array of them, got ", kind_of(greedy));
  }
  if (!top_p.is_none()) RLK_FILL(*p, read.numbers, top_p)
  if (allowed.is_none()) return;
  const Array& bits = frame->read(allowed, "allowed", kInt32);
  const std::int64_t words = (p->valid_vocab + 31) / 32;
  require_shape(bits->ndim == 2 && bits->shape[0] == p->num_rows && bits->shape[1] >= words, bits, "shape [",
                p->num_rows, ", ", words, "] or wider");
  require_columns(bits);
  p->allowed = bits.data<std::int32_t>();
  p->allowed_stride = bits->stride(0);
}

RLK_FUNCTION(random_bits, (sample_id, seed, position), std::int64_t num_words, std::int64_t random_stream) {
  require(is_array(sample_id), "sample_id", "an array that speaks DLPack, got a number");
  const VectorArgument ids(frame, sample_id, "sample_id", kIndices, "num_rows");
  const RowReader rows{frame, ids.size()};
  RandomBitsParams p;
  p.sample_id = ids.integers();
  RLK_FILL(p, rows.integers, seed, position)
  p.num_rows = ids.size();
  RLK_FILL(p, as_given, num_words, random_stream)
  return Results("random_bits", frame).add(&p.bits, {p.num_rows, num_words}).run(rlk::random_bits, p);
}

// Reads penalties, history and bias of the rows in `p`. Each penalty is an array or a number for all rows. All other
// arguments may be None.
void read_edits(Frame* frame, const nb::tuple& given, ProcessLogitsParams* p) {
  const auto [repetition, presence, frequency, ids, offsets, is_prompt, bias_ids, bias_values, bias_offsets] =
      entries<9>(given);
  const RowReader rows{frame, p->num_rows};
  p->repetition = rows.numbers(repetition, "repetition_penalty");
  p->presence = rows.numbers(presence, "presence_penalty");
  p->frequency = rows.numbers(frequency, "frequency_penalty");
  // Reads one contiguous array of a CSR structure; None gives no array. The array has `size` elements, or any number if
  // `size` is negative.
  const auto list = [&](nb::handle x, const char* name, const Dtypes& dtypes, std::int64_t size) {
    VectorArgument found(frame, x, name, dtypes, size, size < 0 ? "num_entries" : "");
    if (found.array()) require_columns(*found.array());
    return found;
  };
  const VectorArgument history = list(ids, "history ids", kIndices, -1);
  p->history_ids = history.integers();
  p->history_size = history.size();
  p->history_offsets = list(offsets, "history offsets", kInt64, p->num_rows + 1).data<std::int64_t>();
  p->is_prompt = list(is_prompt, "history is_prompt", kBool, history.size()).data<std::uint8_t>();
  const VectorArgument bias = list(bias_ids, "logit_bias ids", kIndices, -1);
  p->bias_ids = bias.integers();
  p->bias_size = bias.size();
  p->bias_values = list(bias_values, "logit_bias values", kFloat32, bias.size()).data<float>();
  p->bias_offsets = list(bias_offsets, "logit_bias offsets", kInt64, p->num_rows + 1).data<std::int64_t>();
}

RLK_FUNCTION(process_logits, (logits), nb::tuple edits, int order, nb::handle vocab_start, nb::handle vocab_size) {
  ProcessLogitsParams p;
  const Array& x = read_logits(frame, logits, &p, vocab_size);
  p.num_columns = x->shape[1];
  p.vocab_start = read_vocab_start(vocab_start, p.vocab_size, p.num_columns);
  p.order = static_cast<SampleOrder>(order);
  read_edits(frame, edits, &p);
  return Results("process_logits", frame)
      .add(&p.out, {p.num_rows, p.num_columns})
      .add(&p.status, {p.num_rows})
      .run(rlk::process_logits, p);
}

// The parts of the vocabulary (docs/numerics.md, rule 5) that columns [start, start + columns) consist of. There is no
// part if no column is valid.
PartRange read_parts(std::int64_t vocab_size, std::int64_t valid_vocab, std::int64_t start, std::int64_t columns) {
  if (columns == 0 || start >= valid_vocab) return {};
  const PartRange parts = parts_of_columns(vocab_size, valid_vocab, start, columns);
  if (parts.count == 0) refuse_parts(vocab_size, start, columns, "");
  return parts;
}

// Reads the raw logits, from before bias and penalties were applied, and the statuses of rows. Both arguments are None
// if no bias and no penalty was applied.
void read_unprocessed(Frame* frame, nb::handle logits, nb::handle row_status, SampleParams* p) {
  const VectorArgument known(frame, row_status, "row_status", kInt32, p->num_rows, "");
  p->row_status = known.data<std::int32_t>();
  if (const Array* const raw = frame->optional(logits, "logits", kFloats)) {
    p->raw_logits = raw->data();
    p->raw_stride = raw->view().stride(0);
    p->raw_dtype = raw->view().dtype;
  }
}

// `edits` has the penalties, the history and the bias, as read_edits() reads them.
RLK_FUNCTION(sample, (logits), nb::tuple rows, nb::tuple edits, nb::handle valid_vocab, int exp, int order,
             std::int64_t kept_capacity, std::int64_t n_logprobs, int random_stream, int wants) {
  ProcessedSampleParams both;
  SampleParams& p = both.draw;
  read_logits(frame, logits, &p);
  read_valid_vocab(valid_vocab, &p);
  const std::int64_t most = std::min(kTopLogprobs, p.valid_vocab);
  require(n_logprobs >= 0 && n_logprobs <= most, "n_logprobs", "an integer in [0, ", most, "], got ", n_logprobs);
  RLK_FILL(p, as_given, n_logprobs, order, random_stream)
  read_drawn_rows(frame, rows, exp, &p);
  p.kept_capacity = std::max<std::int64_t>(kept_capacity, 0);
  const bool has_edits = !entry(edits, 4).is_none() || !entry(edits, 8).is_none();  // a history or a bias
  if (has_edits) {
    ProcessLogitsParams& process = both.process;
    process.logits = p.logits;
    process.dtype = p.dtype;
    process.num_rows = p.num_rows;
    process.vocab_size = process.num_columns = p.vocab_size;
    process.logits_stride = p.logits_stride;
    process.order = p.order;
    read_edits(frame, edits, &process);
  }
  Results results("sample", frame);
  const std::int64_t several[] = {p.num_rows, n_logprobs};
  results.add(&p.ids, {p.num_rows})
      .add(&p.logprob, {p.num_rows}, wants & kWantsLogprob)
      .add(&p.raw_logprob, {p.num_rows}, wants & kWantsRaw)
      .each(several, n_logprobs > 0 && wants & kWantsLogprob, &p.top_ids, &p.top_logprobs)
      .each(several, n_logprobs > 0 && wants & kWantsRaw, &p.raw_top_ids, &p.raw_top_logprobs)
      .add(&p.kept_ids, {kept_capacity}, kept_capacity >= 0)
      .add(&p.kept_offsets, {p.num_rows + 1}, kept_capacity >= 0)
      .add(&p.status, {p.num_rows});
  if (!has_edits) return results.run(rlk::sample, &p, sample_workspace_bytes);
  return results.run(rlk::sample_processed, &both, processed_sample_workspace_bytes);
}

// Reads the payloads that all shards made in earlier rounds (rlk/ops/sample.h), and the width of the widest shard.
void read_earlier_rounds(Frame* frame, const nb::tuple& given, nb::handle widest, const TensorView& logits,
                         SamplePartialParams* p) {
  if (p->round == 0) return;
  p->widest = widest.is_none() ? logits.shape[1] : read_integer(widest, "max_shard", "an integer");
  require(p->widest >= logits.shape[1] && p->widest <= p->vocab_size, "max_shard", "an integer in [", logits.shape[1],
          ", ", p->vocab_size, "], got ", p->widest);
  p->sorted_columns = p->round == 1 && p->parts.count > 0 ? columns_of_shard(*p) : 0;
  for (int k = 1; k < p->round; ++k) {
    const Array& payloads = frame->read(entry(given, k - 1), "earlier", kInt32);
    if (k == 1) p->num_shards = static_cast<std::int32_t>(payloads->ndim == 3 ? payloads->shape[0] : 0);
    require(p->num_shards >= 1 && p->num_shards <= kNumParts, "earlier", "payloads of 1 to 8 shards, got shape ",
            payloads.shape());
    const std::int64_t words = round_words(k, p->vocab_size, p->widest, p->num_shards);
    require(payloads->ndim == 3 && payloads->shape[0] == p->num_shards && payloads->shape[1] == p->num_rows &&
                payloads->shape[2] == words && payloads->is_contiguous(),
            "earlier", "a contiguous array of shape [", p->num_shards, ", ", p->num_rows, ", ", words, "] for round ",
            k, ", got shape ", payloads.shape());
    p->before[k - 1] = static_cast<const std::int32_t*>(payloads->data);
  }
}

RLK_FUNCTION(sample_partial, (logits), nb::tuple rows, nb::handle raw_logits, nb::handle row_status, nb::tuple before,
             nb::handle vocab_start, nb::handle vocab_size, nb::handle valid_vocab, int exp, int order,
             std::int64_t max_top_k, int random_stream, bool takes_raw, int round, nb::handle widest, bool keeps) {
  SamplePartialParams p;
  const Array& x = read_logits(frame, logits, &p, vocab_size, "logits_shard");
  read_valid_vocab(valid_vocab, &p);
  const std::int64_t start = read_vocab_start(vocab_start, p.vocab_size, x->shape[1]);
  p.parts = read_parts(p.vocab_size, p.valid_vocab, start, x->shape[1]);
  if (round == 0) p.most_top_k = max_top_k;
  RLK_FILL(p, as_given, order, random_stream, takes_raw, round)
  read_earlier_rounds(frame, before, widest, x.view(), &p);
  read_drawn_rows(frame, rows, exp, &p);
  read_unprocessed(frame, raw_logits, row_status, &p);
  p.kept_capacity = keeps ? p.num_rows * x->shape[1] : 0;
  const std::int64_t words =
      round == 0 ? payload_words(max_top_k) : round_words(round, p.vocab_size, p.widest, p.num_shards);
  return Results("sample", frame)
      .add(&p.payload, {p.num_rows, words})
      .add(&p.kept_ids, {p.kept_capacity}, keeps)
      .add(&p.kept_offsets, {p.num_rows + 1}, keeps)
      .run(rlk::sample_partial, &p, sample_workspace_bytes);
}

RLK_FUNCTION(sample_merge, (payloads), nb::tuple rows, nb::handle vocab_size, nb::handle valid_vocab, int exp,
             int order, std::int64_t kept_capacity, int random_stream, int wants, bool in_rounds) {
  SampleMergeParams p;
  const Array& x = frame->read(payloads, "payloads", kInt32);
  const std::int64_t candidates = x->ndim == 3 ? (x->shape[2] - kPayloadHead) / kCandidateWords : -1;
  require(candidates >= 0 && candidates <= kMostCandidates && x->shape[2] == payload_words(candidates) &&
              x->shape[0] >= 1 && x->shape[0] <= kNumParts && x->is_contiguous(),
          x,
          "a contiguous array of shape [shards, num_rows, 16 + 3 * max_top_k], with 1 to 8 shards and max_top_k up to "
          "256, got shape ",
          x.shape());
  p.payload = static_cast<const std::int32_t*>(x->data);
  p.num_shards = static_cast<std::int32_t>(x->shape[0]);
  p.num_rows = x->shape[1];
  require(!in_rounds || candidates == 0, x, "shape [shards, num_rows, 16], as round 4 gives, got shape ", x.shape());
  RLK_FILL(p, as_given, order, random_stream, in_rounds)
  if (!in_rounds) p.most_top_k = candidates;
  p.vocab_size = read_vocab_size(vocab_size);
  read_valid_vocab(valid_vocab, &p);
  read_drawn_rows(frame, rows, exp, &p);
  p.kept_capacity = std::max<std::int64_t>(kept_capacity, 0);
  return Results("sample", frame)
      .add(&p.ids, {p.num_rows})
      .add(&p.logprob, {p.num_rows}, wants & kWantsLogprob)
      .add(&p.raw_logprob, {p.num_rows}, wants & kWantsRaw)
      .add(&p.kept_ids, {kept_capacity}, kept_capacity >= 0)
      .add(&p.kept_offsets, {p.num_rows + 1}, kept_capacity >= 0)
      .add(&p.status, {p.num_rows})
      .run(rlk::sample_merge, &p, sample_workspace_bytes);
}

RLK_FUNCTION(linear_sample, (hidden, weight, bias), nb::tuple rows, nb::handle valid_vocab, int exp, int arithmetic,
             int logits_dtype, int wants, nb::handle workspace_bytes) {
  const RowsArgument x(frame, hidden, "hidden");
  check_operand(x);
  require_shape(x->ndim == 2, x.array, "shape [num_rows, in_features]");
  const WeightArgument w(frame, weight, "weight", x, 1);
  require(w.out_features > 0 && w.out_features <= kSampleVocab, w.array, "1 to ", kSampleVocab, " rows, got ",
          w.out_features);
  LinearSampleParams p;
  x.lead(&p.product.x, &p.product.x_rows, &p.product);
  w.put(&p.product);
  put_bias(read_bias(frame, bias, "float32 or that of hidden", w.out_features, p.product.dtype, " (that of hidden)"),
           &p.product);
  p.product.out_dtype = read_logits_dtype(logits_dtype, p.product.dtype);
  p.product.arithmetic = read_arithmetic(arithmetic, x);
  p.draw.num_rows = x.num_rows;
  p.draw.vocab_size = w.out_features;
  p.draw.top_p.value = 1.0f;
  read_valid_vocab(valid_vocab, &p.draw);
  read_drawn_rows(frame, rows, exp, &p.draw);
  const std::int64_t bytes = read_integer(workspace_bytes, "workspace_bytes", "a number of bytes");
  return Results("linear_sample", frame)
      .add(&p.draw.ids, {x.num_rows})
      .add(&p.draw.logprob, {x.num_rows}, wants & kWantsLogprob)
      .add(&p.draw.raw_logprob, {x.num_rows}, wants & kWantsRaw)
      .add(&p.draw.status, {x.num_rows})
      .run_within(bytes, true, linear_sample_workspace, rlk::linear_sample, &p);
}

}  // namespace
}  // namespace rlk::bindings
