// Microbenchmark of linear_logprob on CUDA: forward, and forward with backward. Calls alternate with the operator's
// bare matrix products; times are relative to the products. Usage: bench_linear_logprob [--workspace MIB] [--rows N]
// [--forward] [--sm80] --sm80: forward by the kernels of compute capability 8.0 as well, whose PTX runs on later GPUs
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "bench/buffers.h"
#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "cuda/common/kernels.h"
#include "cuda/linear/gemm.h"
#include "cuda/logprob/plan.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::bench {
namespace {

constexpr Device kDevice{DeviceType::kCuda, 0};

struct Case {
  std::int64_t rows, features, columns;
};
constexpr Case kCases[] = {{8192, 4096, 128256}, {8192, 4096, 151936}, {32768, 4096, 128256},
                           {4096, 2048, 131072}, {64, 4096, 128256},   {64, 4096, 151936}};

Stream number(cudaStream_t stream) { return reinterpret_cast<Stream>(stream); }
std::size_t bytes(std::int64_t elements, int each) { return static_cast<std::size_t>(elements * each); }

// The forward without a fused kernel: float32 logits of as many rows as the workspace holds, then their statistics.
void forward_sm80(const LinearLogprobParams& p, cudaStream_t stream) {
  constexpr std::int64_t kTileRows = 128;
  const std::int64_t row_bytes = p.num_columns * 4;
  const std::int64_t of_logprob = cuda::stream_workspace(group_grid(p), p.num_rows).bytes;
  const std::int64_t held = std::max<std::int64_t>(1, (p.workspace_bytes - of_logprob) / row_bytes);
  const std::int64_t step = std::min(p.num_rows, held > kTileRows ? held / kTileRows * kTileRows : held);
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    LogprobParams q = p;
    q.num_rows = std::min(step, p.num_rows - row);
    q.target = static_cast<const std::int64_t*>(p.target) + row;
    q.logits = static_cast<unsigned char*>(p.workspace) + of_logprob;
    q.logits_rows = {q.num_rows, 0, p.num_columns};
    q.dtype = DType::kFloat32;
    q.logprob = p.logprob + row;
    q.lse = p.lse + row;
    cuda::GemmParams g;
    const std::int64_t stride = p.head.hidden_rows.inner_stride;
    g.a = {static_cast<const std::uint16_t*>(p.head.hidden) + row * stride, {q.num_rows, 0, stride}, true};
    g.b = {p.head.weight, {p.num_columns, 0, p.head.weight_stride}, true};
    g.d = const_cast<void*>(q.logits);
    g.d_rows = q.logits_rows;
    g.d_dtype = DType::kFloat32;
    g.m = q.num_rows;
    g.n = p.num_columns;
    g.contraction = p.head.in_features;
    cuda::sm80::gemm(g, stream);
    cuda::sm80::logprob_forward(q, group_grid(q), cuda::LogprobPlan::kStream, stream);
  }
}

struct Timed {
  const char* name;
  int products;  // products of rows x features x columns
  std::int64_t workspace_bytes;
  std::unique_ptr<Replay> replay;
};

