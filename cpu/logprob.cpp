// CPU backend of the operator `logprob`: checks of memory safety, parameters of a row, and the distribution of rows and
// parts over threads.
#include "rlk/ops/logprob.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "float_environment.h"
#include "kernels/vocabulary/logprob_check.h"
#include "logprob_simd.h"
#include "note_isa.h"
#include "rlk/backends.h"
#include "rlk/load_index.h"
#include "rlk/math/exp2.h"
#include "rlk/math/expm1.h"
#include "rlk/math/half.h"
#include "rlk/math/mufu_model.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/math/tanh.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

// Columns per task. A task of fewer columns would save less time than waking a thread costs.
constexpr std::int64_t kTaskColumns = 16384;
constexpr std::int64_t kTasksPerThread = 4;  // several tasks per thread, so that one slow task does not keep all others
                                             // waiting

const LogprobLanes& lanes() { return RLK_CPU_LANES_IN_USE(logprob_simd); }

float load_logit(const unsigned char* logits, DType dtype, std::int64_t column) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, logits + 4 * column, sizeof x);
    return x;
  }
  std::uint16_t h;
  std::memcpy(&h, logits + 2 * column, sizeof h);
  return dtype == DType::kBFloat16 ? float_of_bf16(h) : float_of_f16(h);
}

void store_logit(unsigned char* logits, DType dtype, std::int64_t column, float x) {
  if (dtype == DType::kFloat32) {
    const float y = is_nan(x) ? canonical_nan() : x;
    std::memcpy(logits + 4 * column, &y, sizeof y);
    return;
  }
  const std::uint16_t h = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
  std::memcpy(logits + 2 * column, &h, sizeof h);
}

float inverse_softcap(const LogprobInput& p) { return p.softcap == 0.0f ? 0.0f : div_rn(1.0f, p.softcap); }

// A row's parameters, computed without its logits.
struct Row {
  std::int64_t target;
  bool target_valid;
  float temperature;
  std::int32_t failed;  // status bits for which the row's statistics are not computed
  const std::int32_t* kept;
  std::int64_t kept_count;  // 0: every column is kept

  bool target_here(const LogprobInput& p) const {
    return target_valid && target >= p.vocab_start && target - p.vocab_start < p.num_columns;
  }
};

std::int64_t target_of(const LogprobInput& p, std::int64_t row) {
  return load_index(p.target, p.target_dtype, p.target_rows.offset(row));
}

// Must not be called for ignored rows, whose temperature and kept set stay unread.
Row row_of(const LogprobInput& p, std::int64_t row) {
  Row r = {target_of(p, row), false, p.temperature ? p.temperature[row] : p.temperature_value, 0, nullptr, 0};
  r.target_valid = r.target >= 0 && r.target < p.valid_vocab;
  if (!is_temperature(r.temperature)) r.failed |= kBadTemperature;
  if (p.kept_offsets == nullptr) return r;
  const std::int64_t begin = p.kept_offsets[row], end = p.kept_offsets[row + 1];
  if (begin < 0 || end < begin || end > p.kept_size) {
    r.failed |= kBadKept;
    return r;
  }
  const bool valid =
      std::all_of(p.kept_ids + begin, p.kept_ids + end, [&](std::int32_t id) { return id >= 0 && id < p.valid_vocab; });
  if (!valid) r.failed |= kBadKept;
  r.kept = p.kept_ids + begin;
  r.kept_count = end - begin;
  return r;
}

const unsigned char* logits_of(const LogprobInput& p, std::int64_t row) {
  return static_cast<const unsigned char*>(p.logits) + p.logits_rows.offset(row) * size_of(p.dtype);
}

// Bitmap of the kept columns among [first, first + columns), a range that ends at valid_vocab or before. The result is
// null if the row has no kept set.
const std::uint64_t* kept_bitmap(const LogprobInput& p, const Row& r, std::int64_t first, std::int64_t columns,
                                 std::vector<std::uint64_t>* memory) {
  if (r.kept_count == 0) return nullptr;
  constexpr std::int64_t kWordsPerLeaf = kLeafColumns / 64;
  memory->assign((columns + kLeafColumns - 1) / kLeafColumns * kWordsPerLeaf, 0);
  const auto mark = [&](std::int64_t id) {
    const std::int64_t column = id - p.vocab_start - first;
    if (column >= 0 && column < columns) (*memory)[column / 64] |= std::uint64_t{1} << (column % 64);
  };
  std::for_each(r.kept, r.kept + r.kept_count, mark);
  if (r.target_valid) mark(r.target);
  return memory->data();
}

