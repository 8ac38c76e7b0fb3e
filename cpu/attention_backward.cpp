// CPU backend of the backward of the operator `attention`: delta, then dq by tasks of queries, then dk and dv by tasks
// of keys. Each chain belongs to one task, so no sum needs several threads, but scores are computed twice. With trees,
// a task of keys goes through the segments whose queries see these keys.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "attention_mma.h"
#include "attention_tiles.h"
#include "float_environment.h"
#include "kernels/attention/check.h"
#include "kernels/attention/row.h"
#include "kernels/attention/sinks.h"
#include "rlk/backends.h"
#include "rlk/math/mma_model.h"
#include "rlk/ops/attention.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTileRows = 64;  // rows per tile of dq: queries times heads

// Rows of an array with `dim` columns, as fp32, padded with +0.
struct Tile {
  std::int64_t dim = 0, columns = 0;
  std::vector<float> floats;

  Tile() = default;
  Tile(std::int64_t dim_of_array, std::int64_t rows)
      : dim(dim_of_array),
        columns(padded_columns(dim_of_array)),
        floats(static_cast<std::size_t>(rows * padded_columns(dim_of_array))) {}
  float* data() { return floats.data(); }
  const float* data() const { return floats.data(); }
  float* row(std::int64_t r) { return floats.data() + r * columns; }
  void clear() { std::fill(floats.begin(), floats.end(), 0.0f); }
};

// Tiles of one thread, and the computations on tiles that the passes share.
class Tiles {
 public:
  Tiles(const AttentionCall& call, const AttentionBackwardParams& p)
      : p(p), spans(call.params()), read(spans), group(p.num_q_heads / p.num_kv_heads), how(scores_of(p)) {}

  // Prepares products of at most `rows` rows. The products use the arithmetic of sm_90's matrix unit if the call asks
  // for it.
  void begin_products(std::int64_t rows) {
    const LinearUnit unit = {attention_products(p), p.dtype};
    if (unit.arithmetic != Arithmetic::kIeee) mma_.emplace(unit, rows);
  }
  // to[r][j] = a[r] . b[j] for the `count` rows of the tile b; columns from `count` to `width` are +0.
  void multiply(const Tile& a, int rows, const Tile& b, int count, int width, float* to) {
    const AttentionLanes& lanes = attention_simd();
    transposed_.resize(static_cast<std::size_t>(kTileKeys * b.columns));
    lanes.transpose(b.data(), count, b.dim, b.columns, transposed_.data());
    if (mma_) {
      mma_->multiply(a.data(), rows, a.columns, transposed_.data(), b.dim, width, to);
    } else {
      lanes.multiply(a.data(), rows, a.columns, transposed_.data(), b.dim, width, to);
    }
  }
  // Adds weights times the `width` rows of x to sums[r]. The chain skips a row of x if row r does not see it, or if its
  // weight is kNothing, the mark of an addend to leave out.
  void accumulate(const std::vector<float>& weights, const AttentionColumns* sees, int rows, int width, bool holes,
                  const Tile& x, Tile* sums) {
    if (mma_) {
      mma_->accumulate_seen(weights.data(), sees, rows, width, x.data(), x.columns, sums->data());
    } else {
      attention_simd().accumulate(weights.data(), sees, rows, holes, x.data(), x.columns, sums->data());
    }
  }

  // Tiles of q and k, and of values.
  Tile tile(std::int64_t rows) const { return {p.head_dim, rows}; }
  Tile values(std::int64_t rows) const { return {p.value_dim, rows}; }
  static std::vector<float> scores(std::int64_t rows) {
    return std::vector<float>(static_cast<std::size_t>(rows * kTileKeys));
  }

  std::int64_t index(const AttentionSpan& span, std::int64_t i, std::int64_t head) const {
    return lse_index(p, span.sequence, span.q_first + i, head);
  }
  float u(const AttentionSpan& span, std::int64_t i, std::int64_t head) const {
    return mul_rn(p.lse[index(span, i, head)], kLog2e);
  }
  float delta(const AttentionSpan& span, std::int64_t i, std::int64_t head) const {
    return static_cast<const float*>(p.workspace)[index(span, i, head)];
  }

