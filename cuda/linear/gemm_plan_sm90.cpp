// Chooses a plan by a model of the time of each tile. The model was fitted to measurements on an H200 (README.md).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "../common/alignment.h"
#include "gemm_sm90.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {

struct Bf16;  // the operands' types (../common/element.cuh)
struct Fp16;
template <class T>
bool run_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);
bool run_row_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);
bool run_copying_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);

namespace {

constexpr int kBoxK = 64;           // contraction indices per box of the tiled kernel
constexpr int kSmallMStageK = 128;  // contraction indices per stage of the kernel for few rows
constexpr int kWidestSlice = 128;
constexpr std::int64_t kMostIndices = (std::int64_t{1} << 31) - 256;
constexpr std::int64_t kMostStreamedRows = 32;  // largest number of rows of x that a kernel reads by ordinary loads
constexpr std::int64_t kMostStreamed = std::int64_t{1} << 29;  // elements of a row; its bytes fit into 31 bits
constexpr std::int64_t kMostTransposedRows = 1024;             // with more rows, nearly all tiles are full

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_one_stride(const RowLayout& rows, std::int64_t extent) { return rows.inner >= extent; }

// The largest power of two, at most 8, that divides the addresses of all rows.
int row_unit(const GemmOperand& x, std::int64_t extent) {
  const auto stride = static_cast<std::uint64_t>(extent > 1 ? x.rows.inner_stride * 2 : 0);
  const std::uint64_t all = reinterpret_cast<std::uintptr_t>(x.data) | stride | 8;
  return static_cast<int>(all & (~all + 1));
}

// Whether a kernel adds the sums of a token block to memory, as kernels of a weight gradient do.
bool adds_to_memory(const GemmParams& p) {
  return !p.a.contraction_contiguous && !p.b.contraction_contiguous && p.segments == 1 &&
         (p.d_dtype == DType::kFloat32 || p.contraction <= p.block);
}

// The number of rows of x for which a kernel for few rows is built: at least m.
int few_rows(std::int64_t m) { return m <= 8 ? 8 : m <= 16 ? 16 : 32; }

// Weight rows per slice in the kernel for few rows, chosen so that all blocks have equal work. If all slices run at
// once and are short, fewer and longer slices read HBM faster. If each block has many slices, shorter slices read HBM
// faster. `streamed`: ordinary loads read the weights.
int slice_rows(const GemmParams& p, int multiprocessors, bool streamed) {
  const std::int64_t turns = ceil_div(p.n, std::int64_t{kWidestSlice} * multiprocessors);
  const auto balanced = static_cast<int>(ceil_div(ceil_div(p.n, turns * multiprocessors), 16) * 16);
  if (streamed) return std::min(balanced, kWidestSlice);
  const bool many = turns > 2, short_ones = balanced < 48;
  if (p.m <= 8 && (many || short_ones)) return 96;
  if (p.m <= 16 && short_ones) return 64;
  return std::min(balanced, kWidestSlice);
}

// A smooth maximum: the fifth root of the sum of fifth powers. A cost close to the largest cost increases the result.
// Newton's method finds the root, because the C library's pow would need glibc 2.29.
double smooth_max(std::initializer_list<double> costs) {
  const double largest = std::max(costs);
  double sum = 0;  // between 1 and the number of costs
  for (double cost : costs) {
    const double part = cost / largest;
    sum += part * part * part * part * part;
  }
  double root = 1;
  for (int i = 0; i < 8; ++i) root -= (root - sum / (root * root * root * root)) / 5;
  return largest * root;
}

// Time of a plan in cycles of a multiprocessor. The constants are fitted to measurements on an H200 (README.md).
double cost(const GemmParams& p, const GemmPlan& plan, int multiprocessors) {
  const int along_m = plan.transposed ? 1 : plan.cluster, along_n = plan.transposed ? plan.cluster : 1;
  const auto clusters =
      static_cast<double>(ceil_div(p.m, plan.tile_m * along_m) * ceil_div(p.n, plan.tile_n * along_n));
  const double blocks = clusters * plan.cluster, turns = std::ceil(clusters / (multiprocessors / plan.cluster));
  const int rows_a = plan.transposed ? plan.tile_n : plan.tile_m, rows_b = plan.transposed ? plan.tile_m : plan.tile_n;
  const double tile_m = plan.tile_m, tile_n = plan.tile_n, m = static_cast<double>(p.m), n = static_cast<double>(p.n);
  // Cost of 64 contraction indices. One of three limits decides the cost: the tensor cores, the loads of a
  // multiprocessor or of L2, or one warpgroup's chain of instructions with the barriers of a stage.
  const double loaded = (std::min(tile_m, m) / along_n + std::min(tile_n, n) / along_m) * kBoxK * 2;
  const double multiply = 1.17 * rows_a / 64 * rows_b * 2, chain = rows_b * 2 + 31.0 / stage_boxes(rows_a, rows_b);
  const double step =
      smooth_max({multiply, chain, loaded / 107, loaded * std::min<double>(blocks, multiprocessors) / 8200});
  const double busy =
      turns * (static_cast<double>(ceil_div(p.contraction, kBoxK)) * step + 0.33 * tile_m * tile_n) + 2300;
  const double idle = 1 - blocks / (turns * multiprocessors);
  const double bytes = (m + n) * static_cast<double>(p.contraction) * 2 + m * n * size_of(p.d_dtype);
  return smooth_max({busy, bytes / 2250 * (1 + 0.4 * idle)});
}

}  // namespace