// A range of columns, [first, first + columns), counted from the first column in memory.
struct Run {
  std::int64_t first, columns;
};

// Columns of part `part` that are in memory, without columns past valid_vocab.
Run run_of_part(const LogprobInput& p, int part) {
  const std::int64_t begin = std::max(part_cut(p.vocab_size, part), p.vocab_start);
  const std::int64_t end = std::min({part_cut(p.vocab_size, part + 1), p.vocab_start + p.num_columns, p.valid_vocab});
  return {begin - p.vocab_start, std::max<std::int64_t>(end - begin, 0)};
}

bool wants_moments(const LogprobParams& p) { return p.stats || p.entropy || p.sum_p_sq; }

SoftmaxStats run_stats(const LogprobParams& p, std::int64_t row, const Row& r, Run run,
                       std::vector<std::uint64_t>* memory) {
  if (run.columns == 0) return identity_stats();
  LogprobRow lane_row = {};
  lane_row.logits = logits_of(p, row);
  lane_row.dtype = p.dtype;
  lane_row.exp = p.exp;
  lane_row.moments = wants_moments(p);
  lane_row.c = log2_scale(r.temperature);
  lane_row.logit_scale = p.logit_scale;
  lane_row.softcap = p.softcap;
  lane_row.inverse_softcap = inverse_softcap(p);
  return lanes().stats(lane_row, run.first, run.columns, kept_bitmap(p, r, run.first, run.columns, memory));
}

// Perfect binary tree; `count` is a power of two.
SoftmaxStats tree_of(SoftmaxStats* nodes, std::int64_t count) {
  for (; count > 1; count /= 2) {
    for (std::int64_t i = 0; i < count / 2; ++i) nodes[i] = combine(nodes[2 * i], nodes[2 * i + 1]);
  }
  return nodes[0];
}

struct Outputs {
  float *logprob, *lse, *entropy, *sum_p_sq;
  std::int32_t* status;

  void write(std::int64_t row, const LogprobOutputs& o) const {
    if (logprob) logprob[row] = o.logprob;
    if (lse) lse[row] = o.lse;
    if (entropy) entropy[row] = o.entropy;
    if (sum_p_sq) sum_p_sq[row] = o.sum_p_sq;
    if (status) status[row] = o.status;
  }
};

void finish_row(const LogprobParams& p, std::int64_t row, const SoftmaxStats& root, float target_z, float temperature) {
  if (p.stats) return store_stats(root, target_z, p.stats + row * kStatsFields);
  const Outputs outputs = {p.logprob, p.lse, p.entropy, p.sum_p_sq, p.status};
  outputs.write(row, logprob_outputs(root, target_z, temperature));
}

void finish_ignored(const LogprobParams& p, std::int64_t row) {
  finish_row(p, row, identity_stats(), infinity(), 1.0f);
}

void finish_row(const LogprobParams& p, std::int64_t row, const Row& r, const SoftmaxStats& root) {
  float target_z = canonical_nan();
  if (r.target_here(p)) {
    const float x = load_logit(logits_of(p, row), p.dtype, r.target - p.vocab_start);
    target_z = scaled_logit(x, p.logit_scale, p.softcap, inverse_softcap(p));
    if (is_nan(target_z)) target_z = canonical_nan();
  }
  finish_row(p, row, root, target_z, r.temperature);
}

