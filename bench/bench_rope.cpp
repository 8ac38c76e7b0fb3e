// Microbenchmark of the CUDA kernels of rope: one row per case, with the bytes it must move and their share of the copy
// ceiling measured in the same run. Usage:
// bench_rope [--only PART_OF_A_NAME] [--head-dim D] [--plans]    --plans: every plan that serves, not the chosen one
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/rope/kernels.h"
#include "rlk/backends.h"
#include "rlk/ops/rope.h"

namespace rlk::bench {
namespace {

struct Case {
  const char* name;
  std::int64_t tokens, q_heads, k_heads, head_dim, rotary_dim;
  DType dtype = DType::kBFloat16, angle_dtype = DType::kFloat32;
  bool interleaved = false, round_products = false, per_pair = true, ids = true;
  bool heads_first = false;  // [batch of 4, heads, seq, head_dim] out of [batch, seq, heads, head_dim]
  bool fused = false;        // queries and keys are slices of a fused projection
};

// Device memory for every buffer that calls rotate among: together the buffers exceed the L2 several times.
class Buffers {
 public:
  Buffers(std::size_t bytes, int count, DType dtype, bool filled) : bytes_((bytes + 255) / 256 * 256), count_(count) {
    cuda::check(cudaMalloc(&memory_, bytes_ * count), "cudaMalloc");
    if (filled) fill_normal(memory_, bytes_ * count / size_of(dtype), dtype, 1.0f);
  }
  ~Buffers() { cudaFree(memory_); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  unsigned char* at(int call) const { return static_cast<unsigned char*>(memory_) + bytes_ * (call % count_); }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_;
  int count_;
};

constexpr std::int64_t kPositions = 40960;  // positions of Qwen3

void run(const Case& c, double ceiling, bool every_plan) {
  const std::int64_t heads = c.q_heads + c.k_heads, width = c.per_pair ? c.rotary_dim / 2 : c.rotary_dim;
  const std::int64_t all_heads = c.fused ? heads + c.k_heads : heads;  // values lie after the keys
  const auto bytes_of = [&](std::int64_t h) {
    return static_cast<std::size_t>(c.tokens * h * c.head_dim * size_of(c.dtype));
  };
  const std::size_t in_bytes = bytes_of(all_heads), out_bytes = bytes_of(heads);
  const std::int64_t rows = c.ids ? kPositions : c.tokens;
  const std::size_t table_bytes = static_cast<std::size_t>(rows * width * size_of(c.angle_dtype));
  const int count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / (in_bytes + out_bytes), 1, 64));
  const int calls = std::max(count, static_cast<int>(std::clamp<std::size_t>((256u << 20) / in_bytes, 1, 64)));
  const Buffers x(in_bytes, count, c.dtype, true), y(out_bytes, count, c.dtype, false);
  const Buffers cos(table_bytes, 1, c.angle_dtype, true), sin(table_bytes, 1, c.angle_dtype, true);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(c.tokens));
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i) % 8192;
  const Buffers ids(positions.size() * 8, 1, DType::kInt64, false);
  cuda::check(cudaMemcpy(ids.at(0), positions.data(), positions.size() * 8, cudaMemcpyHostToDevice), "copy");

  RopeParams params;
  params.num_tokens = params.inner_tokens = c.tokens;
  params.head_dim = c.head_dim;
  params.rotary_dim = c.rotary_dim;
  params.width = width;
  params.dtype = c.dtype;
  params.angle_dtype = c.angle_dtype;
  params.interleaved = c.interleaved;
  params.round_products = c.round_products;
  params.cos.data = cos.at(0);
  params.sin.data = sin.at(0);
  params.cos.tokens = params.sin.tokens = {0, width};
  params.position_ids = c.ids ? ids.at(0) : nullptr;
  params.id_tokens = {0, 1};
  params.max_position = kPositions;
  const std::int64_t batch = c.heads_first && c.tokens % 4 == 0 ? 4 : 1, seq = c.tokens / batch;
  if (c.heads_first) {
    params.inner_tokens = seq;
    params.id_tokens.outer = seq;
    params.cos.tokens.outer = params.sin.tokens.outer = seq * width;
  }
  const auto params_of = [&](int call) {
    RopeParams p = params;
    std::int64_t first = 0;
    for (RopeHeads* h : {&p.q, &p.k}) {
      h->num_heads = h == &p.q ? c.q_heads : c.k_heads;
      h->x =
          x.at(call) + (c.fused ? first * c.head_dim * size_of(c.dtype) : static_cast<std::int64_t>(bytes_of(first)));
      h->y = y.at(call) + bytes_of(first);
      const std::int64_t row = (c.fused ? all_heads : h->num_heads) * c.head_dim;
      h->x_tokens = {row * seq, row};
      h->x_head_stride = c.head_dim;
      h->y_tokens = {h->num_heads * c.head_dim * seq, h->num_heads * c.head_dim};
      h->y_head_stride = c.head_dim;
      if (c.heads_first) {
        h->y_tokens.inner = c.head_dim;
        h->y_head_stride = seq * c.head_dim;
      }
      first += h->num_heads;
    }
    return p;
  };
  // Angles are not counted: each token reads them once, from caches if positions repeat.
  const double moved = 2.0 * static_cast<double>(out_bytes);
  const cuda::RopePlan chosen = cuda::choose_plan(params_of(0), 90, cuda::multiprocessors(0));
  const auto is_chosen = [&](const cuda::RopePlan& plan) {
    return plan.heads == chosen.heads && plan.streams == chosen.streams && plan.lanes == chosen.lanes;
  };
  for (const cuda::RopePlan& plan : cuda::kRopePlans) {
    if (!cuda::serves(plan, params_of(0), 90) || (!every_plan && !is_chosen(plan))) continue;
    const double us =
        median_us([&](cudaStream_t s, int call) { cuda::sm90::rope(params_of(call), plan, s); }, calls, 15);
    std::printf(
        "%-22s %-4s %7lld x (%lld + %lld) x %-4lld %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  %d heads%s%s\n",
        c.name,
        c.dtype == DType::kFloat32   ? "f32"
        : c.dtype == DType::kFloat16 ? "f16"
                                     : "bf16",
        static_cast<long long>(c.tokens), static_cast<long long>(c.q_heads), static_cast<long long>(c.k_heads),
        static_cast<long long>(c.head_dim), us, moved / 1e6, moved / us / 1e6, 100 * moved / (us * 1e-6) / ceiling,
        plan.heads, plan.lanes ? " by lanes" : "", is_chosen(plan) ? ", chosen" : "");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::DType;
  std::string only;
  std::int64_t head_dim = 0;
  bool every_plan = false;
  CommandLine line;
  line.value("only", "PART_OF_A_NAME", &only).value("head-dim", "N", &head_dim).flag("plans", &every_plan);
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  std::vector<Case> cases;
  // Decode steps, micro-batches and training steps of Llama 3 8B and Qwen3 8B.
  for (const std::int64_t tokens : {1, 8, 16, 64, 256, 1024, 2048, 4096, 8192, 32768}) {
    cases.push_back({"tokens", tokens, 32, 8, 128, 128});
  }
  Case c = {"transposed view", 8192, 32, 8, 128, 128};
  c.heads_first = true;
  cases.push_back(c);
  c = {"fused projection", 8192, 32, 8, 128, 128};
  c.fused = true;
  cases.push_back(c);
  c = {"interleaved", 8192, 32, 8, 128, 128};
  c.interleaved = true;
  cases.push_back(c);
  c = {"input", 8192, 32, 8, 128, 128, DType::kBFloat16, DType::kBFloat16};
  c.round_products = true;
  cases.push_back(c);
  c.name = "input, hugging face";
  c.per_pair = c.ids = false;
  cases.push_back(c);
  c.name = "columns, hugging face";
  c.round_products = false;
  cases.push_back(c);
  c.name = "columns, hugging face, heads first";
  c.heads_first = true;
  cases.push_back(c);
  c.name = "input, hugging face, heads first";
  c.round_products = true;
  cases.push_back(c);
  cases.push_back({"keys of MLA", 8192, 64, 1, 64, 64});
  cases.push_back({"a quarter", 8192, 16, 2, 256, 64});
  cases.push_back({"half", 8192, 32, 2, 128, 64});
  cases.push_back({"a width of 80", 8192, 32, 32, 80, 80});
  cases.push_back({"float16", 8192, 32, 8, 128, 128, DType::kFloat16});
  cases.push_back({"float32", 8192, 32, 8, 128, 128, DType::kFloat32});
  cases.push_back({"no vectors", 8192, 32, 8, 126, 126});
  for (const Case& each : cases) {
    if (std::string(each.name).find(only) == std::string::npos) continue;
    if (head_dim == 0 || each.head_dim == head_dim) run(each, ceiling, every_plan);
  }
}
