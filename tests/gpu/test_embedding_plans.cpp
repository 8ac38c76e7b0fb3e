// Every kernel that can serve a call of embedding has the CPU's bits: all plans, as built for sm_90 and as PTX for
// sm_80. The gradient also has them in a CUDA graph whose ids change between replays. Nothing is written outside the
// outputs and the workspace.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/embedding/kernels.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/ops/embedding.h"

namespace rlk::cuda {
namespace {

constexpr int kSkipped = 77;
constexpr unsigned char kCanary = 0xcd;
constexpr std::size_t kGuard = 4096;

enum class Ids { kZipf, kUniform, kOne, kEach };

struct Case {
  std::int64_t tokens, rows, columns;
  DType dtype = DType::kBFloat16;
  Ids ids = Ids::kZipf;
  bool bad_ids = false, narrow = false;
  std::int64_t vocab_start = 0, vocab_size = -1, padding_idx = -1;
  std::int64_t pad = 0;  // elements between rows
};

// Numbers of tokens: one token; sizes around tiles of the sort and of items, groups, runs and blocks; several blocks.
// Numbers of
// rows: sorts of one, two and three passes. Ids: one id has a tenth of the tokens or more; one id has all tokens; each
// id has a few; runs have 15, 16 and 17 tokens. Columns: less than a vec8; several slices; no whole vec8.
const std::vector<Case> kCases = {
    {1, 5, 64},
    {1, 128256, 8},
    {7, 3, 4096},
    {64, 1000, 4096},
    {300, 40, 37},
    {2047, 600, 8, DType::kFloat32},
    {2048, 511, 16, DType::kFloat32},
    {2049, 512, 24, DType::kFloat16},
    {8192, 128256, 32},
    {8192, 3000, 1032},
    {8193, 1, 128, DType::kFloat32},
    {16384, 2, 72, DType::kFloat32, Ids::kUniform},
    {20000, 32, 64, DType::kFloat32, Ids::kEach},        // runs of 16
    {20000, 34, 64, DType::kFloat32, Ids::kEach},        // runs of 15 and 16
    {20000, 30, 64, DType::kFloat32, Ids::kEach, true},  // runs of 17 and 18, some incomplete
    {20000, 33, 61, DType::kBFloat16, Ids::kUniform, true},
    {32768, 128256, 16, DType::kBFloat16, Ids::kZipf, true},
    {32768, 50000, 8, DType::kFloat32, Ids::kOne},
    {40000, 300000, 16, DType::kFloat16, Ids::kZipf, true, true},
    {70000, 262143, 8, DType::kBFloat16, Ids::kZipf},
    {5000, 100, 128, DType::kBFloat16, Ids::kUniform, true, false, 200, 450, 210},
    {5000, 100, 128, DType::kFloat32, Ids::kUniform, true, true, 0, 90, 0},
    {1500, 700, 40, DType::kBFloat16, Ids::kZipf, false, false, 0, -1, 0, 8},
    {1500, 700, 40, DType::kFloat32, Ids::kZipf, false, true, 0, -1, 3, 1},
    {1100, 90, 2056, DType::kFloat16, Ids::kZipf, false, false, 0, -1, -1, 3},
};

// Memory with a canary on both sides.
struct OnDevice {
  explicit OnDevice(const std::vector<unsigned char>& host) : OnDevice(host.size()) {
    check(cudaMemcpy(data, host.data(), size, cudaMemcpyHostToDevice), "copy");
  }
  explicit OnDevice(std::size_t bytes) : size(bytes) {
    check(cudaMalloc(&memory, size + 2 * kGuard), "cudaMalloc");
    check(cudaMemset(memory, kCanary, size + 2 * kGuard), "cudaMemset");
    data = memory + kGuard;
  }
  ~OnDevice() { cudaFree(memory); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  std::vector<unsigned char> host() const {
    std::vector<unsigned char> copy(size);
    check(cudaMemcpy(copy.data(), data, size, cudaMemcpyDeviceToHost), "copy");
    return copy;
  }
  bool is_intact() const {
    std::vector<unsigned char> all(size + 2 * kGuard);
    check(cudaMemcpy(all.data(), memory, all.size(), cudaMemcpyDeviceToHost), "copy");
    const auto is_canary = [](unsigned char c) { return c == kCanary; };
    return std::all_of(all.begin(), all.begin() + kGuard, is_canary) &&
           std::all_of(all.end() - kGuard, all.end(), is_canary);
  }
  unsigned char *memory = nullptr, *data = nullptr;
  std::size_t size;
};

// Normal values; a few are large or small, zeros, infinities or NaN.
std::vector<unsigned char> values(std::int64_t count, DType dtype, std::mt19937* random) {
  const int bytes = size_of(dtype);
  std::vector<unsigned char> memory(static_cast<std::size_t>(count * bytes));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < count; ++i) {
    constexpr float kValues[] = {0.0f, -0.0f, 1e-41f, -1e-6f, 3e4f, 1e20f, INFINITY, NAN};
    const float x = (*random)() % 512 == 0 ? kValues[(*random)() % 8] : normal(*random);
    unsigned char* to = &memory[static_cast<std::size_t>(i * bytes)];
    const std::uint16_t half = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
    dtype == DType::kFloat32 ? std::memcpy(to, &x, 4) : std::memcpy(to, &half, 2);
  }
  return memory;
}

std::vector<unsigned char> ids_of(const Case& c, std::mt19937* random) {
  const std::int64_t size = c.vocab_size < 0 ? c.vocab_start + c.rows : c.vocab_size;
  const int bytes = c.narrow ? 4 : 8;
  std::vector<unsigned char> memory(static_cast<std::size_t>(c.tokens * bytes));
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    constexpr std::int64_t kBad[] = {-1, -2147483648, 2147483647};
    std::int64_t id = c.ids == Ids::kUniform ? static_cast<std::int64_t>((*random)() % static_cast<unsigned>(size))
                      : c.ids == Ids::kOne   ? size / 3
                      : c.ids == Ids::kEach  ? t % size
                                            : static_cast<std::int64_t>(std::pow(size, (*random)() / 4294967296.0)) - 1;
    if (c.bad_ids && (*random)() % 7 == 0) id = (*random)() % 4 == 3 ? size : kBad[(*random)() % 3];
    std::memcpy(&memory[static_cast<std::size_t>(t * bytes)], &id, static_cast<std::size_t>(bytes));
  }
  return memory;
}

int wrong = 0, compared = 0;

void expect(const OnDevice& got, const std::vector<unsigned char>& want, const std::string& what) {
  ++compared;
  const std::vector<unsigned char> bytes = got.host();
  if (bytes == want && got.is_intact()) return;
  ++wrong;
  std::size_t i = 0;
  while (i < want.size() && bytes[i] == want[i]) ++i;
  std::printf("%s: byte %zu of %zu differs%s\n", what.c_str(), i, want.size(),
              got.is_intact() ? "" : ", or one outside");
}

std::string text(const Case& c) {
  return std::string(c.dtype == DType::kFloat32    ? "f32"
                     : c.dtype == DType::kBFloat16 ? "bf16"
                                                   : "f16") +
         " ids [" + std::to_string(c.tokens) + "], table [" + std::to_string(c.rows) + ", " +
         std::to_string(c.columns) + "]";
}

void fill_tokens(const Case& c, const void* ids, EmbeddingTokens* p) {
  p->ids = ids;
  p->id_rows = {c.tokens, 0, 1};
  p->id_dtype = c.narrow ? DType::kInt32 : DType::kInt64;
  p->num_tokens = c.tokens;
  p->num_rows = c.rows;
  p->columns = c.columns;
  p->vocab_start = c.vocab_start;
  p->vocab_size = c.vocab_size < 0 ? c.vocab_start + c.rows : c.vocab_size;
}

void run_forward(const Case& c, const std::vector<unsigned char>& ids, const OnDevice& ids_gpu, std::mt19937* random) {
  const std::int64_t row = c.columns + c.pad;
  const auto weight = values(c.rows * row, c.dtype, random);
  std::vector<unsigned char> y(static_cast<std::size_t>(c.tokens * row * size_of(c.dtype)), kCanary);
  EmbeddingParams p;
  fill_tokens(c, ids.data(), &p);
  p.weight = weight.data();
  p.y = y.data();
  p.weight_stride = p.y_stride = row;
  p.dtype = c.dtype;
  cpu::embedding(p);
  const OnDevice weight_gpu(weight);
  p.ids = ids_gpu.data;
  p.weight = weight_gpu.data;
  for (const EmbeddingPlan& plan : kEmbeddingPlans) {
    for (const int arch : {90, 80}) {
      const OnDevice got(y.size());
      p.y = got.data;
      if (!serves(plan, p)) continue;
      arch == 90 ? sm90::embedding(p, plan, nullptr) : sm80::embedding(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "embedding");
      expect(got, y, text(c) + ", y, plan " + std::to_string(plan.vectors) + ", sm_" + std::to_string(arch));
    }
  }
}

void run_backward(const Case& c, const std::vector<unsigned char>& ids, const OnDevice& ids_gpu, DType dweight_dtype,
                  bool accumulate, std::mt19937* random) {
  const std::int64_t row = c.columns + c.pad;
  const auto dy = values(c.tokens * row, c.dtype, random);
  std::vector<unsigned char> before(static_cast<std::size_t>(c.rows * row * size_of(dweight_dtype)), kCanary);
  if (accumulate) before = values(c.rows * row, DType::kFloat32, random);
  EmbeddingBackwardParams p;
  fill_tokens(c, ids.data(), &p);
  std::vector<unsigned char> dweight = before;
  p.dy = dy.data();
  p.dy_rows = {c.tokens, 0, row};
  p.dweight = dweight.data();
  p.dweight_stride = row;
  p.padding_idx = c.padding_idx;
  p.dtype = c.dtype;
  p.dweight_dtype = dweight_dtype;
  p.accumulate = accumulate;
  cpu::embedding_backward(p);
  const OnDevice dy_gpu(dy), workspace(static_cast<std::size_t>(embedding_backward_workspace_bytes(p, 0)));
  p.ids = ids_gpu.data;
  p.dy = dy_gpu.data;
  p.workspace = workspace.data;
  for (const EmbeddingBackwardPlan& plan : kEmbeddingBackwardPlans) {
    for (const int arch : {90, 80}) {
      const OnDevice got(before);
      p.dweight = got.data;
      if (!serves(plan, p)) continue;
      arch == 90 ? sm90::embedding_backward(p, plan, nullptr) : sm80::embedding_backward(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "embedding_backward");
      expect(got, dweight,
             text(c) + ", dweight" + (accumulate ? " of main_grad" : "") + (plan.vectors ? ", vectors" : ", elements") +
                 ", sm_" + std::to_string(arch));
      if (!workspace.is_intact()) {
        ++wrong;
        std::printf("%s: written outside of the workspace\n", text(c).c_str());
      }
    }
  }
}

// The test replays one graph with other ids in the same memory.
void run_graph(std::mt19937* random) {
  const Case c{10000, 5000, 64};
  const auto dy = values(c.tokens * c.columns, c.dtype, random);
  EmbeddingBackwardParams p;
  fill_tokens(c, nullptr, &p);
  p.dy_rows = {c.tokens, 0, c.columns};
  p.dweight_stride = c.columns;
  const OnDevice ids_gpu(static_cast<std::size_t>(c.tokens) * 8), dy_gpu(dy),
      got(static_cast<std::size_t>(c.rows * c.columns) * 2),
      workspace(static_cast<std::size_t>(embedding_backward_workspace_bytes(p, 0)));
  EmbeddingBackwardParams on_gpu = p;
  on_gpu.ids = ids_gpu.data;
  on_gpu.dy = dy_gpu.data;
  on_gpu.dweight = got.data;
  on_gpu.workspace = workspace.data;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  embedding_backward(on_gpu, 0, reinterpret_cast<Stream>(stream));
  check(cudaStreamEndCapture(stream, &graph), "end of capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < 20; ++i) {
    Case other = c;
    other.ids = i % 4 == 3 ? Ids::kOne : Ids::kZipf;
    const auto ids = ids_of(other, random);
    check(cudaMemcpyAsync(ids_gpu.data, ids.data(), ids.size(), cudaMemcpyHostToDevice, stream), "copy");
    check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "graph");
    std::vector<unsigned char> want(got.size);
    p.ids = ids.data();
    p.dy = dy.data();
    p.dweight = want.data();
    cpu::embedding_backward(p);
    expect(got, want, "replay " + std::to_string(i));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::printf("skipped: no device of compute capability 9.0\n");
    return cuda::kSkipped;
  }
  std::mt19937 random(1);
  for (const cuda::Case& c : cuda::kCases) {
    const auto ids = cuda::ids_of(c, &random);
    const cuda::OnDevice ids_gpu(ids);
    cuda::run_forward(c, ids, ids_gpu, &random);
    cuda::run_backward(c, ids, ids_gpu, c.dtype, false, &random);
    cuda::run_backward(c, ids, ids_gpu, DType::kFloat32, false, &random);
    cuda::run_backward(c, ids, ids_gpu, DType::kFloat32, true, &random);
  }
  cuda::run_graph(&random);
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
