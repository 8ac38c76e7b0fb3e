// THE CONTRACT of `logprob`: log-probabilities of target tokens from logits, forward, vocabulary-parallel and backward.
// Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they show.
//
// Row i, column j (a global column: vocab_start + local column), x = logits[i, j], T = temperature of the row:
//   z = fl(x * logit_scale). With a softcap, h = tanh(fl(z * fl(1 / softcap))) and z = fl(softcap * h). +-Inf stays
//   +-Inf, since an infinite logit is a marker (such as -Inf for a forbidden column), not a value.
//   c = fl(log2e / T);  columns >= valid_vocab are missing. A row may have a kept set (kept_ids): the only columns that
//   a sampler left. Columns outside a non-empty kept set are missing, too.
//   A row is cut into parts and leaves. The statistics (m, S, E, Q) of a leaf, and the tree that combines them, follow
//   rules 4 and 5 (math/softmax_stats.h)
//   lse      = fl(ln2 * fl(m + log2 S))                                          natural log of sum_j exp(z_j / T)
//   logprob  = min(0, fl(ln2 * fl(fma(z_y, c, -m) - log2 S)))
//   entropy  = max(0, fl(lse - fl(fl(E / S) / T)))                               -sum_j p_j ln p_j, nats
//   sum_p_sq = fl(Q / fl(S * S))                                                 sum_j p_j^2
// Backward, from dlogprob, dlse, dentropy (null means 0) and the saved lse and entropy:
//   k = fl(logit_scale / T);  u = fl(lse * log2e);  t_j = fma(z_j, c, -u)        log2 p_j
//   p_j = 2^min(t_j, 127), 0 where t_j < -126                                    exponential of the mode `exp`
//   a = fl(fma(-dentropy, entropy, dlse) * k);  b = fl(fl(-dentropy * ln2) * k);  g = fl(dlogprob * k)
//   w_j = fma(b, max(t_j, -127), fl(a - g))
//   dz_j = fma(p_j, w_j, 0)                                                      j != y
//   dz_y = fma(p_y, fma(b, max(t_y, -127), a), fl(-g * expm1(fl(ln2 * t_y))))    accurate for p_y near 1
//   dlogits_j = dz_j, or fl(dz_j * fma(-h_j, h_j, 1)) under a softcap (0 where z_j = -Inf); rounded to dtype
// Label smoothing by e = label_smoothing over n = valid_vocab columns; e = 0 means none. Kept sets, entropy and
// sum_p_sq are not allowed with it:
//   Z = sum of the z_j of all valid columns, +-Inf included, by rule 5's chains, leaves, parts and tree from +0. A
//       missing column is +0. The statistics of a shard (`stats`) hold Z in place of Q.
//   logprob = fma(e, min(0, fl(fl(fl(Z / n) / T) - lse)), fl(fl(1 - e) * logprob)), NaN where either operand is NaN.
//   a = fl(fma(-e, dlogprob, dlse) * k);  g = fl(fl(fl(1 - e) * dlogprob) * k);  d = fl(fl(fl(e * dlogprob) * k) / n)
//   dz_j and dz_y get the further addend d where d is not 0: dz_j = fma(p_j, w_j, d), and for the target
//   dz_y = fma(p_y, fma(b, max(t_y, -127), a), fl(fl(-g * expm1(fl(ln2 * t_y))) + d))
// So -logprob is the cross-entropy against a label with weight 1 - e on the target plus e spread evenly over all
// columns. A row whose dlogprob, dlse and dentropy are all 0 gets gradients of +0 and is not read. A bad target makes g
// NaN where dlogprob is not 0. Columns past valid_vocab and columns not kept get gradients of +0, even in NaN rows.
// Row i has the same bits for any number of rows, any stride and any shard count. With Exp::kPortable it also has the
// same bits on every backend. Ignored rows (target == ignore_index) are never read: every output is 0 and every
// gradient +0.
// If a status bit other than kLabelMasked is set, the row's logprob is NaN. Its lse, entropy and sum_p_sq are then NaN,
// too, except that kBadTarget leaves them valid. Both functions enqueue their work on `stream`; they neither allocate
// nor synchronise. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// The mode: the exponential that softmax statistics use (rule 3).
enum class Exp : std::uint8_t { kPortable, kHardware };

// Bits of status[i]. logprob is NaN where a bit other than kLabelMasked is set.
enum LogprobStatus : std::int32_t {
  kOk = 0,
  kBadTarget = 1,        // target outside [0, valid_vocab) and not ignore_index
  kNanLogit = 2,         // a NaN among the row's valid columns
  kInfLogit = 4,         // the largest fl(z * c), rounded up to an integer, is 2^21 or more: +Inf, or a tiny T
  kEmptyRow = 8,         // every fl(z * c) is -2^21 or less: all columns -Inf or missing, or a tiny T
  kBadTemperature = 16,  // a per-row temperature that is infinite, NaN or below 2^-126; the row's statistics are not
                         // computed
  kBadKept = 32,         // kept_offsets descend, or a kept id lies outside [0, valid_vocab)
  kLabelMasked = 64,     // the target's own logit is -Inf: logprob is -Inf, not an error
};

constexpr int kNumParts = 8;  // parts of a vocabulary (rule 5)
constexpr int kLeafColumns = 128;
constexpr int kNumChains = 8;    // chains per leaf
constexpr int kStatsFields = 5;  // m, S, E, Q, target z