  // Stores a row of dq, dk or dv, contiguous [tokens, heads, columns].
  void store(Tile* gradients, std::int64_t r, float scale, void* to, std::int64_t token_and_head) const {
    float* sums = gradients->row(r);
    for (std::int64_t d = 0; d < gradients->dim; ++d) sums[d] = add_rn(mul_rn(sums[d], scale), 0.0f);
    attention_simd().store(sums, gradients->dim, p.dtype,
                           static_cast<unsigned char*>(to) + token_and_head * gradients->dim * size_of(p.dtype));
  }
  void read_query(const AttentionHeads& a, const AttentionSpan& span, std::int64_t i, std::int64_t head, Tile* to,
                  std::int64_t r) const {
    read.query(a, to->dim, span, i, head, to->row(r));
  }
  void read_key(const AttentionHeads& a, const AttentionSpan& span, std::int64_t j, std::int64_t kv_head, Tile* to,
                std::int64_t r) {
    read.key(a, to->dim, span, j, kv_head, to->row(r));
  }

  const AttentionBackwardParams& p;
  const AttentionTree<AttentionInput>& spans;  // the call's params with its paths, from which spans are computed
  AttentionReader read;
  std::int64_t group;
  AttentionScores how;

 private:
  std::vector<float> transposed_;
  std::optional<AttentionMma> mma_;
};

class Deltas : Tiles {
 public:
  Deltas(const AttentionCall& call, const AttentionBackwardParams& p)
      : Tiles(call, p), out_(values(1)), dout_(values(1)) {}

  void run(const AttentionSpan& span, std::int64_t i) {
    if (span.keys_of(i).empty()) return;
    for (std::int64_t h = 0; h < p.num_q_heads; ++h) {
      read_query(p.out, span, i, h, &out_, 0);
      read_query(p.dout, span, i, h, &dout_, 0);
      const std::int64_t at = index(span, i, h);
      const float delta = attention_simd().dot(dout_.data(), out_.data(), p.value_dim);
      static_cast<float*>(p.workspace)[at] = p.dlse == nullptr ? delta : sub_rn(delta, p.dlse[at]);
    }
  }

 private:
  Tile out_, dout_;
};

class QueryGradients : Tiles {
 public:
  QueryGradients(const AttentionCall& call, const AttentionBackwardParams& p) : Tiles(call, p) {
    const std::int64_t rows = queries_of_tile(p) * group;
    q_ = tile(rows);
    dout_ = values(rows);
    dq_ = tile(rows);
    chains_ = tile(rows);
    k_ = tile(kTileKeys);
    v_ = values(kTileKeys);
    scores_ = scores(rows);
    dp_ = scores(rows);
    sees_.resize(static_cast<std::size_t>(rows));
    begin_products(rows);
  }
  static std::int64_t queries_of_tile(const AttentionInput& p) {
    return std::max<std::int64_t>(kTileRows * p.num_kv_heads / std::max<std::int64_t>(p.num_q_heads, 1), 1);
  }

  void run(const AttentionTasks::Task& task) {
    const AttentionSpan span(spans, task.sequence);
    const AttentionRange queries = {task.first, std::min(task.first + queries_of_tile(p), span.num_queries)};
    const AttentionRange keys = span.keys_of(queries);
    if (keys.empty()) return;
    const std::int64_t num_rows = (queries.last - queries.first) * group;
    const auto query_of = [&](std::int64_t r) { return queries.first + r / group; };
    const auto head_of = [&](std::int64_t r) { return task.kv_head * group + r % group; };
    for (std::int64_t r = 0; r < num_rows; ++r) {
      if (span.keys_of(query_of(r)).empty()) continue;
      read_query(p.q, span, query_of(r), head_of(r), &q_, r);
      read_query(p.dout, span, query_of(r), head_of(r), &dout_, r);
    }
    dq_.clear();
    const AttentionLanes& lanes = attention_simd();
    const int width = attention_block(p.head_dim);
    const std::int64_t first = keys.first / width * width;
    for (std::int64_t begin = (keys.last - 1) / width * width; begin >= first; begin -= width) {
      const AttentionRange block = {std::max(begin, keys.first), std::min(begin + width, keys.last)};
      k_.clear();
      v_.clear();
      for (std::int64_t j = block.first; j < block.last; ++j) {
        read_key(p.k, span, j, task.kv_head, &k_, j - begin);
        read_key(p.v, span, j, task.kv_head, &v_, j - begin);
      }
      multiply(q_, static_cast<int>(num_rows), k_, width, width, scores_.data());
      multiply(dout_, static_cast<int>(num_rows), v_, width, width, dp_.data());
      bool holes = false;
      for (std::int64_t r = 0; r < num_rows; ++r) {
        sees_[r] = within(span.keys_of(query_of(r)), begin, width);
        if (sees_[r].first >= sees_[r].last) {
          sees_[r] = {0, 0};
          continue;
        }
        const float u_of_row = u(span, query_of(r), head_of(r)), delta_of_row = delta(span, query_of(r), head_of(r));
        holes |= lanes.gradients(scores_.data() + r * kTileKeys, dp_.data() + r * kTileKeys, sees_[r], how, &u_of_row,
                                 &delta_of_row, 0, p.exp, p.dtype);
      }
      chains_.clear();
      accumulate(dp_, sees_.data(), static_cast<int>(num_rows), width, holes, k_, &chains_);
      lanes.add(dq_.data(), chains_.data(), num_rows * dq_.columns);
    }
    for (std::int64_t r = 0; r < num_rows; ++r) {
      if (span.keys_of(query_of(r)).empty()) continue;
      const std::int64_t token = row_of(p, span.sequence, span.q_first + query_of(r));
      store(&dq_, r, p.softmax_scale, p.dq, token * p.num_q_heads + head_of(r));
    }
  }

