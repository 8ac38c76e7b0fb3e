// What racecheck makes of a stage of shared memory that readers hand back to a copying warp. In the first kernel every
// reader arrives at the barrier. In the second they meet at bar.sync, and one lane of each warp arrives: ordered as well,
// since bar.sync and the arrival each release what came before. racecheck reports the second alone.
//   nvcc -arch=sm_90a -std=c++20 bench/hand_over.cu -o hand_over && compute-sanitizer --tool racecheck ./hand_over
#include <cstdint>
#include <cstdio>

namespace {

constexpr int kReaders = 256, kFloats = 64, kRounds = 64;

__device__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ void wait_for(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

template <bool kAllArrive>
__global__ void hand_over(const float* from, float* to) {
  __shared__ alignas(128) float stage[kFloats];
  __shared__ alignas(8) std::uint64_t barriers[2];
  const std::uint32_t full = shared_address(&barriers[0]), empty = shared_address(&barriers[1]);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty), "r"(kAllArrive ? kReaders : kReaders / 32));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kReaders) {  // the copying warp
    for (int i = 0; i < kRounds; ++i) {
      wait_for(empty, (i & 1) ^ 1);
      if (threadIdx.x > kReaders) continue;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "n"(kFloats * 4) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       shared_address(stage)),
                   "l"(from + i * kFloats), "n"(kFloats * 4), "r"(full)
                   : "memory");
    }
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < kRounds; ++i) {
    wait_for(full, i & 1);
    sum += stage[threadIdx.x % kFloats];
    asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory");
    if (kAllArrive || threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
    }
  }
  to[threadIdx.x] = sum;
}

}  // namespace

int main() {
  float *from, *to;
  cudaMalloc(&from, kRounds * kFloats * sizeof(float));
  cudaMalloc(&to, kReaders * sizeof(float));
  cudaMemset(from, 0, kRounds * kFloats * sizeof(float));
  hand_over<true><<<1, kReaders + 32>>>(from, to);
  hand_over<false><<<1, kReaders + 32>>>(from, to);
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(status));
  return status == cudaSuccess ? 0 : 1;
}