// Sum of the row's z by rule 5's tree, for the mean of label smoothing.
float sum_of_z(const LogprobParams& p, std::int64_t row, std::vector<float>* nodes) {
  const auto leaves_of = [&](int part) { return (run_of_part(p, part).columns + kLeafColumns - 1) / kLeafColumns; };
  std::size_t leaves = 1;  // leaves per part, rounded up to a power of two
  for (int i = 0; i < kNumParts; ++i) leaves = std::max(leaves, std::bit_ceil(static_cast<std::size_t>(leaves_of(i))));
  nodes->assign(kNumParts * leaves, 0.0f);
  const unsigned char* const logits = logits_of(p, row);
  const float inverse = inverse_softcap(p);
  for (int i = 0; i < kNumParts; ++i) {
    const Run part = run_of_part(p, i);
    for (std::int64_t leaf = 0; leaf < leaves_of(i); ++leaf) {
      const std::int64_t first = part.first + leaf * kLeafColumns;
      const int columns = static_cast<int>(std::min<std::int64_t>(kLeafColumns, part.columns - leaf * kLeafColumns));
      float chains[kNumChains] = {};
      for (int j = 0; j < columns; ++j) {
        const float z = scaled_logit(load_logit(logits, p.dtype, first + j), p.logit_scale, p.softcap, inverse);
        chains[j % kNumChains] = add_rn(chains[j % kNumChains], z);
      }
      (*nodes)[static_cast<std::size_t>(i) * leaves + static_cast<std::size_t>(leaf)] = combine_chains(chains);
    }
  }
  for (std::size_t count = nodes->size(); count > 1; count /= 2) {
    for (std::size_t i = 0; i < count / 2; ++i) (*nodes)[i] = add_rn((*nodes)[2 * i], (*nodes)[2 * i + 1]);
  }
  return is_nan((*nodes)[0]) ? canonical_nan() : (*nodes)[0];
}

// Applies label smoothing to rows whose logprob and lse, or statistics, are already written.
void smooth_rows(const LogprobParams& p) {
  const std::int64_t grain = std::max<std::int64_t>(kTaskColumns / (p.num_columns + 1), 1);
  parallel_for(p.num_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    std::vector<float> nodes;
    for (std::int64_t row = begin; row < end; ++row) {
      if (target_of(p, row) == p.ignore_index) continue;
      const float temperature = p.temperature ? p.temperature[row] : p.temperature_value;
      if (!is_temperature(temperature)) continue;  // the row's results already show the status
      const float sum_z = sum_of_z(p, row, &nodes);
      if (p.stats) {
        float* const stats = p.stats + row * kStatsFields;
        if (!is_nan(stats[0])) stats[3] = sum_z;
      } else {
        p.logprob[row] = smoothed_logprob(p.logprob[row], p.lse[row], sum_z, static_cast<float>(p.valid_vocab),
                                          temperature, p.label_smoothing);
      }
    }
  });
}

// For calls with enough rows that every thread can take whole rows.
void logprob_by_rows(const LogprobParams& p) {
  const std::int64_t fewest = std::max<std::int64_t>(kTaskColumns / (p.num_columns + 1), 1);
  const std::int64_t grain = std::clamp(p.num_rows / (kTasksPerThread * num_threads()), fewest, 8 * fewest);
  parallel_for(p.num_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    std::vector<std::uint64_t> memory;
    for (std::int64_t row = begin; row < end; ++row) {
      if (target_of(p, row) == p.ignore_index) {
        finish_ignored(p, row);
        continue;
      }
      const Row r = row_of(p, row);
      SoftmaxStats parts[kNumParts];
      for (int i = 0; i < kNumParts && r.failed == 0; ++i) parts[i] = run_stats(p, row, r, run_of_part(p, i), &memory);
      finish_row(p, row, r, r.failed != 0 ? failed_stats(r.failed) : tree_of(parts, kNumParts));
    }
  });
}

// For calls with few rows. A task computes a run: 2^k neighbouring leaves of a part. So even a single row gives work to
// every thread.
void logprob_by_runs(const LogprobParams& p, std::int64_t run_columns) {
  std::int64_t runs = 1;  // runs per part, rounded up to a power of two
  for (int i = 0; i < kNumParts; ++i) {
    while (runs * run_columns < run_of_part(p, i).columns) runs *= 2;
  }
  const std::int64_t tasks = kNumParts * runs;  // tasks per row
  std::vector<Row> rows(p.num_rows);
  std::vector<SoftmaxStats> nodes(p.num_rows * tasks, identity_stats());
  const auto ignored = [&](std::int64_t row) { return target_of(p, row) == p.ignore_index; };
  parallel_for(p.num_rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t row = begin; row < end; ++row) {
      if (!ignored(row)) rows[row] = row_of(p, row);
    }
  });
  parallel_for(p.num_rows * tasks, 1, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    std::vector<std::uint64_t> memory;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t row = task / tasks;
      if (ignored(row) || rows[row].failed != 0) continue;
      const Run part = run_of_part(p, static_cast<int>(task % tasks / runs));
      const std::int64_t skipped = task % runs * run_columns;
      if (skipped >= part.columns) continue;
      const Run run = {part.first + skipped, std::min(run_columns, part.columns - skipped)};
      nodes[task] = run_stats(p, row, rows[row], run, &memory);
    }
  });
  const FloatEnvironment environment;
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    if (ignored(row)) {
      finish_ignored(p, row);
    } else {
      const Row& r = rows[row];
      finish_row(p, row, r, r.failed != 0 ? failed_stats(r.failed) : tree_of(&nodes[row * tasks], tasks));
    }
  }
}

