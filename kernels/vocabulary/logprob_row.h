// One row of a logprob call as a kernel reads and writes it: the target, the temperature, the kept set and the results.
// T is a tag type for the elements of the logits, with Storage and load.
#pragma once

#include "rlk/load_index.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/logprob.h"

namespace rlk {

RLK_DEVICE std::int64_t target_of(const LogprobInput& p, std::int64_t row) {
  return load_index(p.target, p.target_dtype, p.target_rows.offset(row));
}
RLK_DEVICE float temperature_of(const LogprobInput& p, std::int64_t row) {
  return p.temperature ? p.temperature[row] : p.temperature_value;
}
RLK_DEVICE float inverse_softcap(const LogprobInput& p) { return p.softcap > 0.0f ? div_rn(1.0f, p.softcap) : 0.0f; }
template <class T>
RLK_DEVICE const typename T::Storage* row_of(const LogprobInput& p, std::int64_t row) {
  return static_cast<const typename T::Storage*>(p.logits) + p.logits_rows.offset(row);
}

// z of the target, or NaN if this shard does not hold the target's column.
template <class T>
RLK_DEVICE float target_z(const LogprobInput& p, std::int64_t row, std::int64_t target) {
  const std::int64_t local = target - p.vocab_start;
  if (target < 0 || target >= p.valid_vocab || local < 0 || local >= p.num_columns) return canonical_nan();
  const float z = scaled_logit(T::load(row_of<T>(p, row)[local]), p.logit_scale, p.softcap, inverse_softcap(p));
  return is_nan(z) ? canonical_nan() : z;
}

// The range of kept_ids that lists a row's kept columns: [begin, end). The range is empty if all columns of the row are
// kept.
struct KeptRange {
  std::int64_t begin = 0, end = 0;
  bool bad = false;
  RLK_DEVICE bool restricts() const { return end > begin; }
};
RLK_DEVICE KeptRange kept_range(const LogprobInput& p, std::int64_t row) {
  if (!p.kept_offsets) return {};
  const std::int64_t begin = p.kept_offsets[row], end = p.kept_offsets[row + 1];
  if (begin < 0 || end < begin || end > p.kept_size) return {0, 0, true};
  return {begin, end, false};
}

// Calls mark(column id) for this thread's share of a kept list, and for the target, which is always kept. Returns
// whether any id of the list is out of range.
template <class Mark>
RLK_DEVICE bool scan_kept(const LogprobInput& p, const KeptRange& kept, std::int64_t target, int thread, int threads,
                          Mark mark) {
  bool bad = false;
  for (std::int64_t i = kept.begin + thread; i < kept.end; i += threads) {
    const std::int64_t id = p.kept_ids[i];
    bad |= id < 0 || id >= p.valid_vocab;
    mark(id);
  }
  if (thread == 0) mark(target);
  return bad;
}

// One thread writes the wanted outputs of row `row`. Params are those of a forward or of a merge.
template <class Params>
RLK_DEVICE void store_outputs(const Params& p, std::int64_t row, const LogprobOutputs& o) {
  if (p.logprob) p.logprob[row] = o.logprob;
  if (p.lse) p.lse[row] = o.lse;
  if (p.entropy) p.entropy[row] = o.entropy;
  if (p.sum_p_sq) p.sum_p_sq[row] = o.sum_p_sq;
  if (p.status) p.status[row] = o.status;
}
RLK_DEVICE void write_outputs(const LogprobParams& p, std::int64_t row, const SoftmaxStats& root, float target_z) {
  if (p.stats) return store_stats(root, target_z, p.stats + row * kStatsFields);
  store_outputs(p, row, logprob_outputs(root, target_z, temperature_of(p, row)));
}
RLK_DEVICE void write_ignored(const LogprobParams& p, std::int64_t row) {
  write_outputs(p, row, identity_stats(), infinity());
}

// One thread computes row `row` from the statistics of all shards.
RLK_DEVICE void merge_row(const LogprobMergeParams& p, std::int64_t row) {
  SoftmaxStats node[kNumParts];
  float sum_z[kNumParts] = {};
  float target_z = canonical_nan();
#pragma unroll
  for (int i = 0; i < kNumParts; ++i) {
    node[i] = identity_stats();
    if (i < p.num_shards) {
      const float* s = p.stats + (i * p.num_rows + row) * kStatsFields;
      node[i] = {s[0], s[1], s[2], s[3]};
      sum_z[i] = s[3];
      if (!is_nan(s[4])) target_z = s[4];
    }
  }
#pragma unroll
  for (int distance = 1; distance < kNumParts; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNumParts; i += 2 * distance) {
      node[i] = combine(node[i], node[i + distance]);
      sum_z[i] = add_rn(sum_z[i], sum_z[i + distance]);
    }
  }
  const float temperature = p.temperature ? p.temperature[row] : p.temperature_value;
  LogprobOutputs o = logprob_outputs(node[0], target_z, temperature);
  const bool is_ignored = target_z == infinity() && node[0].m == -infinity();
  if (p.label_smoothing != 0.0f && !is_ignored) {
    o.logprob =
        smoothed_logprob(o.logprob, o.lse, sum_z[0], static_cast<float>(p.valid_vocab), temperature, p.label_smoothing);
  }
  store_outputs(p, row, o);
}

}  // namespace rlk
