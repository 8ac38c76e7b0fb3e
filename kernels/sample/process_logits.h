// A row of process_logits, computed by a team (row.h) on every backend, and the preconditions of a call. At first the
// row's output holds one word per column: the column's count in the history, and two flags. The call therefore needs no
// workspace.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/sample.h"
#include "rlk/unroll.h"

namespace rlk {

constexpr std::uint32_t kInPrompt = 1u << 31, kHasBias = 1u << 30, kCountOfOutput = kHasBias - 1;

// takes_edited: whether the backend can compute only the columns that change (edited columns).
inline void check_process_logits(const ProcessLogitsParams& p, bool takes_edited = false) {
  RLK_CHECK(p.num_rows >= 0 && p.num_rows < std::int64_t{1} << 31, "process_logits: fewer than 2^31 rows");
  RLK_CHECK(p.vocab_size >= 1 && p.vocab_size <= kSampleVocab, "process_logits: 1 to 2^19 columns");
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "process_logits: logits are float32, bfloat16 or float16");
  RLK_CHECK(p.vocab_start >= 0 && p.num_columns >= 0 && p.num_columns <= p.vocab_size - p.vocab_start,
            "process_logits: the columns are the vocabulary's");
  RLK_CHECK(p.history_size >= 0 && p.history_size < std::int64_t{kCountOfOutput} && p.bias_size >= 0,
            "process_logits: fewer than 2^30 - 1 entries of history");
  RLK_CHECK(p.num_rows == 0 || p.num_columns == 0 || (p.logits != nullptr && p.out != nullptr),
            "process_logits: logits and out are given");
  RLK_CHECK(p.num_rows == 0 || p.status != nullptr, "process_logits: status is given");
  RLK_CHECK(p.edited == nullptr || (takes_edited && p.dtype == DType::kFloat32),
            "process_logits: CUDA alone computes edited columns, of float32");
}

// Returns the params of the pass that computes raw_logprob.
template <class Params>
inline Params raw_pass(Params p) {
  p.allowed = nullptr;
  p.edited = nullptr;
  p.process = nullptr;
  p.top_ids = p.raw_top_ids;
  p.top_logprobs = p.raw_top_logprobs;
  if (p.raw_logits == nullptr) return p;
  p.logits = p.raw_logits;
  p.logits_stride = p.raw_stride;
  p.dtype = p.raw_dtype;
  return p;
}

struct Penalties {
  float repetition, presence, frequency;

  RLK_HD float repeat(float z) const { return z > 0.0f ? div_rn(z, repetition) : mul_rn(z, repetition); }
  RLK_HD float of(float z, std::uint32_t word, float bias, SampleOrder order) const {
    const std::uint32_t count = word & kCountOfOutput;
    const bool has_bias = (word & kHasBias) != 0;
    const float of_count = mul_rn(frequency, static_cast<float>(count));
    if (order == SampleOrder::kSglang) {
      if (count > 0) z = repeat(sub_rn(z, add_rn(of_count, presence)));
      if (has_bias) z = add_rn(z, bias);
    } else {
      if (has_bias) z = add_rn(z, bias);
      if ((word & ~kHasBias) != 0) z = repeat(z);
      if (count > 0) z = sub_rn(sub_rn(z, of_count), presence);
    }
    return is_nan(z) ? canonical_nan() : z;
  }
};

// The range of a row's entries in the history or in the bias. The range is empty if the row's offsets are bad.
struct RowSpan {
  std::int64_t begin, end;
  bool good;
};
template <class Team>
RLK_DEVICE RowSpan row_span(const Team& team, const std::int64_t* offsets, std::int64_t size, std::int64_t row) {
  const std::int64_t begin = team.global(offsets)[row], end = team.global(offsets)[row + 1];
  if (begin < 0 || end < begin || end > size) return {0, 0, false};
  return {begin, end, true};
}

// A row's penalties, history and bias. Each team reads all entries of the history and of the bias, so it finds every
// fault of the row.
template <class Team>
class RowEdits {
  using Memory = typename Team::Memory;

 public:
  RLK_DEVICE RowEdits(const Team& team, const ProcessLogitsParams& p, std::int64_t row)
      : penalties{p.repetition.template at<Memory>(row), p.presence.template at<Memory>(row),
                  p.frequency.template at<Memory>(row)},
        team_(team),
        p_(p),
        history_(p.history_offsets == nullptr ? RowSpan{0, 0, true}
                                              : row_span(team, p.history_offsets, p.history_size, row)),
        bias_(p.bias_offsets == nullptr ? RowSpan{0, 0, true} : row_span(team, p.bias_offsets, p.bias_size, row)) {}