// Constants of a row in the contract's formulas for backward.
struct BackwardRow {
  LogprobBackwardRow lanes;
  float a, b, g;
  float d;  // the contract's d, an addend of label smoothing
};

float gradient_at(const float* gradient, const RowLayout& rows, std::int64_t row) {
  return gradient ? gradient[rows.offset(row)] : 0.0f;
}

float probability(float t, Exp exp) {
  if (is_nan(t)) return t;
  if (t < -126.0f) return 0.0f;
  const float bounded = t > 127.0f ? 127.0f : t;
  return exp == Exp::kHardware ? mufu_ex2_sm90_bounded(bounded) : exp2_normal(bounded);
}

float target_gradient(const BackwardRow& r, float x) {
  const LogprobBackwardRow& l = r.lanes;
  const float z = scaled_logit(x, l.logit_scale, l.softcap, l.inverse_softcap);
  const float t = fma_rn(z, l.c, -l.u);
  const float clamped = t < -127.0f ? -127.0f : t;
  float through_one = mul_rn(-r.g, expm1(mul_rn(kLn2, t)));
  if (r.d != 0.0f) through_one = add_rn(through_one, r.d);
  const float dz = fma_rn(probability(t, l.exp), fma_rn(r.b, clamped, r.a), through_one);
  if (l.softcap == 0.0f) return dz;
  if (z == -infinity()) return 0.0f;
  const float h = tanh(mul_rn(mul_rn(x, l.logit_scale), l.inverse_softcap));
  return mul_rn(dz, fma_rn(-h, h, 1.0f));
}

void backward_run(const LogprobBackwardParams& p, std::int64_t row, Run run, std::vector<std::uint64_t>* memory) {
  const int bytes = size_of(p.dtype);
  unsigned char* dlogits = static_cast<unsigned char*>(p.dlogits) + p.dlogits_rows.offset(row) * bytes;
  const auto clear = [&](std::int64_t first, std::int64_t columns) {
    if (columns > 0) std::memset(dlogits + first * bytes, 0, static_cast<std::size_t>(columns * bytes));
  };
  const float dlogprob = gradient_at(p.dlogprob, p.dlogprob_rows, row);
  const float dlse = gradient_at(p.dlse, p.dlse_rows, row);
  const float dentropy = gradient_at(p.dentropy, p.dentropy_rows, row);
  if (target_of(p, row) == p.ignore_index || (dlogprob == 0.0f && dlse == 0.0f && dentropy == 0.0f)) {
    return clear(run.first, run.columns);
  }
  const std::int64_t valid = std::clamp<std::int64_t>(p.valid_vocab - p.vocab_start - run.first, 0, run.columns);
  clear(run.first + valid, run.columns - valid);
  if (valid == 0) return;

  const Row target_row = row_of(p, row);
  const float k = div_rn(p.logit_scale, target_row.temperature);
  BackwardRow r = {};
  LogprobBackwardRow& l = r.lanes;
  l.logits = logits_of(p, row);
  l.dlogits = dlogits;
  l.dtype = p.dtype;
  l.exp = p.exp;
  l.c = log2_scale(target_row.temperature);
  l.u = mul_rn(p.lse[row], kLog2e);
  l.logit_scale = p.logit_scale;
  l.softcap = p.softcap;
  l.inverse_softcap = inverse_softcap(p);
  float of_lse = dlse, of_logprob = dlogprob;
  if (p.label_smoothing != 0.0f) {
    of_lse = fma_rn(-p.label_smoothing, dlogprob, dlse);
    of_logprob = mul_rn(sub_rn(1.0f, p.label_smoothing), dlogprob);
    r.d = div_rn(mul_rn(mul_rn(p.label_smoothing, dlogprob), k), static_cast<float>(p.valid_vocab));
  }
  r.a = mul_rn(fma_rn(-dentropy, p.dentropy ? p.entropy[row] : 0.0f, of_lse), k);
  r.b = mul_rn(mul_rn(-dentropy, kLn2), k);
  r.g = target_row.target_valid || of_logprob == 0.0f ? mul_rn(of_logprob, k) : canonical_nan();
  l.b = r.b;
  l.d = r.d;
  l.w = sub_rn(r.a, r.g);

  const std::int64_t target = target_row.target - p.vocab_start;
  const bool target_here = target_row.target_valid && target >= run.first && target < run.first + valid;
  const float target_x = target_here ? load_logit(l.logits, p.dtype, target) : 0.0f;  // read first, since dlogits may
                                                                                      // be logits
  lanes().backward(l, run.first, valid, kept_bitmap(p, target_row, run.first, valid, memory));
  if (target_here) store_logit(dlogits, p.dtype, target, target_gradient(r, target_x));
}

}  // namespace