// The first column of part i (rule 5) in a vocabulary of `vocab_size` columns. Part i holds the columns from
// part_cut(i) to before part_cut(i + 1).
RLK_HD std::int64_t part_cut(std::int64_t vocab_size, int i) {
  const std::int64_t cut = 8 * (i * ((vocab_size + 7) / 8) / 8);
  return i == kNumParts || cut > vocab_size ? vocab_size : cut;
}

// The parts that columns [start, start + columns) of a vocabulary consist of. The columns must be 1, 2, 4 or 8 whole
// parts, and the first part's number a multiple of this count. The tree over these parts is then a subtree of the row's
// tree. Columns past valid_vocab need not be in memory, and a whole row may be wider than the vocabulary. If the
// columns are no such range of parts, count is 0.
struct PartRange {
  int first = 0, count = 0;
};
inline PartRange parts_of_columns(std::int64_t vocab_size, std::int64_t valid_vocab, std::int64_t start,
                                  std::int64_t columns) {
  const std::int64_t end = start + columns;
  const auto valid_end = [&](std::int64_t last) { return last < valid_vocab ? last : valid_vocab; };
  for (int count = kNumParts; count > 0; count /= 2) {
    for (int first = 0; first < kNumParts; first += count) {
      const std::int64_t cut = part_cut(vocab_size, first + count);
      const bool ends = valid_end(end) == valid_end(cut) && (end <= cut || start == 0);
      if (ends && part_cut(vocab_size, first) == start) return {first, count};
    }
  }
  return {};
}

// Inputs of forward and backward: the logits, the targets, and the parameters of the rows.
struct LogprobInput {
  const void* logits = nullptr;                // [num_rows, num_columns], dtype; columns contiguous, any alignment
  const void* target = nullptr;                // [num_rows], target_dtype; global column ids
  const float* temperature = nullptr;          // [num_rows], or null: temperature_value for every row
  const std::int32_t* kept_ids = nullptr;      // [kept_offsets[num_rows]], global column ids, any order
  const std::int64_t* kept_offsets = nullptr;  // [num_rows + 1], or null: no row has a kept set
  DType dtype = DType::kFloat32;               // kFloat32, kBFloat16, kFloat16
  DType target_dtype = DType::kInt64;          // kInt32, kInt64
  Exp exp = Exp::kPortable;
  RowLayout logits_rows;
  RowLayout target_rows;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;  // columns of `logits`; the columns of a shard if vocab_start or vocab_size say so
  std::int64_t vocab_start = 0;  // global id of column 0, at which a part begins (rule 5)
  std::int64_t vocab_size = 0;   // U of rule 5: number of columns that are cut into parts
  std::int64_t valid_vocab = 0;  // <= vocab_size
  std::int64_t kept_size = 0;    // length of kept_ids
  std::int64_t ignore_index = -100;
  float temperature_value = 1.0f;  // finite, >= 2^-126
  float logit_scale = 1.0f;        // finite, > 0
  float softcap = 0.0f;            // finite, > 0; 0 means none
  float label_smoothing = 0.0f;    // in [0, 1); needs logprob and lse, or stats, and no dentropy
};

struct LogprobParams : LogprobInput {
  float* logprob = nullptr;  // [num_rows] each, contiguous; null: not wanted
  float* lse = nullptr;
  float* entropy = nullptr;
  float* sum_p_sq = nullptr;
  std::int32_t* status = nullptr;
  // Vocabulary-parallel form: the statistics of this shard's subtree, [num_rows, 5], in place of the outputs above.
  // A row with a nonzero status has m = NaN, and S holds the status bits. m = -Inf with target z = +Inf marks an
  // ignored row. target z is NaN if the target is in another shard.
  float* stats = nullptr;
  void* workspace = nullptr;  // logprob_workspace_bytes(...) bytes, 16-byte aligned
};

// Bytes of device workspace that `p` needs on `device`, at most 16 MiB; 0 on the CPU.
std::int64_t logprob_workspace_bytes(const LogprobParams& p, Device device);
void logprob(const LogprobParams& p, Device device, Stream stream);

// Computes a row's outputs from the statistics of all shards, in rank order (num_shards 1, 2, 4, 8).
struct LogprobMergeParams {
  const float* stats = nullptr;        // [num_shards, num_rows, 5]
  const float* temperature = nullptr;  // [num_rows], or null: temperature_value
  float* logprob = nullptr;            // [num_rows] each; null: not wanted
  float* lse = nullptr;
  float* entropy = nullptr;
  float* sum_p_sq = nullptr;
  std::int32_t* status = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t valid_vocab = 0;  // needed for label_smoothing
  std::int32_t num_shards = 1;
  float temperature_value = 1.0f;
  float label_smoothing = 0.0f;  // the value that the calls for the shards had; needs logprob and lse
};
void logprob_merge(const LogprobMergeParams& p, Device device, Stream stream);

struct LogprobBackwardParams : LogprobInput {
  const float* lse = nullptr;       // [num_rows], as forward returned it; for a shard the lse of the whole row
  const float* entropy = nullptr;   // [num_rows], needed with dentropy
  const float* dlogprob = nullptr;  // [num_rows] each; null means 0. Any element stride (0: one value for all rows)
  const float* dlse = nullptr;
  const float* dentropy = nullptr;
  RowLayout dlogprob_rows, dlse_rows, dentropy_rows;
  void* dlogits = nullptr;  // [num_rows, num_columns], dtype; may be `logits` itself
  RowLayout dlogits_rows;
};
void logprob_backward(const LogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