void run(const Case& c, std::int64_t workspace_bytes, bool backward, bool sm80) {
  const Buffers hidden(bytes(c.rows * c.features, 2), 1, DType::kBFloat16, true);
  const Buffers weight(bytes(c.columns * c.features, 2), 1, DType::kBFloat16, false);
  fill_normal(weight.at(0), static_cast<std::size_t>(c.columns * c.features), DType::kBFloat16,
              1.0f / std::sqrt(static_cast<float>(c.features)));
  std::vector<std::int64_t> ids(static_cast<std::size_t>(c.rows));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7919) % c.columns;
  const Buffers target(bytes(c.rows, 8), 1, DType::kFloat32, false);
  cuda::check(cudaMemcpy(target.at(0), ids.data(), bytes(c.rows, 8), cudaMemcpyHostToDevice), "copy");
  const Buffers outputs(bytes(c.rows, 4 * 4), 1, DType::kFloat32, false);
  auto* const of_rows = static_cast<float*>(outputs.at(0));
  const Buffers logits(bytes(c.rows * c.columns, 2), 1, DType::kBFloat16, false);

  LinearParams product;
  product.x = hidden.at(0);
  product.weight = weight.at(0);
  product.y = logits.at(0);
  product.x_rows = {c.rows, 0, c.features};
  product.y_rows = {c.rows, 0, c.columns};
  product.weight_stride = c.features;
  product.num_rows = c.rows;
  product.in_features = c.features;
  product.out_features = c.columns;
  LinearLogprobParams p;
  p.head = {hidden.at(0), weight.at(0), nullptr, {c.rows, 0, c.features}, c.features, c.features};
  p.target = target.at(0);
  p.target_rows = {c.rows, 0, 1};
  p.exp = Exp::kHardware;
  p.num_rows = c.rows;
  p.num_columns = p.vocab_size = p.valid_vocab = c.columns;
  p.logprob = of_rows;
  p.lse = of_rows + c.rows;
  LinearLogprobBackwardParams b;
  static_cast<LogprobInput&>(b) = p;
  b.head = p.head;
  b.lse = p.lse;
  b.dlogprob = p.logprob;
  b.dlogprob_rows = {c.rows, 0, 1};
  const Buffers dhidden(bytes(c.rows * c.features, 2), 1, DType::kBFloat16, false);
  const Buffers dweight(bytes(c.columns * c.features, 4), 1, DType::kFloat32, false);
  b.dhidden = dhidden.at(0);
  b.dhidden_rows = {c.rows, 0, c.features};
  b.dweight = dweight.at(0);
  b.dweight_stride = c.features;

  const WorkspaceRange of_forward = linear_logprob_workspace(p, kDevice);
  const WorkspaceRange of_backward = linear_logprob_backward_workspace(b, kDevice);
  p.workspace_bytes = std::max(of_forward.least, std::min(of_forward.most, workspace_bytes));
  b.workspace_bytes = std::max(of_backward.least, std::min(of_backward.most, workspace_bytes));
  const Buffers workspace(static_cast<std::size_t>(std::max(p.workspace_bytes, b.workspace_bytes)), 1, DType::kFloat32,
                          false);
  p.workspace = b.workspace = workspace.at(0);

  const std::int64_t flops = 2 * c.rows * c.features * c.columns;
  const int calls = static_cast<int>(std::clamp<std::int64_t>(20'000'000'000'000 / flops, 1, 50));
  std::vector<Timed> timed;
  const auto add = [&](const char* name, int products, std::int64_t of_workspace,
                       const std::function<void(cudaStream_t)>& call) {
    timed.push_back(
        {name, products, of_workspace, std::make_unique<Replay>([&call](cudaStream_t s, int) { call(s); }, calls)});
  };
  add("linear, our kernels", 1, 0, [&](cudaStream_t s) {
    product.allow_vendor = false;
    linear(product, kDevice, number(s));
  });
  add("linear, auto", 1, 0, [&](cudaStream_t s) {
    product.allow_vendor = true;
    linear(product, kDevice, number(s));
  });
  add("forward", 1, p.workspace_bytes, [&](cudaStream_t s) { linear_logprob(p, kDevice, number(s)); });
  LinearLogprobParams of_sm80 = p;
  const Buffers logits_sm80(sm80 ? static_cast<std::size_t>(workspace_bytes) : 1, 1, DType::kFloat32, false);
  if (sm80) {
    of_sm80.workspace = logits_sm80.at(0);
    of_sm80.workspace_bytes = workspace_bytes;
    add("forward, sm_80", 1, workspace_bytes, [&](cudaStream_t s) { forward_sm80(of_sm80, s); });
  }
  if (backward) {
    add("forward, backward", 4, b.workspace_bytes, [&](cudaStream_t s) {
      linear_logprob(p, kDevice, number(s));
      linear_logprob_backward(b, kDevice, number(s));
    });
  }
  timed.front().replay->warm_up(500);
  for (int i = 0; i < 9; ++i) {  // alternating, so that all calls run at the same clocks
    for (const Timed& each : timed) each.replay->once();
  }
  const double base = std::min(timed[0].replay->median_us(), timed[1].replay->median_us());
  for (const Timed& each : timed) {
    const double us = each.replay->median_us();
    std::printf("%6lld x %5lld x %6lld  %-20s %10.1f us  %6.1f TFLOP/s  %5.3f of linear  workspace %6.1f MiB\n",
                static_cast<long long>(c.rows), static_cast<long long>(c.features), static_cast<long long>(c.columns),
                each.name, us, static_cast<double>(each.products * flops) / us / 1e6, us / base,
                static_cast<double>(each.workspace_bytes) / (1 << 20));
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  std::int64_t workspace = 1024, rows = 0;
  bool forward = false, sm80 = false;
  CommandLine line;
  line.value("workspace", "MIB", &workspace).value("rows", "N", &rows).flag("forward", &forward).flag("sm80", &sm80);
  if (!line.read(argc, argv)) return 2;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return 1;
  }
  for (const Case& c : kCases) {
    if (rows == 0 || c.rows == rows) run(c, workspace << 20, !forward, sm80);
  }
}
