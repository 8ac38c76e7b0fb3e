// The streaming kernel on a device with few multiprocessors (an MPS share, a small GPU). The kernels are the shipped
// kernels; a stand-in for cuda/common/launch.cpp reports few multiprocessors. The bits must be the CPU's.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/common/launch.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

int claimed_multiprocessors = 1;
int compute_capability(int) { return 90; }
int multiprocessors(int) { return claimed_multiprocessors; }
int current_device() { return 0; }
void no_kernel(const char* op) { throw Unsupported(op); }

}  // namespace rlk::cuda

namespace {

constexpr int kSkipped = 77;
constexpr std::int64_t kRows = 600, kColumns = 5000;

void check(cudaError_t status) { rlk::cuda::check(status, "few multiprocessors"); }

template <class T>
T* on_device(const std::vector<T>& v) {
  T* p;
  check(cudaMalloc(&p, v.size() * sizeof(T)));
  check(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

template <class Storage, class Store>
int wrong_rows(rlk::DType dtype, Store store) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<Storage> logits(kRows * kColumns);
  for (auto& x : logits) x = store(normal(random));
  std::vector<std::int64_t> target(kRows);
  for (std::int64_t i = 0; i < kRows; ++i) target[i] = i;

  rlk::LogprobParams p;
  p.dtype = dtype;
  p.logits_rows = {.inner = kRows, .outer_stride = 0, .inner_stride = kColumns};
  p.target_rows = {.inner = kRows, .outer_stride = 0, .inner_stride = 1};
  p.num_rows = kRows;
  p.num_columns = p.vocab_size = p.valid_vocab = kColumns;
  std::vector<float> want(kRows), got(kRows);
  p.logits = logits.data();
  p.target = target.data();
  p.lse = want.data();
  rlk::cpu::logprob(p);

  p.logits = on_device(logits);
  p.target = on_device(target);
  p.lse = on_device(got);
  int wrong = 0;
  for (const int multiprocessors : {1, 2, 3, 4, 5, 16}) {
    rlk::cuda::claimed_multiprocessors = multiprocessors;
    const std::int64_t bytes = rlk::cuda::logprob_workspace_bytes(p, 0);
    check(cudaMalloc(&p.workspace, bytes));
    check(cudaMemset(p.workspace, 0x7f, bytes));
    rlk::cuda::logprob(p, 0, 0);
    check(cudaMemcpy(got.data(), p.lse, kRows * sizeof(float), cudaMemcpyDeviceToHost));
    check(cudaFree(p.workspace));
    int here = 0;
    for (std::int64_t i = 0; i < kRows; ++i) here += std::memcmp(&want[i], &got[i], sizeof(float)) != 0;
    if (here)
      std::printf("%d multiprocessors, %d-byte logits: %d rows differ\n", multiprocessors, size_of(dtype), here);
    wrong += here;
  }
  return wrong;
}

}  // namespace

int main() {
  int count = 0;
  cudaDeviceProp properties{};
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0 ||
      cudaGetDeviceProperties(&properties, 0) != cudaSuccess || properties.major != 9) {
    std::puts("no device of compute capability 9.0");
    return kSkipped;
  }
  const int wrong = wrong_rows<float>(rlk::DType::kFloat32, [](float x) { return x; }) +
                    wrong_rows<std::uint16_t>(rlk::DType::kBFloat16, [](float x) { return rlk::bf16_rn(x); });
  std::printf("%d rows differ\n", wrong);
  return wrong != 0;
}
