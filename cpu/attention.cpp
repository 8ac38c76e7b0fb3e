// CPU backend of the operator `attention`. A task computes some queries of a sequence, in every query head that reads
// one key head. Each block of keys is widened and transposed once for all queries of the task.
#include "rlk/ops/attention.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "attention_mma.h"
#include "attention_tiles.h"
#include "float_environment.h"
#include "kernels/attention/check.h"
#include "kernels/attention/partials.h"
#include "kernels/attention/row.h"
#include "kernels/attention/sinks.h"
#include "note_isa.h"
#include "rlk/backends.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTileRows = 64;  // queries times heads; at head_dim 256 their sums take 64 KiB

class Forward {
 public:
  Forward(const AttentionCall& call, const AttentionParams& p) : Forward(call.params(), &p, nullptr) {}
  Forward(const AttentionCall& call, const AttentionPartialsParams& p) : Forward(call.params(), nullptr, &p) {}

  static std::int64_t queries_of_tile(const AttentionInput& p) {
    return std::max<std::int64_t>(kTileRows * p.num_kv_heads / std::max<std::int64_t>(p.num_q_heads, 1), 1);
  }

  void run(const AttentionTasks::Task& task) {
    const AttentionSpan span(p_, task.sequence);
    const AttentionRange queries = {task.first, std::min(task.first + queries_of_tile(p_), span.num_queries)};
    const AttentionRange keys = span.here(span.keys_of(queries));
    if (keys.empty()) return;
    const std::int64_t num_rows = (queries.last - queries.first) * group_;
    for (std::int64_t r = 0; r < num_rows; ++r) {
      rows_[r] = {};
      if (!span.keys_of(query_of(queries, r)).empty()) {
        read_.query(p_.q, p_.head_dim, span, query_of(queries, r), head_of(task, r), q_.data() + r * read_.columns);
      }
    }
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    const std::int64_t first = keys.first / block_ * block_;
    for (std::int64_t begin = first; begin < keys.last; begin += block_) {
      if (begin != first && attention_split_begins(begin)) end_split(task, span, queries, begin);
      block(task, span, queries, {std::max(begin, keys.first), std::min(begin + block_, keys.last)}, begin);
    }
    end_split(task, span, queries, keys.last);
    if (partials_ != nullptr) return;
    for (std::int64_t r = 0; r < num_rows; ++r) finish(task, span, query_of(queries, r), r);
  }

 private:
  // A row is one head of a query. The heads of a query are neighbouring rows, since these rows see the same keys.
  struct Row {
    AttentionReference reference;
    float chains[kAttentionChains] = {};
    float m = -infinity(), l = 0.0f;  // maximum and sum over the earlier splits
  };

  // Exactly one of `whole` and `partials` is given.
  Forward(const AttentionTree<AttentionInput>& p, const AttentionParams* whole, const AttentionPartialsParams* partials)
      : p_(p),
        whole_(whole),
        partials_(partials),
        read_(p),
        group_(p.num_q_heads / p.num_kv_heads),
        block_(attention_block(p.head_dim)),
        how_(scores_of(p)) {
    const auto rows = static_cast<std::size_t>(queries_of_tile(p) * group_),
               columns = static_cast<std::size_t>(read_.columns),
               value_columns = static_cast<std::size_t>(read_.value_columns);
    q_.resize(rows * columns);
    sums_.resize(rows * value_columns);
    total_.resize(rows * value_columns);
    scores_.resize(rows * kTileKeys);
    k_.resize(kTileKeys * columns);
    v_.resize(kTileKeys * value_columns);
    transposed_.resize(kTileKeys * columns);
    sees_.resize(rows);
    rows_.resize(rows);
    const LinearUnit unit = {attention_products(p), p.dtype};
    if (unit.arithmetic != Arithmetic::kIeee) mma_.emplace(unit, rows);
  }

  std::int64_t query_of(AttentionRange queries, std::int64_t r) const { return queries.first + r / group_; }
  std::int64_t head_of(const AttentionTasks::Task& task, std::int64_t r) const {
    return task.kv_head * group_ + r % group_;
  }
  // Row r of a tile of values or sums.
  float* row(std::vector<float>& tile, std::int64_t r) const { return tile.data() + r * read_.value_columns; }

