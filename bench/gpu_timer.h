// Timing of device work for the microbenchmarks: graph replays between events, medians, and the ceilings of memory.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "cuda/common/launch.h"

namespace rlk::bench {

constexpr double kWarmUpMs = 150;

// Whether the process has a GPU that the benchmarks measure. If not, the function prints a message.
inline bool has_hopper() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 && cuda::compute_capability(0) == 90) return true;
  std::fprintf(stderr, "no device of compute capability 9.0\n");
  return false;
}

// Captures `calls` calls of `enqueue` in one graph, replays the graph and times it.
class Replay {
 public:
  Replay(const std::function<void(cudaStream_t, int)>& enqueue, int calls) : calls_(calls) {
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    enqueue(stream_, 0);  // modules load and attributes are set outside the capture
    cuda::check(cudaStreamSynchronize(stream_), "warm-up");
    cudaGraph_t graph;
    cuda::check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < calls; ++i) enqueue(stream_, i);
    cuda::check(cudaStreamEndCapture(stream_, &graph), "capture");
    cuda::check(cudaGraphInstantiate(&graph_, graph, 0), "graph");
    cudaGraphDestroy(graph);
    cuda::check(cudaEventCreate(&start_), "event");
    cuda::check(cudaEventCreate(&stop_), "event");
  }
  ~Replay() {
    cudaGraphExecDestroy(graph_);
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
    cudaStreamDestroy(stream_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Replays once; returns microseconds of one call.
  double once() {
    cuda::check(cudaEventRecord(start_, stream_), "event");
    cuda::check(cudaGraphLaunch(graph_, stream_), "graph launch");
    cuda::check(cudaEventRecord(stop_, stream_), "event");
    cuda::check(cudaEventSynchronize(stop_), "replay");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start_, stop_), "event");
    times_.push_back(1e3 * ms / calls_);
    return times_.back();
  }
  // Clocks rise only under load, so this function replays for a while without measuring.
  void warm_up(double ms = kWarmUpMs) {
    for (double us = 0; us < 1e3 * ms;) us += calls_ * once();
    times_.clear();
  }
  double median_us() const {
    std::vector<double> times = times_;
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

 private:
  int calls_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
  std::vector<double> times_;
};

// Median time of one call of `enqueue` in microseconds, over `replays` graphs of `calls` calls.
inline double median_us(const std::function<void(cudaStream_t, int)>& enqueue, int calls, int replays) {
  Replay replay(enqueue, calls);
  replay.warm_up();
  for (int i = 0; i < replays; ++i) replay.once();
  return replay.median_us();
}

// Bytes per second of a device-to-device copy, read plus written. The copy is not in a graph, since a copy node takes a
// slower path.
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

// Bytes per second of reads without writes. DRAM reads faster than it alternates between reads and writes.
inline double read_ceiling(std::size_t bytes = std::size_t{2} << 30) {
  void* a;
  cuda::check(cudaMalloc(&a, bytes), "cudaMalloc");
  cuda::check(cudaMemset(a, 0, bytes), "cudaMemset");
  const double us = median_us([&](cudaStream_t stream, int) { read_memory(a, bytes, stream); }, 1, 15);
  cudaFree(a);
  return static_cast<double>(bytes) / us * 1e6;
}

}  // namespace rlk::bench