  RLK_DEVICE const RowSpan& history() const { return history_; }
  RLK_DEVICE const RowSpan& bias() const { return bias_; }
  // Number of the row's entries.
  RLK_DEVICE std::int64_t entries() const { return history_.end - history_.begin + bias_.end - bias_.begin; }
  // Writes the faults that are known before an entry is read. The caller must synchronise afterwards.
  RLK_DEVICE void find_faults(std::uint32_t* found) const {
    if (team_.thread() != 0) return;
    const auto is_finite = [](float x) { return sub_rn(x, x) == 0.0f; };
    const bool good =
        is_temperature(penalties.repetition) && is_finite(penalties.presence) && is_finite(penalties.frequency);
    std::uint32_t faults = 0;
    if (!good) faults |= kBadPenalty;
    if (!history_.good) faults |= kBadHistory;
    if (!bias_.good) faults |= kBadBias;
    team_.global(found)[0] = faults;
  }
  // Adds this thread's entries of columns [begin, end) to the columns' words, and adds faults to `found`.
  RLK_DEVICE void count(std::int64_t begin, std::int64_t end, std::uint32_t* words, std::uint32_t* found) const {
    each_of_history(begin, end, found, [&](std::int64_t j, std::int64_t i) {
      if (p_.is_prompt != nullptr && team_.global(p_.is_prompt)[i] != 0) {
        team_.set_bits(words + j, kInPrompt);
      } else {
        team_.count(words + j);
      }
    });
    each_of_bias(begin, end, found, [&](std::int64_t j, std::int64_t) { team_.set_bits(words + j, kHasBias); });
  }
  // Calls fn(column, entry) for this thread's entries. Columns are counted from `begin`.
  template <class F>
  RLK_DEVICE void each_of_history(std::int64_t begin, std::int64_t end, std::uint32_t* found, F fn) const {
    for (std::int64_t i = history_.begin + team_.thread(); i < history_.end; i += team_.threads()) {
      const std::int64_t id = p_.history_ids.template at<Memory>(i), j = id - p_.vocab_start;
      if (id < 0 || id >= p_.vocab_size) {
        team_.set_bits(found, kBadHistory);
      } else if (j >= begin && j < end) {  // other ids belong to another team or another shard
        fn(j - begin, i);
      }
    }
  }
  template <class F>
  RLK_DEVICE void each_of_bias(std::int64_t begin, std::int64_t end, std::uint32_t* found, F fn) const {
    std::int64_t before = -1;
    for (std::int64_t i = bias_.begin + team_.thread(); i < bias_.end; i += team_.threads()) {
      const std::int64_t id = p_.bias_ids.template at<Memory>(i), j = id - p_.vocab_start;
      if (i > bias_.begin) before = p_.bias_ids.template at<Memory>(i - 1);
      if (id <= before || id >= p_.vocab_size) {
        team_.set_bits(found, kBadBias);
      } else if (j >= begin && j < end) {
        fn(j - begin, i);
      }
    }
  }

  const Penalties penalties;

 private:
  const Team& team_;
  const ProcessLogitsParams& p_;
  const RowSpan history_, bias_;
};

// Computes columns [begin, end) of a row, and writes the row's faults to `found`. `all_words` is scratch memory with
// one word per column. `all_words` may be the columns' own place in `out`.
template <class Team, class T>
RLK_DEVICE void process_columns(const Team& team, const ProcessLogitsParams& p, std::int64_t row, std::int64_t begin,
                                std::int64_t end, std::uint32_t* all_words, std::uint32_t* found) {
  using Storage = typename T::Storage;
  const auto logits = team.global(static_cast<const Storage*>(p.logits) + row * p.logits_stride);
  const auto words = team.global(all_words);
  const auto out = team.global(reinterpret_cast<std::uint32_t*>(p.out + row * p.num_columns));
  const RowEdits<Team> edits(team, p, row);
  const Penalties& penalties = edits.penalties;
  for (std::int64_t j = begin + team.thread(); j < end; j += team.threads()) words[j - begin] = 0;
  edits.find_faults(found);
  team.barrier();
  edits.count(begin, end, all_words, found);
  team.barrier();
  const bool bad = team.global(found)[0] != 0;
  constexpr int kAhead = Team::kAhead;
  for (std::int64_t base = begin + team.thread(); base < end; base += kAhead * team.threads()) {
    float z[kAhead];
    RLK_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t j = base + i * team.threads();
      z[i] = T::load(logits[j < end ? j : base]);
    }
    RLK_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t j = base + i * team.threads();
      if (j >= end) continue;
      const std::uint32_t word = words[j - begin];
      if (!bad && (word & kHasBias) != 0) continue;
      out[j] = static_cast<std::uint32_t>(bits_of(bad ? canonical_nan() : penalties.of(z[i], word, 0.0f, p.order)));
    }
  }
  if (bad) return;
  team.barrier();
  edits.each_of_bias(begin, end, found, [&](std::int64_t j, std::int64_t i) {
    const float z = penalties.of(T::load(logits[begin + j]), words[j], team.global(p.bias_values)[i], p.order);
    out[begin + j] = static_cast<std::uint32_t>(bits_of(z));
  });
}
// Computes a whole row.
template <class Team, class T>
RLK_DEVICE void process_row(const Team& team, const ProcessLogitsParams& p, std::int64_t row) {
  process_columns<Team, T>(team, p, row, 0, p.num_columns,
                           reinterpret_cast<std::uint32_t*>(p.out + row * p.num_columns),
                           reinterpret_cast<std::uint32_t*>(p.status + row));
}

}  // namespace rlk
