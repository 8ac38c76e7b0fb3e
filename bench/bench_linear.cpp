// Microbenchmark of the CUDA kernels of linear: one row per product, with its operations, the bytes it must move and their
// share of the copy ceiling measured in the same run. Usage:
// bench_linear [--only PART_OF_A_NAME] [--plans]        --plans: every plan of every product, not the chosen one alone
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/linear/gemm_sm90.h"
#include "rlk/ops/linear.h"

namespace rlk::bench {
namespace {

using cuda::GemmParams;

struct Layer {
  std::int64_t out_features, in_features;
};
// Llama 3 8B and Qwen3 8B: q, k, v; o; gate and up; down; heads.
constexpr Layer kLayers[] = {{6144, 4096},  {4096, 4096},  {28672, 4096},  {24576, 4096},
                             {4096, 14336}, {4096, 12288}, {128256, 4096}, {151936, 4096}};

struct Case {
  const char* name;
  std::int64_t rows;
  int segments;
};
constexpr Case kCases[] = {{"y", 1, 1},
                           {"y", 8, 1},
                           {"y", 16, 1},
                           {"y", 32, 1},
                           {"y", 64, 1},
                           {"y", 128, 1},
                           {"y", 256, 1},
                           {"y", 512, 1},
                           {"y", 1024, 1},
                           {"y", 2048, 1},
                           {"y", 4096, 1},
                           {"y", 8192, 1},
                           {"y", 16384, 1},
                           {"y segments", 8192, 8},
                           {"dx", 8192, 1},
                           {"dw", 8192, 1},
                           {"dw main_grad", 8192, 1}};

void* random_bf16(std::size_t elements) {
  void* device;
  cuda::check(cudaMalloc(&device, elements * 2), "cudaMalloc");
  fill_normal(device, elements, DType::kBFloat16, 1.0f);
  return device;
}

void run(const Case& c, const Layer& layer, double ceiling, bool every_plan) {
  const std::int64_t m = c.rows, n = layer.out_features, k = layer.in_features;
  const bool forward = c.name[0] == 'y', weight_grad = std::strncmp(c.name, "dw", 2) == 0;
  const bool main_grad = std::strstr(c.name, "main_grad") != nullptr;
  // Weights rotate among buffers that together exceed the L2 several times.
  const auto weights = static_cast<std::size_t>(n * k);
  const int buffers = weight_grad ? 1 : static_cast<int>(std::clamp<std::size_t>((400u << 20) / (weights * 2), 1, 12));
  void* weight = random_bf16(weights * buffers);
  void* rows_in = random_bf16(static_cast<std::size_t>(m * (forward || weight_grad ? k : n)));
  void* rows_out = random_bf16(static_cast<std::size_t>(m * (forward || weight_grad ? n : k)));
  float* gradient = nullptr;
  if (main_grad) cuda::check(cudaMalloc(&gradient, weights * 4), "cudaMalloc");
  if (main_grad) cuda::check(cudaMemset(gradient, 0, weights * 4), "cudaMemset");

  const auto dense = [](std::int64_t rows, std::int64_t stride) { return RowLayout{rows, 0, stride}; };
  const auto params = [&](int buffer) {
    void* w = static_cast<std::uint16_t*>(weight) + static_cast<std::size_t>(buffer) * weights;
    GemmParams p;
    if (weight_grad) {
      p.a = {rows_out, dense(m, n), false};
      p.b = {rows_in, dense(m, k), false};
      p.d = main_grad ? gradient : w;
      p.d_rows = p.addend_rows = dense(n, k);
      p.addend = gradient;
      p.d_dtype = main_grad ? DType::kFloat32 : DType::kBFloat16;
      p.m = n, p.n = k, p.contraction = m, p.block = kTokenBlock;
    } else {
      p.a = {rows_in, dense(m, forward ? k : n), true};
      p.b = {w, dense(n, k), forward};
      p.d = rows_out;
      p.m = m, p.n = forward ? n : k, p.contraction = forward ? k : n;
      p.d_rows = dense(m, p.n);
      p.segments = c.segments;
    }
    return p;
  };
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const double bytes = 2.0 * static_cast<double>(m * n + m * k + n * k) + (main_grad ? 6.0 : 0.0) * weights;
  std::vector<cuda::GemmPlan> plans = {cuda::choose_plan_sm90(params(0), cuda::multiprocessors(0))};
  if (every_plan) plans = cuda::gemm_plans_sm90(params(0));
  const int calls = std::max(buffers, static_cast<int>(std::min(64.0, 4e12 / flops)));
  for (const cuda::GemmPlan& plan : plans) {
    const double us = median_us(
        [&](cudaStream_t stream, int call) { cuda::gemm_sm90(params(call % buffers), plan, stream); }, calls, 9);
    std::printf("%-12s S %d  %6lld x %6lld x %5lld  %9.2f us  %6.1f TFLOP/s  %5.2f TB/s  %5.1f %% of copy  %s\n",
                c.name, c.segments, static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), us,
                flops / us / 1e6, bytes / us / 1e6, 100 * bytes / (us * 1e-6) / ceiling, plan.name().c_str());
    std::fflush(stdout);
  }
  for (void* p : {weight, rows_in, rows_out, static_cast<void*>(gradient)}) cudaFree(p);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  const char* only = "";
  bool every_plan = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plans") == 0) {
      every_plan = true;
    } else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
      only = argv[++i];
    } else {
      std::fprintf(stderr, "usage: bench_linear [--only PART_OF_A_NAME] [--plans]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || rlk::cuda::compute_capability(0) != 90) {
    std::fprintf(stderr, "no device of compute capability 9.0\n");
    return 1;
  }
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const Case& c : kCases) {
    const std::string name = std::string(c.name) + " " + std::to_string(c.rows);
    if (name.find(only) == std::string::npos) continue;
    for (const Layer& layer : kLayers) run(c, layer, ceiling, every_plan);
  }
}