  void block(const AttentionTasks::Task& task, const AttentionSpan& span, AttentionRange queries, AttentionRange keys,
             std::int64_t begin) {
    const AttentionLanes& lanes = attention_simd();
    const auto num_rows = static_cast<int>((queries.last - queries.first) * group_);
    // Keys before the window are +0; transpose() gives +0 for the keys after the last key.
    std::fill_n(k_.begin(), (keys.first - begin) * read_.columns, 0.0f);
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      read_.key(p_.k, p_.head_dim, span, j, task.kv_head, k_.data() + (j - begin) * read_.columns);
      read_.key(p_.v, p_.value_dim, span, j, task.kv_head, row(v_, j - begin));
    }
    lanes.transpose(k_.data(), static_cast<int>(keys.last - begin), p_.head_dim, read_.columns, transposed_.data());
    if (mma_) {
      read_values_in_use(span, begin, task.kv_head);
      mma_->multiply(q_.data(), num_rows, read_.columns, transposed_.data(), p_.head_dim, block_, scores_.data());
    } else {
      lanes.multiply(q_.data(), num_rows, read_.columns, transposed_.data(), p_.head_dim, block_, scores_.data());
    }
    bool holes = false;
    for (int r = 0; r < num_rows; ++r) {
      AttentionColumns& sees = sees_[r] = within(span.keys_of(query_of(queries, r)), begin, block_);
      if (sees.first >= sees.last) {
        sees = {0, 0};
        continue;
      }
      AttentionReference& reference = rows_[r].reference;
      float* scores = scores_.data() + r * kTileKeys;
      if (how_.cap > 0.0f) lanes.cap(scores, sees, how_);
      const float factor = reference.raise(how_.c, lanes.largest(scores, sees));
      if (!reference.contributes()) {
        sees = {0, 0};
        continue;
      }
      if (factor != 1.0f) {
        lanes.scale(row(sums_, r), read_.value_columns, factor);
        lanes.scale(rows_[r].chains, kAttentionChains, factor);
      }
      holes |= lanes.probabilities(scores, sees, how_.c, reference.m, reference.q, p_.exp, p_.dtype, rows_[r].chains);
    }
    if (mma_) {
      mma_->accumulate(scores_.data(), sees_.data(), num_rows, block_, v_.data(), read_.value_columns, sums_.data());
    } else {
      lanes.accumulate(scores_.data(), sees_.data(), num_rows, holes, v_.data(), read_.value_columns, sums_.data());
    }
  }

  // A matrix unit multiplies values that a row does not see by +0, so these values must be loaded, too. The function
  // loads all values of the block that are in use, whether or not the task's queries see them. It sets the values of
  // all other keys to +0.
  void read_values_in_use(const AttentionSpan& span, std::int64_t begin, std::int64_t kv_head) {
    std::fill(v_.begin(), v_.end(), 0.0f);
    const std::int64_t last = std::min(begin + block_, span.num_keys);
    for (std::int64_t j = begin; j < last; ++j) {
      if (read_.exists(p_.v, span, j)) read_.key(p_.v, p_.value_dim, span, j, kv_head, row(v_, j - begin));
    }
  }

  // Ends the split that holds key `keys` - 1.
  void end_split(const AttentionTasks::Task& task, const AttentionSpan& span, AttentionRange queries,
                 std::int64_t keys) {
    const std::int64_t num_rows = (queries.last - queries.first) * group_;
    for (std::int64_t r = 0; r < num_rows; ++r) {
      Row& state = rows_[r];
      float* sums = row(sums_, r);
      if (partials_ != nullptr) {
        store_partial(task, span, query_of(queries, r), r, attention_splits(keys) - 1);
      } else {
        merge_split(&state, sums, row(total_, r));
      }
      std::fill(sums, sums + read_.value_columns, 0.0f);
      state.reference = {};
      std::fill(std::begin(state.chains), std::end(state.chains), 0.0f);
    }
  }
  void merge_split(Row* state, const float* sums, float* total) const {
    const AttentionMerge merge(state->m, state->reference.m);
    state->m = merge.m;
    state->l = merge(state->l, combine_chains(state->chains));
    if (merge.only_split) {
      std::copy(sums, sums + read_.value_columns, total);
    } else if (!merge.only_before) {
      attention_simd().merge(total, sums, read_.value_columns, merge.factor, merge.factor_of_split);
    }
  }
  void store_partial(const AttentionTasks::Task& task, const AttentionSpan& span, std::int64_t i, std::int64_t r,
                     std::int64_t split) {
    if (attention_seen_of_split(span, span.keys_of(i), split).empty()) return;
    const std::int64_t place = row_of(p_, span.sequence, span.q_first + i) * p_.num_q_heads + head_of(task, r);
    const std::int64_t at = attention_partial_index(p_, attention_rows(p_) * p_.num_q_heads, split, place);
    const AttentionPartial partial(rows_[r].reference.m, combine_chains(rows_[r].chains));
    partials_->stats[2 * at] = partial.m;
    partials_->stats[2 * at + 1] = partial.l;
    const float* sums = row(sums_, r);
    for (std::int64_t d = 0; d < p_.value_dim; ++d) partials_->sums[at * p_.value_dim + d] = partial.sum(sums[d]);
  }

  void finish(const AttentionTasks::Task& task, const AttentionSpan& span, std::int64_t i, std::int64_t r) {
    if (span.keys_of(i).empty()) return;
    Row& state = rows_[r];
    float* sums = row(total_, r);
    const std::int64_t token = span.q_first + i, head = head_of(task, r);
    if (p_.sinks != nullptr) {
      const AttentionMerge merge = attention_sink<Sm90Exp>(p_, head).into(&state.m, &state.l);
      for (std::int64_t d = 0; d < p_.value_dim; ++d) sums[d] = merge(sums[d], 0.0f);
    }
    const bool fails = attention_fails(state.m, true);
    const float inverse = div_rn(1.0f, state.l);
    for (std::int64_t d = 0; d < p_.value_dim; ++d)
      sums[d] = fails ? canonical_nan() : attention_output(sums[d], inverse);
    const std::int64_t at = (row_of(p_, span.sequence, token) * p_.num_q_heads + head) * p_.value_dim;
    attention_simd().store(sums, p_.value_dim, p_.dtype,
                           static_cast<unsigned char*>(whole_->out) + at * size_of(p_.dtype));
    if (whole_->lse == nullptr) return;
    whole_->lse[lse_index(p_, span.sequence, token, head)] = fails ? canonical_nan() : attention_lse(state.m, state.l);
  }

  const AttentionTree<AttentionInput>& p_;
  const AttentionParams* whole_;
  const AttentionPartialsParams* partials_;
  AttentionReader read_;
  std::int64_t group_;
  int block_;  // keys per block
  AttentionScores how_;
  std::vector<float> q_, k_, v_, transposed_, scores_;
  std::vector<float> sums_, total_;  // sums_ is O of this split, total_ is O of all earlier splits
  std::vector<AttentionColumns> sees_;
  std::vector<Row> rows_;
  std::optional<AttentionMma> mma_;
};

