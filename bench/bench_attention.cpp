// Microbenchmark of the CUDA kernels of attention: one row per case, with its arithmetic and the share of the fp32 units'
// peak. Usage: bench_attention [--only PART_OF_A_NAME] [--plan PART_OF_A_NAME] [--head-dim D] [--portable]
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/attention/kernels.h"
#include "kernels/attention/span.h"

namespace rlk::bench {
namespace {

struct Case {
  const char* name;
  std::int64_t sequences, queries, keys, q_heads, kv_heads, head_dim;
  DType dtype = DType::kBFloat16;
  std::int64_t window = 0;
  bool packed = false;
};

class Memory {
 public:
  Memory(std::int64_t elements, DType dtype, bool filled) {
    cuda::check(cudaMalloc(&data_, static_cast<std::size_t>(elements * size_of(dtype)) + 16), "cudaMalloc");
    if (filled) fill_normal(data_, static_cast<std::size_t>(elements), dtype, 1.0f);
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// The number of pairs (query, key that the query sees) in one sequence.
double pairs(const Case& c) {
  double sum = 0;
  for (std::int64_t i = 0; i < c.queries; ++i) {
    const std::int64_t seen = c.keys - c.queries + i + 1;
    sum += static_cast<double>(c.window > 0 ? std::min(seen, c.window) : seen);
  }
  return sum;
}

// `only`: a part of the names of the plans to run.
void run(const Case& c, Exp exp, const std::string& only) {
  const std::int64_t q_rows = c.sequences * c.queries * c.q_heads, k_rows = c.sequences * c.keys * c.kv_heads;
  const Memory q(q_rows * c.head_dim, c.dtype, true), dout(q_rows * c.head_dim, c.dtype, true);
  const Memory k(k_rows * c.head_dim, c.dtype, true), v(k_rows * c.head_dim, c.dtype, true);
  const Memory out(q_rows * c.head_dim, c.dtype, false), dq(q_rows * c.head_dim, c.dtype, false);
  const Memory dk(k_rows * c.head_dim, c.dtype, false), dv(k_rows * c.head_dim, c.dtype, false);
  const Memory lse(q_rows, DType::kFloat32, false);
  std::vector<std::int32_t> offsets_q, offsets_k;
  for (std::int64_t b = 0; b <= c.sequences; ++b) {
    offsets_q.push_back(static_cast<std::int32_t>(b * c.queries));
    offsets_k.push_back(static_cast<std::int32_t>(b * c.keys));
  }
  const Memory cu_q(c.sequences + 1, DType::kInt32, false), cu_k(c.sequences + 1, DType::kInt32, false);
  const std::size_t bytes = offsets_q.size() * 4;
  cuda::check(cudaMemcpy(cu_q.data(), offsets_q.data(), bytes, cudaMemcpyHostToDevice), "copy");
  cuda::check(cudaMemcpy(cu_k.data(), offsets_k.data(), bytes, cudaMemcpyHostToDevice), "copy");

  AttentionParams p;
  const auto heads = [&](const Memory& m, std::int64_t tokens, std::int64_t count) {
    return AttentionHeads{m.data(), c.packed ? 0 : tokens * count * c.head_dim, count * c.head_dim, c.head_dim};
  };
  p.q = heads(q, c.queries, c.q_heads);
  p.k = heads(k, c.keys, c.kv_heads);
  p.v = heads(v, c.keys, c.kv_heads);
  if (c.packed) {
    p.cu_seqlens_q = static_cast<const std::int32_t*>(cu_q.data());
    p.cu_seqlens_k = static_cast<const std::int32_t*>(cu_k.data());
  }
  p.num_sequences = c.sequences;
  p.q_tokens = c.packed ? c.sequences * c.queries : c.queries;
  p.k_tokens = c.packed ? c.sequences * c.keys : c.keys;
  p.num_q_heads = c.q_heads;
  p.num_kv_heads = c.kv_heads;
  p.head_dim = p.value_dim = c.head_dim;
  p.softmax_scale = 0.0883883f;
  p.dtype = c.dtype;
  p.window_size = c.window;
  p.exp = exp;
  p.out = out.data();
  p.lse = static_cast<float*>(lse.data());
  AttentionBackwardParams b{static_cast<AttentionInput&>(p)};
  b.out = heads(out, c.queries, c.q_heads);
  b.dout = heads(dout, c.queries, c.q_heads);
  b.lse = p.lse;
  b.dq = dq.data();
  b.dk = dk.data();
  b.dv = dv.data();

  int clock_khz = 0;
  cuda::check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0), "cudaDeviceGetAttribute");
  const double peak = 2.0 * 128 * cuda::multiprocessors(0) * clock_khz * 1e3;
  const auto report = [&](const char* pass, double us, double products) {
    const double work = 2 * products * pairs(c) * static_cast<double>(c.sequences * c.q_heads * c.head_dim);
    std::printf(
        "%-18s %-16s %-4s %4lld x %5lld/%5lld (%lld/%lld) x %-3lld %11.1f us %7.2f TFLOP/s %5.1f %% of fp32's peak\n",
        c.name, pass,
        c.dtype == DType::kFloat32   ? "f32"
        : c.dtype == DType::kFloat16 ? "f16"
                                     : "bf16",
        static_cast<long long>(c.sequences), static_cast<long long>(c.queries), static_cast<long long>(c.keys),
        static_cast<long long>(c.q_heads), static_cast<long long>(c.kv_heads), static_cast<long long>(c.head_dim), us,
        work / us / 1e6, 100 * work / (us * 1e-6) / peak);
    std::fflush(stdout);
  };
  const cuda::AttentionPlan plan = cuda::choose_plan(p, 90, cuda::multiprocessors(0));
  const Memory results(cuda::workspace_bytes_of(p, plan) / 4, DType::kFloat32, false);
  p.workspace = results.data();
  const auto is_wanted = [&](const std::string& name) { return name.find(only) != std::string::npos; };
  const auto forward = [&](cudaStream_t s, int) { cuda::sm90::attention(p, plan, s); };
  if (is_wanted(cuda::name_of(plan))) report(cuda::name_of(plan), median_us(forward, 3, 5), 2);
  if (c.queries == 1) return;
  forward(nullptr, 0);  // the backward reads its results
  for (const cuda::GradientKernel kernel : cuda::kGradientKernels) {
    const std::string name = std::string("backward, ") + cuda::name_of(kernel);
    if (!cuda::fits_plan(b, kernel, 90) || !is_wanted(name)) continue;
    const Memory workspace(cuda::workspace_bytes_of(b, kernel) / 4, DType::kFloat32, false);
    b.workspace = workspace.data();
    const auto call = [&](cudaStream_t s, int) { cuda::sm90::attention_backward(b, kernel, s); };
    report(name.c_str(), median_us(call, 2, 5), 5);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::DType;
  std::string only, plan;
  std::int64_t head_dim = 0;
  bool portable = false;
  CommandLine line;
  line.value("only", "PART_OF_A_NAME", &only).value("plan", "PART_OF_A_NAME", &plan);
  line.value("head-dim", "D", &head_dim).flag("portable", &portable);
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  // Shapes of Llama 3 8B and Qwen3 8B: training, prefill, a chunk of a prefill, decode; then other widths.
  const std::vector<Case> cases = {
      {"train", 4, 2048, 2048, 32, 8, 128},
      {"train packed", 16, 512, 512, 32, 8, 128, DType::kBFloat16, 0, true},
      {"train of 4096", 4, 4096, 4096, 32, 8, 128, DType::kBFloat16, 0, true},
      {"train of 16384", 1, 16384, 16384, 32, 8, 128, DType::kBFloat16, 0, true},
      {"prefill", 1, 8192, 8192, 32, 8, 128},
      {"window", 1, 8192, 8192, 32, 8, 128, DType::kBFloat16, 1024},
      {"chunk", 1, 512, 16384, 32, 8, 128},
      {"decode", 1, 1, 8192, 32, 8, 128},
      {"decode", 64, 1, 4096, 32, 8, 128},
      {"head_dim 64", 4, 2048, 2048, 32, 8, 64},
      {"head_dim 256", 4, 2048, 2048, 16, 4, 256},
      {"float32", 4, 2048, 2048, 32, 8, 128, DType::kFloat32},
  };
  for (const Case& each : cases) {
    if (std::string(each.name).find(only) == std::string::npos) continue;
    if (head_dim == 0 || each.head_dim == head_dim)
      run(each, portable ? rlk::Exp::kPortable : rlk::Exp::kHardware, plan);
  }
}
