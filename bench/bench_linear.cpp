// Microbenchmark of the CUDA kernels of linear. It prints one row per product: its operations, the bytes it must move,
// and their share of the bandwidth of a copy in the same run. Usage:
// bench_linear [--only PART_OF_A_NAME] [--rows M,M,...] [--plans] [--plan NAME]... [--sm80]
//   --only: measures products whose names, such as "y 64 x 4096 x 14336", contain this text
//   --rows: the only numbers of rows of y
//   --plans: every plan of every product, not only the chosen plan; --plan: only plans of this name
//   --sm80: the kernel of compute capability 8.0, whose PTX runs on later GPUs; with --plans, every tile of that kernel
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/linear_products.h"
#include "cuda/linear/gemm_sm90.h"

namespace rlk::bench {
namespace {

struct Case {
  const char* name;
  std::int64_t rows;
  int segments = 1;
};
constexpr std::int64_t kMostOutputs = 2'300'000'000;
constexpr std::int64_t kRows[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};

std::vector<Case> cases_of(const std::vector<std::int64_t>& rows) {
  std::vector<Case> cases;
  for (std::int64_t m : rows.empty() ? std::vector<std::int64_t>(std::begin(kRows), std::end(kRows)) : rows) {
    cases.push_back({"y", m});
  }
  if (rows.empty()) {
    cases.insert(cases.end(), {{"y segments", 8192, 8}, {"dx", 8192}, {"dw", 8192}, {"dw main_grad", 8192}});
  }
  return cases;
}

// The plans to measure: the chosen plan, all plans, or plans with a given name.
struct Wanted {
  bool every = false, sm80 = false;
  std::vector<std::string> names;
};

struct Way {
  std::string name;
  std::function<void(const cuda::GemmParams&, cudaStream_t)> run;
};

std::vector<Way> tiles_of(const cuda::GemmParams& p, const Wanted& wanted) {
  static const char* const kNames[] = {"fewest rows", "few rows", "medium", "square", "large", "blocks"};
  std::vector<Way> ways;
  const auto tiles = wanted.every ? cuda::sm90::gemm_tiles(p) : std::vector{cuda::sm90::choose_tile(p)};
  for (const cuda::Sm80Tile tile : tiles) {
    ways.push_back({kNames[static_cast<int>(tile)],
                    [tile](const cuda::GemmParams& q, cudaStream_t s) { cuda::sm90::gemm_by_tile(q, tile, s); }});
  }
  return ways;
}

std::vector<Way> ways_of(const cuda::GemmParams& p, const Wanted& wanted) {
  if (wanted.sm80) return tiles_of(p, wanted);
  std::vector<cuda::GemmPlan> plans;
  if (!wanted.every && wanted.names.empty()) {
    plans = {cuda::choose_plan_sm90(p, cuda::multiprocessors(0))};
  } else {
    plans = cuda::gemm_plans_sm90(p);
  }
  std::vector<Way> ways;
  for (const cuda::GemmPlan& plan : plans) {
    const std::string name = plan.name();
    if (!wanted.names.empty() && !wanted.every &&
        std::find(wanted.names.begin(), wanted.names.end(), name) == wanted.names.end()) {
      continue;
    }
    ways.push_back({name, [plan](const cuda::GemmParams& q, cudaStream_t s) { cuda::gemm_sm90(q, plan, s); }});
  }
  return ways;
}

void run(const Case& c, const Layer& layer, double ceiling, const Wanted& wanted) {
  const std::int64_t m = c.rows, n = layer.out_features, k = layer.in_features;
  const bool main_grad = std::strstr(c.name, "main_grad") != nullptr;
  const LinearPass pass = c.name[0] == 'y'                     ? LinearPass::kForward
                          : std::strncmp(c.name, "dw", 2) == 0 ? LinearPass::kWeightGrad
                                                               : LinearPass::kInputGrad;
  const ProductMemory memory(pass, m, layer, main_grad ? DType::kFloat32 : DType::kBFloat16, main_grad);
  const auto params = [&](int buffer) { return memory.params(buffer, c.segments); };
  const int buffers = memory.buffers();
  const double flops = memory.flops(), weights = static_cast<double>(n) * static_cast<double>(k);
  const double bytes = 2.0 * static_cast<double>(m * n + m * k + n * k) + (main_grad ? 6.0 : 0.0) * weights;
  const std::vector<Way> ways = ways_of(params(0), wanted);
  if (ways.empty()) return;
  const int calls = std::max(buffers, static_cast<int>(std::min(64.0, (wanted.every ? 1e12 : 4e12) / flops)));
  // Replays alternate, so that all plans run at the same clocks.
  std::vector<std::unique_ptr<Replay>> replays;
  for (const Way& way : ways) {
    replays.push_back(
        std::make_unique<Replay>([&](cudaStream_t s, int call) { way.run(params(call % buffers), s); }, calls));
  }
  replays[0]->warm_up();
  for (int i = 0; i < 9; ++i) {
    for (const auto& replay : replays) replay->once();
  }
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const double us = replays[i]->median_us();
    std::printf("%-12s S %d  %6lld x %6lld x %5lld  %9.2f us  %6.1f TFLOP/s  %5.2f TB/s  %5.1f %% of copy  %s\n",
                c.name, c.segments, static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), us,
                flops / us / 1e6, bytes / us / 1e6, 100 * bytes / (us * 1e-6) / ceiling, ways[i].name.c_str());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  std::string only;
  Wanted wanted;
  std::vector<std::int64_t> rows;
  CommandLine line;
  line.value("only", "PART_OF_A_NAME", &only)
      .value("rows", "M,M,...", [&](const char* text) { return row_list(text, &rows); })
      .flag("plans", &wanted.every)
      .flag("sm80", &wanted.sm80)
      .value("plan", "NAME", [&](const char* name) {
        wanted.names.emplace_back(name);
        return true;
      });
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const Case& c : cases_of(rows)) {
    for (const Layer& layer : kLayers) {
      const std::string name = std::string(c.name) + " " + std::to_string(c.rows) + " x " +
                               std::to_string(layer.out_features) + " x " + std::to_string(layer.in_features);
      if (name.find(only) == std::string::npos) continue;
      const bool head = layer.out_features > 1 << 16;
      if (c.name[0] == 'y' && c.segments == 1 ? c.rows * layer.out_features < kMostOutputs : !head) {
        run(c, layer, ceiling, wanted);
      }
    }
  }
}