std::string GemmPlan::name() const {
  const std::string shape = std::to_string(tile_m) + "x" + std::to_string(tile_n);
  const std::string anywhere = row_unit > 0 ? "rows at " + std::to_string(row_unit) + " bytes " : "";
  if (small_m) return anywhere + "few rows " + shape;
  if (row_unit > 0) return anywhere + shape;
  return shape + (transposed ? " transposed" : "") + (cluster > 1 ? " cluster " + std::to_string(cluster) : "") +
         (copies ? " with copies" : "");
}

bool gemm_sm90_reads(const GemmOperand& operand, std::int64_t extent, std::int64_t contraction) {
  return tma_reads_rows(operand.data, operand.rows, operand.contraction_contiguous ? extent : contraction, 2);
}

bool gemm_sm90_loads_rows(const GemmParams& p) {
  return p.a.contraction_contiguous && p.b.contraction_contiguous && p.segments == 1 && p.addend == nullptr &&
         p.block == 0 && p.row_limit == nullptr && p.m > 0 && p.n > 0 && p.contraction > 0 && p.m < kMostIndices &&
         p.n < kMostIndices && p.contraction < kMostStreamed && is_one_stride(p.d_rows, p.m) &&
         is_one_stride(p.b.rows, p.n) && reinterpret_cast<std::uintptr_t>(p.b.data) % 2 == 0;
}

bool gemm_sm90_streams_x(const GemmParams& p) {
  return gemm_sm90_loads_rows(p) && p.m <= kMostStreamedRows && is_one_stride(p.a.rows, p.m) &&
         reinterpret_cast<std::uintptr_t>(p.a.data) % 2 == 0;
}

bool gemm_sm90_serves(const GemmParams& p) {
  return p.m > 0 && p.n > 0 && p.contraction > 0 && p.m < kMostIndices && p.n < kMostIndices &&
         p.contraction < kMostIndices && gemm_sm90_reads(p.a, p.m, p.contraction) &&
         gemm_sm90_reads(p.b, p.n, p.contraction) && is_one_stride(p.d_rows, p.m) &&
         (p.addend == nullptr || (is_one_stride(p.addend_rows, p.m) && (p.continues || adds_to_memory(p)))) &&
         (p.segments == 1 || p.contraction % (kBoxK * p.segments) == 0) && p.block % kBoxK == 0;
}

bool gemm_sm90_copies(const GemmParams& p) {
  const bool one_sum = p.segments == 1 && !p.continues && p.row_limit == nullptr;
  const bool in_memory = p.block == 0 || p.contraction <= p.block || p.d_dtype == DType::kFloat32;
  return one_sum && in_memory && (p.a.contraction_contiguous || !p.b.contraction_contiguous) && gemm_sm90_serves(p);
}

