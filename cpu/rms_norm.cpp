// CPU backend of the operator `rms_norm`: distributes rows, and dweight's sums over rows, over threads.
#include "rlk/ops/rms_norm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "float_environment.h"
#include "kernels/rows/rms_norm_check.h"
#include "kernels/rows/rms_norm_row.h"
#include "note_isa.h"
#include "rlk/backends.h"
#include "rms_norm_simd.h"
#include "rows.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kFoldColumns = 256;
constexpr std::int64_t kGroups = kRmsNormBlock / kRmsNormGroupRows;

const RmsNormLanes& lanes() { return RLK_CPU_LANES_IN_USE(rms_norm_simd); }

// The weight as a factor, offset included; empty without a weight.
template <class Params>
std::vector<float> weight_of(const Params& p) {
  if (p.weight == nullptr) return {};
  std::vector<float> weight(static_cast<std::size_t>(p.columns));
  const FloatEnvironment environment;
  lanes().load_weight(static_cast<const unsigned char*>(p.weight), p.weight_dtype, p.weight_offset, p.columns,
                      weight.data());
  return weight;
}

class Backward {
 public:
  explicit Backward(const RmsNormBackwardParams& p) : p_(p), weight_(weight_of(p)) {}

  void run() {
    if (p_.dweight == nullptr) return run_rows(0, p_.num_rows);
    std::vector<float> groups, total(static_cast<std::size_t>(p_.columns), 0.0f);
    if (p_.main_grad != nullptr) std::memcpy(total.data(), p_.main_grad, total.size() * sizeof(float));
    for (std::int64_t block = 0; block < p_.num_rows; block += kRmsNormBlock) {
      const std::int64_t rows = std::min(kRmsNormBlock, p_.num_rows - block);
      const std::int64_t num_groups = rms_norm_groups(rows);
      groups.assign(static_cast<std::size_t>(num_groups * p_.columns), 0.0f);
      // If there are enough groups of rows for all threads, one pass over memory computes everything. Otherwise the
      // threads share the rows in a first pass, and the columns of each group's sums in a second pass.
      if (num_groups >= 2 * num_threads() || num_threads() == 1) {
        run_groups(block, rows, groups.data());
      } else {
        if (p_.dx != nullptr) run_rows(block, rows);
        add_columns(block, rows, groups.data());
      }
      fold(groups.data(), num_groups, block == 0 && p_.main_grad == nullptr, total.data());
    }
    const FloatEnvironment environment;
    lanes().store(total.data(), p_.columns, static_cast<unsigned char*>(p_.dweight), p_.dweight_dtype);
  }

 private:
  RmsNormBackwardRow row(std::int64_t i, std::vector<float>* scratch) const {
    RmsNormBackwardRow r = {};
    r.dy = row_at(p_.dy, p_.dy_rows, i, p_.dtype);
    r.h = row_at(p_.h, p_.h_rows, i, p_.dtype);
    r.d_new_residual = row_at(p_.d_new_residual, p_.d_new_residual_rows, i, p_.dtype);
    r.dx = row_at(p_.dx, p_.dx_rows, i, p_.dtype);
    r.weight = p_.weight == nullptr ? nullptr : weight_.data();
    r.columns = p_.columns;
    r.dtype = p_.dtype;
    r.round_before_weight = p_.round_before_weight;
    r.rstd = p_.rstd[i];
    if (scratch == nullptr) return r;
    const std::int64_t padded = padded_columns(p_.columns);
    scratch->resize(static_cast<std::size_t>(2 * padded));
    r.g = scratch->data();
    r.xhat = scratch->data() + padded;
    return r;
  }

  void run_rows(std::int64_t first, std::int64_t rows) const {
    parallel_for(rows, rows_of_a_task(p_.columns), [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      std::vector<float> scratch;
      for (std::int64_t i = begin; i < end; ++i) lanes().backward_row(row(first + i, &scratch));
    });
  }

