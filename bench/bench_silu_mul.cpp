// Microbenchmark of the CUDA kernels of silu_mul and gelu_mul: one row per case, with the bytes it must move and their share
// of the copy ceiling measured in the same run. Usage:
// bench_silu_mul [--only PART_OF_A_NAME] [--columns I] [--plans]    --plans: every plan that serves, not the chosen one
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "cuda/silu_mul/kernels.h"

namespace rlk::bench {
namespace {

constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh"};

struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16;
  Activation activation = Activation::kSilu;
  bool packed = true, round_before_mul = true;
};

void print(const std::string& pass, const Case& c, const std::string& plan, double us, double bytes, double ceiling) {
  std::printf("%-18s %-4s %7lld x %-6lld %-6s %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  %s\n", pass.c_str(),
              c.dtype == DType::kFloat32   ? "f32"
              : c.dtype == DType::kFloat16 ? "f16"
                                           : "bf16",
              static_cast<long long>(c.rows), static_cast<long long>(c.columns), c.packed ? "packed" : "apart", us,
              bytes / 1e6, bytes / us / 1e6, 100 * bytes / (us * 1e-6) / ceiling, plan.c_str());
  std::fflush(stdout);
}

template <class Params>
void set_shape(const Case& c, Params* p) {
  p->num_rows = c.rows;
  p->columns = c.columns;
  p->dtype = c.dtype;
  p->activation = c.activation;
  p->round_before_mul = c.round_before_mul;
  const std::int64_t stride = c.packed ? 2 * c.columns : c.columns;
  p->gate_rows = p->up_rows = {c.rows, 0, stride};
}

void run(const Case& c, double ceiling, bool every_plan, const std::string& only) {
  const std::size_t bytes = static_cast<std::size_t>(c.rows * c.columns * size_of(c.dtype));
  const int count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / (3 * bytes), 1, 64));
  const int calls = std::max(count, static_cast<int>(std::clamp<std::size_t>((256u << 20) / bytes, 1, 64)));
  const Buffers gate_up(2 * bytes, count, c.dtype, true), y(bytes, count, c.dtype, true),
      d_gate_up(2 * bytes, count, c.dtype, true);
  const RowLayout dense = {c.rows, 0, c.columns};
  // Where up begins: in the same row, or behind all of gate.
  const std::size_t half = c.packed ? static_cast<std::size_t>(c.columns * size_of(c.dtype)) : bytes;
  const auto second = [&](void* first) { return static_cast<unsigned char*>(first) + half; };
  const auto forward_of = [&](int call) {
    GatedMulParams p;
    set_shape(c, &p);
    p.gate = gate_up.at(call);
    p.up = second(gate_up.at(call));
    p.y = y.at(call);
    p.y_rows = dense;
    return p;
  };
  const auto backward_of = [&](int call) {
    GatedMulBackwardParams p;
    set_shape(c, &p);
    p.dy = y.at(call);
    p.dy_rows = dense;
    p.gate = gate_up.at(call);
    p.up = second(gate_up.at(call));
    p.d_gate = d_gate_up.at(call);
    p.d_up = second(d_gate_up.at(call));
    p.d_gate_rows = p.d_up_rows = p.gate_rows;
    return p;
  };
  const std::string name = kActivations[static_cast<int>(c.activation)];
  const auto measure = [&](const std::string& pass, const auto& params_of, const auto& launch, double moved) {
    if (pass.find(only) == std::string::npos) return;
    const auto p = params_of(0);
    const cuda::GatedMulPlan chosen = cuda::choose_plan(p, cuda::multiprocessors(0));
    for (const cuda::GatedMulPlan& plan : cuda::kGatedMulPlans) {
      if (!cuda::serves(plan, p) || (!every_plan && plan != chosen)) continue;
      const double us = median_us([&](cudaStream_t s, int call) { launch(params_of(call), plan, s); }, calls, 15);
      std::string what = plan.vec8s == 0 ? "any layout" : std::to_string(plan.vec8s) + " vec8s";
      if (plan.chunks > 1) what += " x " + std::to_string(plan.chunks);
      print(pass, c, what + (plan == chosen ? " chosen" : ""), us, moved, ceiling);
    }
  };
  measure(name + " forward", forward_of, cuda::sm90::gated_mul, 3.0 * static_cast<double>(bytes));
  measure(name + " backward", backward_of, cuda::sm90::gated_mul_backward, 5.0 * static_cast<double>(bytes));
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::Activation;
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
  // Decode steps, micro-batches, training steps; intermediate sizes of an expert, Qwen3 4B and 8B, Llama 3 8B and 70B.
  for (const std::int64_t rows : {1, 8, 16, 64, 256, 1024, 2048, 8192, 16384}) cases.push_back({rows, 12288});
  for (const std::int64_t i : {768, 3072, 9728, 14336, 28672}) cases.push_back({8192, i});
  cases.push_back({64, 14336});
  for (const Activation a : {Activation::kGelu, Activation::kGeluTanh})
    cases.push_back({8192, 12288, DType::kBFloat16, a});
  cases.push_back({8192, 12288, DType::kFloat16});
  cases.push_back({8192, 12288, DType::kFloat32});
  cases.push_back({8192, 12288, DType::kBFloat16, Activation::kSilu, false});
  cases.push_back({8192, 12288, DType::kBFloat16, Activation::kSilu, true, false});  // the activation kept in float32
  cases.push_back({8192, 12287, DType::kBFloat16});                                  // no vectors
  for (const Case& c : cases) {
    if (columns == 0 || c.columns == columns) run(c, ceiling, every_plan, only);
  }
}