std::vector<GemmPlan> gemm_plans_sm90(const GemmParams& p) {
  std::vector<GemmPlan> plans;
  const auto add = [&](int tile_m, int tile_n, int clusters = 1) {
    for (int cluster = 1; cluster <= clusters; ++cluster) {
      if (ceil_div(p.m, tile_m) >= cluster) plans.push_back({false, tile_m, tile_n, cluster});
    }
  };
  const auto add_transposed = [&](int tile_m, int tile_n) { plans.push_back({false, tile_m, tile_n, 1, true}); };
  if (!gemm_sm90_reads(p.b, p.n, p.contraction)) {
    if (gemm_sm90_streams_x(p)) {
      const int unit = std::min(row_unit(p.b, p.n), row_unit(p.a, p.m));
      for (int rows : {16, 32, 48, 64, 96, 112, kWidestSlice}) {
        plans.push_back({true, rows, few_rows(p.m), 1, false, unit});
      }
    }
    if (gemm_sm90_reads(p.a, p.m, p.contraction)) {
      const int unit = std::min(row_unit(p.b, p.n), 4);
      for (int tile_m : {64, 128, 256}) plans.push_back({false, tile_m, 64, 1, true, unit});
    }
    return plans;
  }
  const bool forward = p.a.contraction_contiguous && p.b.contraction_contiguous;
  const bool whole_stages = p.segments == 1 || p.contraction % (kSmallMStageK * p.segments) == 0;
  if (forward && p.m <= 32 && p.block == 0 && p.addend == nullptr && whole_stages) {
    for (int rows : {16, 32, 48, 64, 96, 112, kWidestSlice}) {
      plans.push_back({true, rows, few_rows(p.m)});
    }
  }
  if (p.segments > 1) {
    add(64, 64);
    add(128, 128);
  } else if (p.continues) {
    add(64, 64);
    add(128, 256);
  } else if (forward) {
    for (int tile_n : {32, 48, 112}) add(64, tile_n);
    for (int tile_n : {64, 96, 128}) add(64, tile_n, 2);
    for (int tile_n : {96, 192, 224, 256}) add(128, tile_n);
    if (p.m <= kMostTransposedRows) {
      for (int tile_m : {80, 96, 160}) add_transposed(tile_m, 64);
      for (int tile_m : {112, 128, 160, 192, 224}) add_transposed(tile_m, 128);
      for (int tile_m : {96, 160}) add_transposed(tile_m, 192);
    }
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
  if (plans.front().small_m) {
    GemmPlan plan = plans.front();
    plan.tile_m = slice_rows(p, multiprocessors, plan.row_unit > 0);
    return plan;
  }
  if (plans.front().row_unit > 0) {
    // The widest tile with which at least half of the multiprocessors get a tile.
    GemmPlan plan = plans.front();
    for (const GemmPlan& wider : plans) {
      const std::int64_t tiles = ceil_div(p.m, wider.tile_m) * ceil_div(p.n, wider.tile_n);
      if (p.m > wider.tile_m / 2 && 2 * tiles >= multiprocessors) plan = wider;
    }
    return plan;
  }
  const GemmPlan* best = nullptr;
  double least = 0;
  for (const GemmPlan& plan : plans) {
    const double time = cost(p, plan, multiprocessors);
    if (best == nullptr || time < least) best = &plan, least = time;
  }
  return *best;
}

void gemm_sm90(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  note_plan([&] { return plan.name(); });
  const bool done = plan.copies                   ? run_copying_plan(p, plan, stream)
                    : plan.row_unit > 0           ? run_row_plan(p, plan, stream)
                    : p.dtype == DType::kBFloat16 ? run_plan<Bf16>(p, plan, stream)
                                                  : run_plan<Fp16>(p, plan, stream);
  RLK_CHECK(done, "linear: no kernel of plan " + plan.name());
}

}  // namespace rlk::cuda