 private:
  Tile q_, dout_, k_, v_;
  std::vector<float> scores_, dp_;
  Tile dq_, chains_;  // dq_: sums over the earlier blocks; chains_: chains of one block
  std::vector<AttentionColumns> sees_;
};

class KeyGradients : Tiles {
 public:
  KeyGradients(const AttentionCall& call, const AttentionBackwardParams& p)
      : Tiles(call, p),
        k_(tile(kTileKeys)),
        v_(values(kTileKeys)),
        dk_(tile(kTileKeys)),
        dv_(values(kTileKeys)),
        dk_chains_(tile(kTileKeys)),
        dv_chains_(values(kTileKeys)),
        q_(tile(kTileKeys)),
        dout_(values(kTileKeys)),
        scores_(scores(kTileKeys)),
        dp_(scores(kTileKeys)) {
    begin_products(kTileKeys);
  }

  // Number of keys that a segment of a tree inherits from its ancestors; 0 without trees.
  static std::int64_t inherited(const AttentionInput& p, const AttentionSpan& span) {
    return p.parents != nullptr ? span.position(0) : 0;
  }
  static std::int64_t own_keys(const AttentionInput& p, const AttentionSpan& span) {
    return span.num_keys - inherited(p, span);
  }

  void run(const AttentionTasks::Task& task) {
    const AttentionSpan span(spans, task.sequence);
    const std::int64_t first = inherited(p, span) + task.first;
    const AttentionRange keys = {first, std::min(first + kTileKeys, span.num_keys)};
    if (p.parents == nullptr && span.queries_of(keys).empty()) return;
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      if (span.queries_of(j).empty()) continue;
      read_key(p.k, span, j, task.kv_head, &k_, j - keys.first);
      read_key(p.v, span, j, task.kv_head, &v_, j - keys.first);
    }
    dk_.clear();
    dv_.clear();
    add_queries(span, keys, task.kv_head);
    for (std::int64_t s = task.sequence + 1; p.parents != nullptr && s < p.num_sequences; ++s) {
      if (AttentionPath(spans, s).passes(spans, task.sequence)) add_queries({spans, s}, keys, task.kv_head);
    }
    const bool packed = p.cu_seqlens_k != nullptr;
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      const std::int64_t token = (packed ? 0 : span.sequence * p.k_tokens) + span.k_first + j;
      store(&dk_, j - keys.first, p.softmax_scale, p.dk, token * p.num_kv_heads + task.kv_head);
      store(&dv_, j - keys.first, 1.0f, p.dv, token * p.num_kv_heads + task.kv_head);
    }
  }

 private:
  // Adds the chains of a sequence's queries to the sums.
  void add_queries(const AttentionSpan& span, AttentionRange keys, std::int64_t kv_head) {
    const AttentionRange queries = span.queries_of(keys);
    if (queries.empty()) return;
    dk_chains_.clear();
    dv_chains_.clear();
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      // Steps of 16 queries are aligned to the position of key 0, so the first block may begin before query 0.
      const std::int64_t n = span.position(queries.first), into = (n % kMmaStepK + kMmaStepK) % kMmaStepK;
      for (std::int64_t begin = queries.first - into; begin < queries.last; begin += kTileKeys) {
        block(span, keys, {begin, std::min(begin + kTileKeys, queries.last)}, h);
      }
    }
    const std::int64_t count = keys.last - keys.first;
    attention_simd().add(dk_.data(), dk_chains_.data(), count * dk_.columns);
    attention_simd().add(dv_.data(), dv_chains_.data(), count * dv_.columns);
  }

  void block(const AttentionSpan& span, AttentionRange keys, AttentionRange queries, std::int64_t head) {
    const AttentionLanes& lanes = attention_simd();
    const auto num_rows = static_cast<int>(keys.last - keys.first);
    const auto count = static_cast<int>(queries.last - queries.first);
    const int width = count > kTileKeys / 2 ? kTileKeys : kTileKeys / 2;
    q_.clear();
    dout_.clear();
    for (int i = 0; i < count; ++i) {
      if (queries.first + i < 0 || span.keys_of(queries.first + i).empty()) continue;
      read_query(p.q, span, queries.first + i, head, &q_, i);
      read_query(p.dout, span, queries.first + i, head, &dout_, i);
      u_[i] = u(span, queries.first + i, head);
      delta_[i] = delta(span, queries.first + i, head);
    }
    multiply(k_, num_rows, q_, count, width, scores_.data());
    multiply(v_, num_rows, dout_, count, width, dp_.data());
    bool holes = false;
    for (int r = 0; r < num_rows; ++r) {
      sees_[r] = within(span.queries_of(keys.first + r), queries.first, kTileKeys);
      sees_[r].last = std::min(sees_[r].last, count);
      if (sees_[r].first >= sees_[r].last) {
        sees_[r] = {0, 0};
        continue;
      }
      holes |= lanes.gradients(scores_.data() + r * kTileKeys, dp_.data() + r * kTileKeys, sees_[r], how, u_, delta_, 1,
                               p.exp, p.dtype);
    }
    accumulate(scores_, sees_, num_rows, width, holes, dout_, &dv_chains_);
    accumulate(dp_, sees_, num_rows, width, holes, q_, &dk_chains_);
  }

  Tile k_, v_, dk_, dv_, dk_chains_, dv_chains_, q_, dout_;
  std::vector<float> scores_, dp_;
  float u_[kTileKeys] = {}, delta_[kTileKeys] = {};
  AttentionColumns sees_[kTileKeys] = {};
};