template <class Params>
void run_forward(const Params& p) {
  note_isa(attention_products(p), p.group_offsets != nullptr ? ", shared prefix" : "");
  const AttentionCall call(p);
  const AttentionTasks tasks(call.params(), Forward::queries_of_tile(p),
                             [](const AttentionSpan& s) { return s.num_queries; });
  parallel_for(tasks.size(), 1, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    Forward forward(call, p);
    for (std::int64_t i = begin; i < end; ++i) forward.run(tasks[i]);
  });
}

}  // namespace

void attention(const AttentionParams& p) {
  check_attention(p);
  check_attention_lists(p);
  const std::int64_t rows = attention_rows(p) * p.num_q_heads;
  if (rows == 0) return;
  // Clears the outputs of queries that are not in use or see no key.
  std::memset(p.out, 0, static_cast<std::size_t>(rows * p.value_dim * size_of(p.dtype)));
  if (p.lse != nullptr) std::fill(p.lse, p.lse + rows, -infinity());
  run_forward(p);
}

void attention_partials(const AttentionPartialsParams& p) {
  check_attention(p);
  check_attention_lists(p);
  const std::int64_t cells = attention_rows(p) * p.num_q_heads * p.num_splits;
  if (cells == 0) return;
  for (std::int64_t i = 0; i < cells; ++i) {
    p.stats[2 * i] = -infinity();
    p.stats[2 * i + 1] = 0.0f;
  }
  std::fill(p.sums, p.sums + cells * p.value_dim, 0.0f);
  run_forward(p);
}

}  // namespace rlk::cpu