  void run_groups(std::int64_t first, std::int64_t rows, float* groups) const {
    const std::int64_t num_groups = rms_norm_groups(rows);
    const std::int64_t grain = std::max<std::int64_t>(rows_of_a_task(p_.columns) / kRmsNormGroupRows, 1);
    parallel_for(num_groups, grain, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      std::vector<float> scratch;
      for (std::int64_t i = begin * kRmsNormGroupRows; i < std::min(end * kRmsNormGroupRows, rows); ++i) {
        RmsNormBackwardRow r = row(first + i, &scratch);
        r.sums = groups + i / kRmsNormGroupRows * p_.columns;
        p_.dx != nullptr ? lanes().backward_row(r) : lanes().add_to_sums(r, 0, p_.columns);
      }
    });
  }

  void add_columns(std::int64_t first, std::int64_t rows, float* groups) const {
    const std::int64_t num_groups = rms_norm_groups(rows);
    const std::int64_t slices = (p_.columns + kFoldColumns - 1) / kFoldColumns;
    parallel_for(num_groups * slices, 1, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t group = task / slices, column = task % slices * kFoldColumns;
        const std::int64_t last = std::min((group + 1) * kRmsNormGroupRows, rows);
        for (std::int64_t i = group * kRmsNormGroupRows; i < last; ++i) {
          RmsNormBackwardRow r = row(first + i, nullptr);
          r.sums = groups + group * p_.columns + column;
          lanes().add_to_sums(r, column, std::min(kFoldColumns, p_.columns - column));
        }
      }
    });
  }

  // Computes a block's tree over its groups. The tree's sum is added to `total`, or becomes `total` for the first
  // block.
  void fold(float* groups, std::int64_t num_groups, bool is_first, float* total) const {
    const std::int64_t slices = (p_.columns + kFoldColumns - 1) / kFoldColumns;
    const std::int64_t grain = std::max<std::int64_t>(kTaskElements / (num_groups * kFoldColumns), 1);
    parallel_for(slices, grain, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      const std::int64_t k0 = begin * kFoldColumns, k1 = std::min(end * kFoldColumns, p_.columns);
      for (std::int64_t width = kGroups, num = num_groups; width > 1; width /= 2, num = (num + 1) / 2) {
        for (std::int64_t i = 0; i < (num + 1) / 2; ++i) {
          float* to = groups + i * p_.columns;
          const float *a = groups + 2 * i * p_.columns, *b = a + p_.columns;
          if (2 * i + 1 < num) {
            for (std::int64_t k = k0; k < k1; ++k) to[k] = add_rn(a[k], b[k]);
          } else {
            for (std::int64_t k = k0; k < k1; ++k) to[k] = add_rn(a[k], 0.0f);
          }
        }
      }
      for (std::int64_t k = k0; k < k1; ++k) total[k] = is_first ? groups[k] : add_rn(total[k], groups[k]);
    });
  }

  const RmsNormBackwardParams& p_;
  std::vector<float> weight_;
};

}  // namespace

void rms_norm(const RmsNormParams& p) {
  check_rms_norm(p);
  note_isa();
  const std::vector<float> weight = weight_of(p);
  parallel_for(p.num_rows, rows_of_a_task(p.columns), [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    std::vector<float> scratch(static_cast<std::size_t>(padded_columns(p.columns)));
    for (std::int64_t i = begin; i < end; ++i) {
      RmsNormRow r = {};
      r.x = row_at(p.x, p.x_rows, i, p.dtype);
      r.residual = row_at(p.residual, p.residual_rows, i, p.dtype);
      r.new_residual = row_at(p.new_residual, p.new_residual_rows, i, p.dtype);
      r.y = row_at(p.y, p.y_rows, i, p.dtype);
      r.weight = p.weight == nullptr ? nullptr : weight.data();
      r.columns = p.columns;
      r.dtype = p.dtype;
      r.round_before_weight = p.round_before_weight;
      r.h = scratch.data();
      const float rstd = rms_norm_rstd(lanes().load_row(r), p.columns, p.eps);
      if (p.rstd != nullptr) p.rstd[i] = is_nan(rstd) ? canonical_nan() : rstd;
      if (p.y != nullptr) lanes().store_row(r, rstd);
    }
  });
}

void rms_norm_backward(const RmsNormBackwardParams& p) {
  check_rms_norm_backward(p);
  if (p.columns == 0 || (p.dx == nullptr && p.dweight == nullptr)) return;
  Backward(p).run();
}

}  // namespace rlk::cpu
