// Microbenchmark of the CUDA kernels of rms_norm: one row per case, with the bytes it must move and their share of the copy
// ceiling measured in the same run. Usage:
// bench_rms_norm [--only PART_OF_A_NAME] [--columns K] [--plans]    --plans: every plan that serves, not the chosen one
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "cuda/rms_norm/kernels.h"
#include "rlk/backends.h"
#include "rlk/ops/rms_norm.h"

namespace rlk::bench {
namespace {

struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16;
  bool residual = false;
  bool heads = false;  // rows are the heads of a fused projection: slices of a row twice as wide
};

void print(const char* pass, const Case& c, const std::string& plan, double us, double bytes, double ceiling) {
  std::printf("%-18s %-4s %7lld x %-6lld%s %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  %s\n", pass,
              c.dtype == DType::kFloat32   ? "f32"
              : c.dtype == DType::kFloat16 ? "f16"
                                           : "bf16",
              static_cast<long long>(c.rows), static_cast<long long>(c.columns), c.heads ? " heads" : "      ", us,
              bytes / 1e6, bytes / us / 1e6, 100 * bytes / (us * 1e-6) / ceiling, plan.c_str());
  std::fflush(stdout);
}

std::string name_of(const cuda::RmsNormPlan& plan) {
  return plan.threads == 0 ? "rows" : std::to_string(plan.threads) + " x " + std::to_string(plan.vec8s);
}
std::string name_of(const cuda::RmsNormBackwardPlan& plan) {
  return name_of(cuda::RmsNormPlan{plan.threads, plan.vec8s}) + (plan.halves ? " halves" : "");
}

void run(const Case& c, double ceiling, bool every_plan, const std::string& only) {
  const std::size_t elements = static_cast<std::size_t>(c.rows * c.columns), bytes = elements * size_of(c.dtype);
  const std::size_t in_bytes = bytes * (c.heads ? 2 : 1);
  const int count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / (4 * bytes), 1, 64));
  const int calls = std::max(count, static_cast<int>(std::clamp<std::size_t>((256u << 20) / bytes, 1, 64)));
  const Buffers x(in_bytes, count, c.dtype, true), residual(bytes, count, c.dtype, true),
      y(bytes, count, c.dtype, true), new_residual(bytes, count, c.dtype, true),
      weight(static_cast<std::size_t>(c.columns) * 4, 1, c.dtype, true);
  const Buffers rstd(static_cast<std::size_t>(c.rows) * 4, 1, DType::kFloat32, true);
  const RowLayout dense = {c.rows, 0, c.columns}, of_heads = {32, 64 * c.columns, c.columns};

  RmsNormParams forward;
  forward.weight = weight.at(0);
  forward.x_rows = c.heads ? of_heads : dense;
  forward.residual_rows = forward.y_rows = forward.new_residual_rows = dense;
  forward.num_rows = c.rows;
  forward.columns = c.columns;
  forward.dtype = forward.weight_dtype = c.dtype;
  forward.eps = 1e-6f;
  forward.round_before_weight = true;
  forward.rstd = static_cast<float*>(rstd.at(0));
  const auto forward_of = [&](int call) {
    RmsNormParams p = forward;
    p.x = x.at(call);
    p.y = y.at(call);
    p.residual = c.residual ? residual.at(call) : nullptr;
    p.new_residual = c.residual ? new_residual.at(call) : nullptr;
    return p;
  };
  RmsNormBackwardParams backward;
  backward.weight = weight.at(0);
  backward.rstd = static_cast<const float*>(rstd.at(0));
  backward.dy_rows = backward.d_new_residual_rows = backward.dx_rows = dense;
  backward.h_rows = c.heads ? of_heads : dense;
  backward.num_rows = c.rows;
  backward.columns = c.columns;
  backward.dtype = backward.weight_dtype = backward.dweight_dtype = c.dtype;
  backward.round_before_weight = true;
  const Buffers dweight(static_cast<std::size_t>(c.columns) * 4, 1, c.dtype, false);
  backward.dweight = dweight.at(0);
  const auto workspace_bytes = static_cast<std::size_t>(cuda::rms_norm_backward_workspace_bytes(backward, 0));
  const Buffers workspace(workspace_bytes, 1, c.dtype, false);
  backward.workspace = workspace.at(0);
  const auto backward_of = [&](int call) {
    RmsNormBackwardParams p = backward;
    p.dy = y.at(call);
    p.h = x.at(call);
    p.d_new_residual = c.residual ? residual.at(call) : nullptr;
    p.dx = new_residual.at(call);
    return p;
  };

  const double moved = static_cast<double>(bytes) * (c.residual ? 4 : 2);
  const double moved_back = static_cast<double>(bytes) * (c.residual ? 4 : 3);  // without dweight's workspace
  const auto wanted = [&](const char* pass) { return std::string(pass).find(only) != std::string::npos; };
  const std::string forward_name = c.residual ? "forward residual" : "forward";
  const std::string backward_name = c.residual ? "backward residual" : "backward";
  const std::string both_name = c.residual ? "both residual" : "both";
  if (wanted(forward_name.c_str())) {
    for (const cuda::RmsNormPlan& plan : cuda::kRmsNormPlans) {
      const RmsNormParams p = forward_of(0);
      const bool chosen = name_of(plan) == name_of(cuda::choose_plan(p));
      if (!cuda::serves(plan, p) || (!every_plan && !chosen)) continue;
      const double us =
          median_us([&](cudaStream_t s, int call) { cuda::sm90::rms_norm(forward_of(call), plan, s); }, calls, 15);
      print(forward_name.c_str(), c, name_of(plan) + (chosen ? " chosen" : ""), us, moved, ceiling);
    }
  }
  const int multiprocessors = cuda::multiprocessors(0);
  if (wanted(backward_name.c_str())) {
    for (const cuda::RmsNormBackwardPlan& plan : cuda::kRmsNormBackwardPlans) {
      const RmsNormBackwardParams p = backward_of(0);
      const bool chosen = name_of(plan) == name_of(cuda::choose_plan(p, multiprocessors));
      if (!cuda::serves(plan, p) || (!every_plan && !chosen)) continue;
      const double us = median_us(
          [&](cudaStream_t s, int call) { cuda::sm90::rms_norm_backward(backward_of(call), plan, s); }, calls, 15);
      print(backward_name.c_str(), c, name_of(plan) + (chosen ? " chosen" : ""), us, moved_back, ceiling);
    }
  }
  if (wanted(both_name.c_str())) {
    const double us = median_us(
        [&](cudaStream_t s, int call) {
          cuda::rms_norm(forward_of(call), 0, reinterpret_cast<Stream>(s));
          cuda::rms_norm_backward(backward_of(call), 0, reinterpret_cast<Stream>(s));
        },
        calls, 15);
    print(both_name.c_str(), c, "chosen", us, moved + moved_back, ceiling);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::DType;
  std::string only;
  std::int64_t columns = 0;
  bool every_plan = false;
  CommandLine line;
  line.value("only", "PART_OF_A_NAME", &only).value("columns", "N", &columns).flag("plans", &every_plan);
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  std::vector<Case> cases;
  for (const bool residual : {false, true}) {
    // Decode steps; micro-batches with few groups of rows; a training step; hidden sizes of models from 1 B to 70 B.
    for (const std::int64_t rows : {1, 8, 16, 64, 256, 1024, 2048, 4096, 8192, 12288, 16384, 32768}) {
      cases.push_back({rows, 4096, DType::kBFloat16, residual, false});
    }
    for (const std::int64_t k : {1024, 2048, 2560, 5120, 8192, 16384, 20480}) {
      cases.push_back({8192, k, DType::kBFloat16, residual, false});
    }
    cases.push_back({8192, 4096, DType::kFloat16, residual, false});
    cases.push_back({8192, 4096, DType::kFloat32, residual, false});
  }
  for (const std::int64_t tokens : {1, 64, 1024, 8192}) {  // q_norm of 32 heads
    cases.push_back({32 * tokens, 128, DType::kBFloat16, false, false});
    cases.push_back({32 * tokens, 128, DType::kBFloat16, false, true});
  }
  cases.push_back({8192, 4099, DType::kBFloat16, false, false});  // no vectors
  for (const Case& c : cases) {
    if (columns == 0 || c.columns == columns) run(c, ceiling, every_plan, only);
  }
}
