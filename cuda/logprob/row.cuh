// What one row of a call means on the device: its target, temperature, kept set, and where its results go.
// Shared by the forward and the backward kernels.
#pragma once

#include "../common/element.cuh"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ std::int64_t load_index(const void* ids, DType dtype, std::int64_t i) {
  return dtype == DType::kInt64 ? static_cast<const std::int64_t*>(ids)[i] : static_cast<const std::int32_t*>(ids)[i];
}
__device__ __forceinline__ std::int64_t target_of(const LogprobInput& p, std::int64_t row) {
  return load_index(p.target, p.target_dtype, p.target_rows.offset(row));
}
__device__ __forceinline__ float temperature_of(const LogprobInput& p, std::int64_t row) {
  return p.temperature ? p.temperature[row] : p.temperature_value;
}
__device__ __forceinline__ float inverse_softcap(const LogprobInput& p) {
  return p.softcap > 0.0f ? div_rn(1.0f, p.softcap) : 0.0f;
}
template <class T>
__device__ __forceinline__ const typename T::Storage* row_of(const LogprobInput& p, std::int64_t row) {
  return static_cast<const typename T::Storage*>(p.logits) + p.logits_rows.offset(row);
}

// z of the target, NaN where this shard does not hold it.
template <class T>
__device__ __forceinline__ float target_z(const LogprobInput& p, std::int64_t row, std::int64_t target) {
  const std::int64_t local = target - p.vocab_start;
  if (target < 0 || target >= p.valid_vocab || local < 0 || local >= p.num_columns) return canonical_nan();
  const float z = scaled_logit(T::load(row_of<T>(p, row)[local]), p.logit_scale, p.softcap, inverse_softcap(p));
  return is_nan(z) ? canonical_nan() : z;
}

// The kept list of a row: [begin, end) of kept_ids; empty where the row is not restricted.
struct KeptRange {
  std::int64_t begin = 0, end = 0;
  bool bad = false;
  __device__ __forceinline__ bool restricts() const { return end > begin; }
};
__device__ __forceinline__ KeptRange kept_range(const LogprobInput& p, std::int64_t row) {
  if (!p.kept_offsets) return {};
  const std::int64_t begin = p.kept_offsets[row], end = p.kept_offsets[row + 1];
  if (begin < 0 || end < begin || end > p.kept_size) return {0, 0, true};
  return {begin, end, false};
}

// Calls mark(column id) for this thread's share of a kept list and for the target, which is always kept; true where an
// id is out of range.
template <class Mark>
__device__ __forceinline__ bool scan_kept(const LogprobInput& p, const KeptRange& kept, std::int64_t target, int thread,
                                          int threads, Mark mark) {
  bool bad = false;
  for (std::int64_t i = kept.begin + thread; i < kept.end; i += threads) {
    const std::int64_t id = p.kept_ids[i];
    bad |= id < 0 || id >= p.valid_vocab;
    mark(id);
  }
  if (thread == 0) mark(target);
  return bad;
}

// Writes what was asked for of row `row`; one thread. Params: of a forward or of a merge.
template <class Params>
__device__ __forceinline__ void store_outputs(const Params& p, std::int64_t row, const LogprobOutputs& o) {
  if (p.logprob) p.logprob[row] = o.logprob;
  if (p.lse) p.lse[row] = o.lse;
  if (p.entropy) p.entropy[row] = o.entropy;
  if (p.sum_p_sq) p.sum_p_sq[row] = o.sum_p_sq;
  if (p.status) p.status[row] = o.status;
}
__device__ __forceinline__ void write_outputs(const LogprobParams& p, std::int64_t row, const SoftmaxStats& root,
                                              float target_z) {
  if (p.stats) return store_stats(root, target_z, p.stats + row * kStatsFields);
  store_outputs(p, row, logprob_outputs(root, target_z, temperature_of(p, row)));
}
__device__ __forceinline__ void write_ignored(const LogprobParams& p, std::int64_t row) {
  write_outputs(p, row, identity_stats(), infinity());
}

}  // namespace rlk::cuda
