// Programmatic dependent launch (compute capability 9.0): a kernel begins while the previous kernel of its stream still
// runs. The kernel itself waits before it uses the previous kernel's results.
#pragma once

#include "launch.h"

namespace rlk::cuda {

// Lets the next kernel of the stream begin once every block has called this function.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous kernel is done and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// kOverlap: the kernel may begin while the previous kernel runs. Its code must be built for compute capability 9.0 and
// must wait for the previous kernel. Without kOverlap the kernel begins after the previous kernel. `cluster`: the
// number of blocks of a cluster, which divides `blocks`.
template <bool kOverlap, class... Args>
void launch_dependent_clusters(void (*kernel)(Args...), int cluster, int blocks, int threads, int shared_bytes,
                               cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (kOverlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

template <bool kOverlap, class... Args>
void launch_dependent(void (*kernel)(Args...), int blocks, int threads, int shared_bytes, cudaStream_t stream,
                      const Args&... args) {
  launch_dependent_clusters<kOverlap>(kernel, 1, blocks, threads, shared_bytes, stream, args...);
}

}  // namespace rlk::cuda