template <class Pass>
void run_tasks(const AttentionCall& call, const AttentionBackwardParams& p, const AttentionTasks& tasks) {
  parallel_for(tasks.size(), 1, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    Pass pass(call, p);
    for (std::int64_t i = begin; i < end; ++i) pass.run(tasks[i]);
  });
}

}  // namespace

void attention_backward(const AttentionBackwardParams& p) {
  check_attention(p);
  check_attention_lists(p);
  const auto clear = [&](void* to, std::int64_t elements) {
    if (to != nullptr) std::memset(to, 0, static_cast<std::size_t>(elements * size_of(p.dtype)));
  };
  // Clears gradients of tokens that are not in use, of queries that see no key, and of keys that no query sees.
  clear(p.dq, attention_rows(p) * p.num_q_heads * p.head_dim);
  clear(p.dk, attention_keys(p) * p.num_kv_heads * p.head_dim);
  clear(p.dv, attention_keys(p) * p.num_kv_heads * p.value_dim);
  if (p.dsinks != nullptr) std::fill_n(p.dsinks, p.num_q_heads, 0.0f);
  if (attention_rows(p) * p.num_q_heads == 0 || attention_keys(p) == 0) return;
  const AttentionCall call(p);
  for (std::int64_t b = 0; b < p.num_sequences; ++b) {
    const AttentionSpan span(call.params(), b);
    parallel_for(span.num_queries, std::max<std::int64_t>(16384 / (p.num_q_heads * p.value_dim), 1),
                 [&](std::int64_t begin, std::int64_t end) {
                   const FloatEnvironment environment;
                   Deltas deltas(call, p);
                   for (std::int64_t i = begin; i < end; ++i) deltas.run(span, i);
                 });
  }
  if (p.dq != nullptr) {
    run_tasks<QueryGradients>(call, p,
                              AttentionTasks(call.params(), QueryGradients::queries_of_tile(p),
                                             [](const AttentionSpan& s) { return s.num_queries; }));
  }
  if (p.dk != nullptr) {
    run_tasks<KeyGradients>(call, p, AttentionTasks(call.params(), kTileKeys, [&](const AttentionSpan& s) {
                              return KeyGradients::own_keys(p, s);
                            }));
  }
  if (p.dsinks != nullptr) {
    parallel_for(p.num_q_heads, 1, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      float sums[kSinkGroups];
      for (std::int64_t h = begin; h < end; ++h) {
        attention_sink_gradient<Sm90Exp>(p, static_cast<const float*>(p.workspace), attention_rows(p), h, sums);
      }
    });
  }
}

}  // namespace rlk::cpu