void logprob(const LogprobParams& p) {
  check_logprob_input(p);
  RLK_CHECK(parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns).count > 0,
            "logprob: the columns are a whole, aligned group of parts of the vocabulary");
  RLK_CHECK(p.stats || (p.vocab_start == 0 && p.num_columns >= p.valid_vocab),
            "logprob: a shard of the vocabulary gives stats");
  check_logprob_smoothing(p);
  if (p.num_rows == 0) return;
  const std::int64_t wanted = kTasksPerThread * num_threads();
  if (num_threads() == 1 || p.num_rows >= wanted || p.num_rows * p.num_columns <= 2 * kTaskColumns) {
    note_plan([] { return std::string(isa_name(isa())) + " rows"; });
    logprob_by_rows(p);
  } else {
    std::int64_t run_columns = 2048;
    while (run_columns < kTaskColumns && p.num_rows * p.num_columns / run_columns > wanted) run_columns *= 2;
    note_plan([=] { return std::string(isa_name(isa())) + " runs of " + std::to_string(run_columns) + " columns"; });
    logprob_by_runs(p, run_columns);
  }
  if (p.label_smoothing != 0.0f) smooth_rows(p);
}

void logprob_merge(const LogprobMergeParams& p) {
  check_logprob_merge(p);
  const Outputs outputs = {p.logprob, p.lse, p.entropy, p.sum_p_sq, p.status};
  parallel_for(p.num_rows, 4096, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t row = begin; row < end; ++row) {
      SoftmaxStats shards[kNumParts];
      float sums[kNumParts] = {};
      float target_z = canonical_nan();
      for (std::int32_t i = 0; i < p.num_shards; ++i) {
        const float* s = p.stats + (i * p.num_rows + row) * kStatsFields;
        shards[i] = {s[0], s[1], s[2], s[3]};
        sums[i] = s[3];
        if (!is_nan(s[4])) target_z = s[4];
      }
      const SoftmaxStats root = tree_of(shards, p.num_shards);
      const bool ignored = target_z == infinity() && root.m == -infinity();  // the row's temperature is then not read
      const float temperature = p.temperature && !ignored ? p.temperature[row] : p.temperature_value;
      LogprobOutputs o = logprob_outputs(root, target_z, temperature);
      if (p.label_smoothing != 0.0f && !ignored) {
        o.logprob = smoothed_logprob(o.logprob, o.lse, combine_chains(sums), static_cast<float>(p.valid_vocab),
                                     temperature, p.label_smoothing);
      }
      outputs.write(row, o);
    }
  });
}

void logprob_backward(const LogprobBackwardParams& p) {
  check_logprob_backward(p);
  if (p.num_rows == 0 || p.num_columns == 0) return;
  // The computation is elementwise, so a task may begin wherever a word of the kept bitmap begins.
  const std::int64_t run_columns = p.num_rows >= kTasksPerThread * num_threads() ? p.num_columns : kTaskColumns;
  const std::int64_t runs = (p.num_columns + run_columns - 1) / run_columns;
  const std::int64_t grain = std::max<std::int64_t>(kTaskColumns / std::min(run_columns, p.num_columns), 1);
  parallel_for(p.num_rows * runs, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    std::vector<std::uint64_t> memory;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t first = task % runs * run_columns;
      backward_run(p, task / runs, {first, std::min(run_columns, p.num_columns - first)}, &memory);
    }
  });
}

}  // namespace rlk::cpu
