// Microbenchmark of the CUDA kernels of embedding: one row per case, with the bytes it must move and their share of the copy
// ceiling measured in the same run. Ids are Zipf's unless a case says otherwise. Usage:
// bench_embedding [--only PART_OF_A_NAME] [--plans]    --plans: every plan that serves, not the chosen one
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/embedding/kernels.h"
#include "rlk/backends.h"
#include "rlk/ops/embedding.h"

namespace rlk::bench {
namespace {

enum class Ids { kZipf, kUniform, kOne };

struct Case {
  const char* name;
  std::int64_t tokens, rows = 128256, columns = 4096;
  DType dtype = DType::kBFloat16, dweight_dtype = DType::kBFloat16;
  Ids ids = Ids::kZipf;
  bool backward = false, accumulate = false;
  std::int64_t pad = 0;  // elements between rows
};

class Memory {
 public:
  Memory(std::int64_t elements, DType dtype, bool filled) : dtype_(dtype) {
    cuda::check(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(elements, 1) * size_of(dtype))),
                "cudaMalloc");
    if (filled) fill_normal(data_, static_cast<std::size_t>(elements), dtype, 1.0f);
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  unsigned char* at(std::int64_t element) const {
    return static_cast<unsigned char*>(data_) + element * size_of(dtype_);
  }

