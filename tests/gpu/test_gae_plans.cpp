// Every number of warps that may share a sequence gives gae, discounted_returns, vtrace and masked_whiten the CPU's
// bits, as built for sm_90 and as PTX for sm_80.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/kernels.h"
#include "cuda/common/sequence_warps.h"
#include "plan_memory.h"
#include "rlk/backends.h"
#include "rlk/ops/gae.h"
#include "rlk/ops/masked_whiten.h"

namespace rlk::cuda {
namespace {

struct Case {
  std::vector<std::int64_t> lengths;
  bool packed = false;
  DType mask_dtype = DType::kBool;
  std::int64_t shift = 0, pad = 0;  // in elements
  bool special = false;
  float gamma = 0.99f;
  bool stretches = false;  // true: whole stretches of tokens count, and so whole chunks; false: four of five tokens
                           // count
};

// Sequences: one token; sizes around a chunk; more chunks than a block's warps; empty; many short sequences; unaligned;
// not 16-byte aligned. Full chunks next to others, also with coefficients that become subnormal, vanish or are zero.
const std::vector<Case> kCases = {
    {{1}},
    {{127, 128, 129}, false, DType::kInt32},
    {{5000, 3, 0, 2049}, false, DType::kInt64},
    {{5000, 3, 0, 2049}, true, DType::kFloat32},
    {std::vector<std::int64_t>(700, 33), false, DType::kBool, 0, 3},
    {std::vector<std::int64_t>(700, 33), true, DType::kInt64, 1},
    {{4096, 4096, 17}, false, DType::kBool, 1, 1},
    {{4096, 4096, 17}, false, DType::kInt32, 2, 0, true},
    {{1000, 900, 800, 0}, true, DType::kBool, 0, 0, true},
    {{5000, 3, 0, 2049}, false, DType::kBool, 0, 3, false, 0.99f, true},
    {{4096, 640, 128}, false, DType::kBool, 0, 0, true, 1.0f, true},
    {{4096, 640, 128}, true, DType::kInt64, 1, 0, true, 0.99f, true},
    {{3000, 640}, false, DType::kInt64, 0, 0, false, 0.45f, true},
    {{3000, 640}, false, DType::kInt32, 0, 0, true, 0.2f, true},
    {{3000, 640}, false, DType::kFloat32, 0, 0, true, 0.0f, true},
};

std::string text(const Case& c) {
  return std::to_string(c.lengths.size()) + " sequences of up to " +
         std::to_string(*std::max_element(c.lengths.begin(), c.lengths.end())) + (c.packed ? ", packed" : "") +
         ", shift " + std::to_string(c.shift);
}

void run_case(const Case& c, std::mt19937* random) {
  std::int64_t longest = 0, total = 0;
  std::vector<std::int64_t> starts;
  for (const std::int64_t n : c.lengths) {
    starts.push_back(total);
    longest = std::max(longest, n);
    total += n;
  }
  starts.push_back(total);
  const std::int64_t num = static_cast<std::int64_t>(c.lengths.size()), stride = c.packed ? 0 : longest + c.pad;
  const std::int64_t elements = c.shift + (c.packed ? total : num * stride) + 4;
  const int mask_bytes = size_of(c.mask_dtype);
  std::vector<std::vector<unsigned char>> inputs;
  for (int i = 0; i < 4; ++i) inputs.push_back(matrix(1, elements, elements, DType::kFloat32, random, c.special));
  std::vector<unsigned char> mask(static_cast<std::size_t>(elements * mask_bytes), 0);
  for (std::int64_t i = 0; i < elements; ++i) {
    if (c.stretches ? i / 700 % 4 == 2 : (*random)() % 5 == 0) continue;
    const float real = 1.0f;
    const std::int64_t one = 1;
    const void* from = c.mask_dtype == DType::kFloat32 ? static_cast<const void*>(&real) : &one;
    std::memcpy(&mask[static_cast<std::size_t>(i * mask_bytes)], from, static_cast<std::size_t>(mask_bytes));
  }
  std::vector<unsigned char> bytes_of_starts(starts.size() * 8);
  std::memcpy(bytes_of_starts.data(), starts.data(), bytes_of_starts.size());
  const std::vector<unsigned char> clean(static_cast<std::size_t>(elements * 4), kCanary);

  const OnDevice mask_gpu(mask), starts_gpu(bytes_of_starts);
  std::vector<OnDevice*> inputs_gpu;
  for (const auto& memory : inputs) inputs_gpu.push_back(new OnDevice(memory));
  const auto sequences = [&](bool gpu) {
    Sequences q;
    q.num_sequences = num;
    q.num_tokens = c.packed ? total : longest;
    q.cu_dtype = DType::kInt64;
    if (c.packed) q.cu_seqlens = gpu ? starts_gpu.data : bytes_of_starts.data();
    return q;
  };
  const auto input = [&](int i, bool gpu) {
    const void* data = gpu ? inputs_gpu[static_cast<std::size_t>(i)]->data : inputs[static_cast<std::size_t>(i)].data();
    return TokenArray<const float>{static_cast<const float*>(data) + c.shift, stride};
  };
  const auto mask_of = [&](bool gpu) {
    const void* data = gpu ? mask_gpu.data : mask.data();
    return rlk::mask_of(static_cast<const unsigned char*>(data) + c.shift * mask_bytes, stride, c.mask_dtype);
  };
  const auto output = [&](void* data) { return TokenArray<float>{static_cast<float*>(data) + c.shift, stride}; };

  for (int kind = 0; kind < 4; ++kind) {  // the last kind is discounted_returns with reset
    const auto params = [&](bool gpu, void* advantages, void* returns) {
      GaeParams p;
      p.kind = kind == 3 ? GaeKind::kDiscountedReturns : static_cast<GaeKind>(kind);
      p.reset = kind == 3;
      p.sequences = sequences(gpu);
      p.rewards = input(0, gpu);
      p.values = input(1, gpu);
      p.logprob = input(2, gpu);
      p.rollout_logprob = input(3, gpu);
      p.mask = mask_of(gpu);
      p.gamma = c.gamma;
      p.lam = 0.95f;
      p.advantages = output(advantages);
      p.returns = output(returns);
      return p;
    };
    std::vector<unsigned char> advantages = clean, returns = clean;
    cpu::gae(params(false, advantages.data(), returns.data()));
    for (const int warps : kSequenceWarps) {
      for (const int arch : {90, 80}) {
        const OnDevice got_advantages(clean), got_returns(clean);
        const GaeParams p = params(true, got_advantages.data, got_returns.data);
        arch == 90 ? sm90::gae(p, warps, nullptr) : sm80::gae(p, warps, nullptr);
        check(cudaDeviceSynchronize(), "gae");
        const std::string what = text(c) + ", kind " + std::to_string(kind) + ", " + std::to_string(warps) +
                                 " warps, sm_" + std::to_string(arch);
        expect(got_advantages.host(), advantages, what + ", advantages");
        expect(got_returns.host(), returns, what + ", returns");
      }
    }
  }
  const auto whiten = [&](bool gpu, void* y) {
    MaskedWhitenParams p;
    p.sequences = sequences(gpu);
    p.x = input(1, gpu);
    p.mask = mask_of(gpu);
    p.y = output(y);
    return p;
  };
  std::vector<unsigned char> y = clean;
  cpu::masked_whiten(whiten(false, y.data()));
  for (const int warps : kSequenceWarps) {
    for (const int arch : {90, 80}) {
      const OnDevice got(clean);
      MaskedWhitenParams p = whiten(true, got.data);
      const OnDevice workspace(
          std::vector<unsigned char>(static_cast<std::size_t>(masked_whiten_workspace_bytes(p, 0))));
      p.workspace = workspace.data;
      arch == 90 ? sm90::masked_whiten(p, warps, nullptr) : sm80::masked_whiten(p, warps, nullptr);
      check(cudaDeviceSynchronize(), "masked_whiten");
      expect(got.host(), y, text(c) + ", whitened, " + std::to_string(warps) + " warps, sm_" + std::to_string(arch));
    }
  }
  for (OnDevice* memory : inputs_gpu) delete memory;
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
  for (const cuda::Case& c : cuda::kCases) cuda::run_case(c, &random);
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
