// Timing of device work for the microbenchmarks: graph replays between events, medians, and the ceilings of memory.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "cuda/common/launch.h"

namespace rlk::bench {

constexpr float kWarmUpMs = 150;

// Median time of one call of `enqueue` in microseconds: `calls` of them in a graph, replayed `replays` times.
inline double median_us(const std::function<void(cudaStream_t, int)>& enqueue, int calls, int replays) {
  cudaStream_t stream;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  enqueue(stream, 0);  // modules load and attributes are set outside the capture
  cuda::check(cudaStreamSynchronize(stream), "warm-up");
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) enqueue(stream, i);
  cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda::check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  std::vector<double> times;
  // Clocks rise only under load: keep the device busy for a while before the first replay that counts.
  float warm_ms = 0;
  cuda::check(cudaEventRecord(start, stream), "event");
  while (warm_ms < kWarmUpMs) {
    cuda::check(cudaGraphLaunch(executable, stream), "graph launch");
    cuda::check(cudaEventRecord(stop, stream), "event");
    cuda::check(cudaEventSynchronize(stop), "warm-up");
    cuda::check(cudaEventElapsedTime(&warm_ms, start, stop), "event");
  }
  for (int i = 0; i < replays; ++i) {
    cuda::check(cudaEventRecord(start, stream), "event");
    cuda::check(cudaGraphLaunch(executable, stream), "graph launch");
    cuda::check(cudaEventRecord(stop, stream), "event");
    cuda::check(cudaEventSynchronize(stop), "replay");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
    times.push_back(1e3 * ms / calls);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// Bytes per second of a device-to-device copy, read plus written. Not in a graph: a copy node takes a slower path.
inline double copy_ceiling(std::size_t bytes = std::size_t{2} << 30) {
  void *a, *b;
  cuda::check(cudaMalloc(&a, bytes), "cudaMalloc");
  cuda::check(cudaMalloc(&b, bytes), "cudaMalloc");
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  float ms = 0;
  constexpr int kCopies = 100;
  for (int round = 0; round < 2; ++round) {  // the first raises the clocks
    cuda::check(cudaEventRecord(start), "event");
    for (int i = 0; i < kCopies; ++i) cuda::check(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice), "copy");
    cuda::check(cudaEventRecord(stop), "event");
    cuda::check(cudaEventSynchronize(stop), "copy");
    cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
  }
  cudaFree(a);
  cudaFree(b);
  return 2.0 * static_cast<double>(bytes) * kCopies / ms * 1e3;
}

// read_memory.cu: reads whole multiples of 32 KiB.
void read_memory(const void* from, std::size_t bytes, cudaStream_t stream);

// Bytes per second of reading alone, which DRAM does faster than reading and writing in turn.
inline double read_ceiling(std::size_t bytes = std::size_t{2} << 30) {
  void* a;
  cuda::check(cudaMalloc(&a, bytes), "cudaMalloc");
  cuda::check(cudaMemset(a, 0, bytes), "cudaMemset");
  const double us = median_us([&](cudaStream_t stream, int) { read_memory(a, bytes, stream); }, 1, 15);
  cudaFree(a);
  return static_cast<double>(bytes) / us * 1e6;
}

}  // namespace rlk::bench