 private:
  void* data_ = nullptr;
  DType dtype_;
};

void run(const Case& c, double ceiling, bool every_plan) {
  const std::int64_t row = c.columns + c.pad;
  std::mt19937 random(1);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(c.tokens));
  for (std::int64_t& id : ids) {
    if (c.ids == Ids::kUniform) id = static_cast<std::int64_t>(random() % static_cast<unsigned>(c.rows));
    if (c.ids == Ids::kZipf) {
      id = static_cast<std::int64_t>(std::pow(static_cast<double>(c.rows), random() / 4294967296.0)) - 1;
    }
  }
  const auto present = static_cast<std::int64_t>(std::set<std::int64_t>(ids.begin(), ids.end()).size());
  const Memory on_gpu(c.tokens, DType::kInt64, false);
  cuda::check(cudaMemcpy(on_gpu.at(0), ids.data(), ids.size() * 8, cudaMemcpyHostToDevice), "copy");
  // Activations rotate among buffers, so that L2 does not hold them from call to call.
  const std::int64_t of_call = c.tokens * row;
  const int count =
      static_cast<int>(std::clamp<std::int64_t>((std::int64_t{256} << 20) / std::max<std::int64_t>(of_call, 1), 1, 64));
  const Memory rows(of_call * count, c.dtype, c.backward);
  const Memory table(c.rows * row, c.backward ? c.dweight_dtype : c.dtype, true);
  const auto print = [&](double us, double moved, const std::string& plan) {
    std::printf("%-22s %-4s %7lld of [%lld, %lld], %lld rows %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  %s\n",
                c.name,
                c.dtype == DType::kFloat32   ? "f32"
                : c.dtype == DType::kFloat16 ? "f16"
                                             : "bf16",
                static_cast<long long>(c.tokens), static_cast<long long>(c.rows), static_cast<long long>(c.columns),
                static_cast<long long>(present), us, moved / 1e6, moved / us / 1e6, 100 * moved / (us * 1e-6) / ceiling,
                plan.c_str());
    std::fflush(stdout);
  };
  const auto fill = [&](EmbeddingTokens* p) {
    p->ids = on_gpu.at(0);
    p->id_rows = {c.tokens, 0, 1};
    p->num_tokens = c.tokens;
    p->num_rows = p->vocab_size = c.rows;
    p->columns = c.columns;
  };
  const int calls = std::max(count, 8);
  if (!c.backward) {
    const auto params_of = [&](int call) {
      EmbeddingParams p;
      fill(&p);
      p.weight = table.at(0);
      p.weight_stride = p.y_stride = row;
      p.y = rows.at(of_call * (call % count));
      p.dtype = c.dtype;
      return p;
    };
    // Rows of the table that several tokens share are counted once, the least that can be read.
    const double moved = static_cast<double>((c.tokens + present) * c.columns * size_of(c.dtype) + c.tokens * 8);
    const cuda::EmbeddingPlan chosen = cuda::choose_plan(params_of(0), cuda::multiprocessors(0));
    for (const cuda::EmbeddingPlan& plan : cuda::kEmbeddingPlans) {
      if (!cuda::serves(plan, params_of(0)) || (!every_plan && plan.vectors != chosen.vectors)) continue;
      const double us =
          median_us([&](cudaStream_t s, int call) { cuda::sm90::embedding(params_of(call), plan, s); }, calls, 15);
      print(us, moved, std::to_string(plan.vectors) + " vectors" + (plan.vectors == chosen.vectors ? ", chosen" : ""));
    }
    return;
  }
  EmbeddingBackwardParams params;
  fill(&params);
  params.dy_rows = {c.tokens, 0, row};
  params.dweight = table.at(0);
  params.dweight_stride = row;
  params.dtype = c.dtype;
  params.dweight_dtype = c.dweight_dtype;
  params.accumulate = c.accumulate;
  const Memory workspace((cuda::embedding_backward_workspace_bytes(params, 0) + 3) / 4, DType::kFloat32, false);
  params.workspace = workspace.at(0);
  // dy is read once and dweight is written once. With main_grad, the rows that have tokens are read and written.
  const double written =
      static_cast<double>((c.accumulate ? 2 * present : c.rows) * c.columns * size_of(c.dweight_dtype));
  const double moved = written + static_cast<double>(c.tokens * (c.columns * size_of(c.dtype) + 8));
  for (const cuda::EmbeddingBackwardPlan& plan : cuda::kEmbeddingBackwardPlans) {
    if (!cuda::serves(plan, params) || (!every_plan && plan.vectors != cuda::serves({true}, params))) continue;
    const double us = median_us(
        [&](cudaStream_t s, int call) {
          EmbeddingBackwardParams p = params;
          p.dy = rows.at(of_call * (call % count));
          cuda::sm90::embedding_backward(p, plan, s);
        },
        calls, 15);
    print(us, moved, plan.vectors ? "vectors" : "elements");
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::DType;
  std::string only;
  bool every_plan = false;
  CommandLine line;
  line.value("only", "PART_OF_A_NAME", &only).flag("plans", &every_plan);
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  std::vector<Case> cases;
  // Decode steps, micro-batches and training steps of Llama 3 8B.
  for (const std::int64_t tokens : {1, 8, 64, 256, 1024, 4096, 8192, 32768}) cases.push_back({"forward", tokens});
  Case c = {"forward, uniform", 8192};
  c.ids = Ids::kUniform;
  cases.push_back(c);
  cases.push_back({"forward, Qwen 0.5B", 32768, 151936, 896});
  c = {"forward, float32", 8192};
  c.dtype = DType::kFloat32;
  cases.push_back(c);
  c = {"forward, no vectors", 8192};
  c.pad = 1;
  cases.push_back(c);
  for (const std::int64_t tokens : {256, 8192, 32768, 131072}) {
    c = {"backward", tokens};
    c.backward = true;
    cases.push_back(c);
    c.name = "backward, main_grad";
    c.accumulate = true;
    c.dweight_dtype = DType::kFloat32;
    cases.push_back(c);
  }
  c = {"backward, float32", 8192};
  c.backward = true;
  c.dweight_dtype = DType::kFloat32;
  cases.push_back(c);
  c = {"backward, uniform", 32768};
  c.backward = true;
  c.ids = Ids::kUniform;
  cases.push_back(c);
  c.name = "backward, one id";
  c.ids = Ids::kOne;
  cases.push_back(c);
  c = {"backward, Qwen 0.5B", 32768, 151936, 896};
  c.backward = true;
  cases.push_back(c);
  c = {"backward, no vectors", 8192};
  c.backward = true;
  c.pad = 1;
  cases.push_back(c);
  for (const Case& each : cases) {
    if (std::string(each.name).find(only) != std::string::npos) run(each, ceiling, every_plan);
  }
}
