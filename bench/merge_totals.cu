// Cycles that 256 threads of a block need to read 96 or 64 KiB of L2, to write them, or to merge sums into them. The
// forward of attention with 256 columns merges splits in this way. The time ends when all writes have arrived.
//   nvcc -arch=sm_90a -std=c++20 bench/merge_totals.cu -o merge_totals && ./merge_totals
#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

constexpr int kThreads = 256, kRepeats = 200, kSharedBytes = 200 * 1024;  // one block of threads per multiprocessor
enum class Work { kRead, kWrite, kMerge };

// Each thread has kFours groups of four sums, and loads eight groups at once, then the others.
template <Work kWork, int kFours>
__global__ void __launch_bounds__(kThreads, 1) move_totals(float4* all, long long* cycles) {
  float4* totals = all + static_cast<long long>(blockIdx.x) * kFours * kThreads + threadIdx.x;
  float4 sums[kFours];
  for (int j = 0; j < kFours; ++j) sums[j] = make_float4(1.0f, threadIdx.x, j, 0.0f);
  long long later_half = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    __syncthreads();
    const long long begin = clock64();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int first = part == 0 ? 0 : 8, last = part == 0 ? 8 : kFours;
      float4 before[kFours];
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        if (kWork != Work::kWrite && j >= first && j < last) before[j] = __ldcg(totals + j * kThreads);
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        if (j < first || j >= last) continue;
        if constexpr (kWork != Work::kWrite) {
          sums[j].x += before[j].x;
          sums[j].y += before[j].y;
          sums[j].z += before[j].z;
          sums[j].w += before[j].w;
        }
        if constexpr (kWork != Work::kRead) __stcg(totals + j * kThreads, sums[j]);
      }
    }
    if constexpr (kWork != Work::kRead) __threadfence();
    if (repeat >= kRepeats / 2) later_half += clock64() - begin;
  }
  float sum = 0.0f;  // keeps the loads
  for (int j = 0; j < kFours; ++j) sum += sums[j].x + sums[j].y + sums[j].z + sums[j].w;
  if (threadIdx.x == 0) cycles[blockIdx.x] = later_half / (kRepeats / 2);
  if (sum == -1.0f) cycles[blockIdx.x] = -1;
}

template <Work kWork, int kFours>
void measure(const char* name, int most, float4* all, long long* cycles) {
  cudaFuncSetAttribute(move_totals<kWork, kFours>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  for (int blocks : {1, most / 4, most / 2, most}) {
    move_totals<kWork, kFours><<<blocks, kThreads, kSharedBytes>>>(all, cycles);
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
      std::printf("%s: %s\n", name, cudaGetErrorString(error));
      return;
    }
    std::vector<long long> sorted(cycles, cycles + blocks);
    std::sort(sorted.begin(), sorted.end());
    const long long middle = sorted[blocks / 2];
    std::printf("%s %3d KiB, %3d multiprocessors: %5lld cycles, %4.1f bytes per cycle\n", name, kFours * 4, blocks,
                middle, kFours * 16.0 * kThreads / static_cast<double>(middle));
  }
}

}  // namespace

int main() {
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMultiProcessorCount, 0);
  const std::size_t bytes = static_cast<std::size_t>(most) * 24 * kThreads * sizeof(float4);
  float4* all = nullptr;
  long long* cycles = nullptr;
  cudaMalloc(&all, bytes);
  cudaMemset(all, 0, bytes);
  cudaMallocManaged(&cycles, most * sizeof(long long));
  measure<Work::kRead, 24>("read", most, all, cycles);
  measure<Work::kWrite, 24>("write", most, all, cycles);
  measure<Work::kMerge, 24>("merge", most, all, cycles);
  measure<Work::kRead, 16>("read", most, all, cycles);
  measure<Work::kWrite, 16>("write", most, all, cycles);
  measure<Work::kMerge, 16>("merge", most, all, cycles);
}
