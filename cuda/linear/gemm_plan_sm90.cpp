// The choice of a plan: a model of what bounds a tile, fitted to measurements on an H200 (README.md).
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm_sm90.h"

namespace rlk::cuda {

bool run_plan_bf16(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);
bool run_plan_f16(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);

namespace {

constexpr int kStageK = 64;          // of the contraction, of the tiled kernel
constexpr int kFewRowsStageK = 128;  // of the kernel for few rows
constexpr int kWidestSlice = 128;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_one_stride(const RowLayout& rows, std::int64_t extent) { return rows.inner >= extent; }

bool can_copy(const GemmOperand& operand, std::int64_t extent, std::int64_t contraction) {
  const std::int64_t rows = operand.contraction_contiguous ? extent : contraction, stride = operand.rows.inner_stride;
  return reinterpret_cast<std::uintptr_t>(operand.data) % 16 == 0 && stride % 8 == 0 && stride > 0 &&
         stride < std::int64_t{1} << 38 && is_one_stride(operand.rows, rows);
}

// Weight rows of a slice in the kernel for few rows: all blocks equally busy. Where all slices run at once and are
// short, fewer and longer ones read HBM faster.
int slice_rows(const GemmParams& p, int multiprocessors) {
  const std::int64_t turns = ceil_div(p.n, std::int64_t{kWidestSlice} * multiprocessors);
  const auto balanced = static_cast<int>(ceil_div(ceil_div(p.n, turns * multiprocessors), 16) * 16);
  return balanced < 48 && p.m <= 16 ? 96 : std::min(balanced, kWidestSlice);
}

// Time of a plan in cycles of a multiprocessor.
double cost(const GemmParams& p, const GemmPlan& plan, int multiprocessors) {
  const auto both = [](double a, double b) { return std::sqrt(std::hypot(a * a, b * b)); };  // a smooth maximum
  const double tile_m = plan.tile_m, tile_n = plan.tile_n;
  const auto clusters = static_cast<double>(ceil_div(p.m, plan.tile_m * plan.cluster) * ceil_div(p.n, plan.tile_n));
  const double turns = std::ceil(clusters / (multiprocessors / plan.cluster));
  // A stage is bound by the tensor cores, by what fills it, or by the latency of a chain of four instructions.
  const double multiply = tile_m / 64 * tile_n * 2;
  const double fill = (tile_m + tile_n / plan.cluster) * kStageK * 2 / 64;
  const double stage = both(both(multiply, fill), 290) + 40;
  const auto steps = static_cast<double>(ceil_div(p.contraction, kStageK));
  const double busy = turns * (steps * stage + 600 + tile_m * tile_n / 16);
  const double bytes = static_cast<double>(p.m + p.n) * static_cast<double>(p.contraction) * 2 +
                       static_cast<double>(p.m) * static_cast<double>(p.n) * size_of(p.d_dtype);
  const double share = clusters * plan.cluster / (turns * multiprocessors);  // of the blocks that work, on average
  const double time = std::hypot(busy, bytes / 2500 * (1.5 - share / 2));
  return plan.cluster > 1 ? 1.02 * time + 300 : time;
}

}  // namespace

std::string GemmPlan::name() const {
  const std::string shape = std::to_string(tile_m) + "x" + std::to_string(tile_n);
  if (few_rows) return "few rows " + shape;
  return shape + (cluster > 1 ? " cluster " + std::to_string(cluster) : "");
}

bool gemm_sm90_serves(const GemmParams& p) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 256;
  return p.m > 0 && p.n > 0 && p.contraction > 0 && p.m < kMost && p.n < kMost && p.contraction < kMost &&
         can_copy(p.a, p.m, p.contraction) && can_copy(p.b, p.n, p.contraction) && is_one_stride(p.d_rows, p.m) &&
         (p.addend == nullptr || (is_one_stride(p.addend_rows, p.m) && p.d_dtype == DType::kFloat32)) &&
         (p.segments == 1 || p.contraction % (kStageK * p.segments) == 0) && p.block % kStageK == 0;
}

std::vector<GemmPlan> gemm_plans_sm90(const GemmParams& p) {
  std::vector<GemmPlan> plans;
  const auto add = [&](int tile_m, int tile_n) {
    for (int cluster : {1, 2}) {
      if (ceil_div(p.m, tile_m) >= cluster) plans.push_back({false, tile_m, tile_n, cluster, tile_n >= 192 ? 16 : 8});
    }
  };
  const bool forward = p.a.contraction_contiguous && p.b.contraction_contiguous;
  const bool whole_stages = p.segments == 1 || p.contraction % (kFewRowsStageK * p.segments) == 0;
  if (forward && p.m <= 32 && p.block == 0 && p.addend == nullptr && whole_stages) {
    for (int rows : {16, 32, 48, 64, 96, 112, kWidestSlice}) {
      plans.push_back({true, rows, p.m <= 8 ? 8 : p.m <= 16 ? 16 : 32, 1, 1});
    }
  }
  if (p.segments > 1) {
    add(64, 64);
    add(128, 128);
  } else if (forward) {
    for (int tile_n : {32, 48, 64, 96, 112, 128}) add(64, tile_n);
    for (int tile_n : {64, 96, 128, 192, 224, 256}) add(128, tile_n);
  } else if (!p.a.contraction_contiguous && p.block > 0 && p.contraction > p.block && p.d_dtype != DType::kFloat32) {
    add(128, 128);
  } else {
    add(64, 64);
    for (int tile_n : {128, 192, 256}) add(128, tile_n);
  }
  return plans;
}

GemmPlan choose_plan_sm90(const GemmParams& p, int multiprocessors) {
  const std::vector<GemmPlan> plans = gemm_plans_sm90(p);
  if (plans.front().few_rows) {
    GemmPlan plan = plans.front();
    plan.tile_m = slice_rows(p, multiprocessors);
    return plan;
  }
  return *std::min_element(plans.begin(), plans.end(), [&](const GemmPlan& a, const GemmPlan& b) {
    return cost(p, a, multiprocessors) < cost(p, b, multiprocessors);
  });
}

void gemm_sm90(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  const bool done = p.dtype == DType::kBFloat16 ? run_plan_bf16(p, plan, stream) : run_plan_f16(p, plan, stream);
  RLK_CHECK(done, "linear: no kernel of plan " + plan.name());
}

}  // namespace rlk::cuda
