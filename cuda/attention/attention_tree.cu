// Attention over trees on CUDA, forward and backward: by wgmma, by mma.sync, and in plain tiles for float32. CMake
// compiles this file once per architecture. The path of a segment runs from the root of its tree to the segment. A
// kernel finds a key by the key's number along the path. Before the other kernels run, one block of threads writes the
// table of paths.
#include "forward.cuh"
#include "gradients/plain.cuh"
#if RLK_CUDA_SM90
#include "forward_sm90.cuh"
#include "gradients/wgmma_sm90.cuh"
#endif

namespace rlk::cuda::RLK_CUDA_ARCH {

namespace {

constexpr int kPathThreads = 1024;  // one block of threads, since each pass over the segments needs the results of the
                                    // previous pass

__global__ void __launch_bounds__(kPathThreads)
    attention_paths_kernel(const __grid_constant__ AttentionInput p, std::uint32_t* table) {
  make_attention_paths<AttentionGpu>(p, table);
}

template <class Params>
AttentionTree<Params> with_paths(const Params& p, void* table, cudaStream_t stream) {
  auto* const paths = static_cast<std::uint32_t*>(table);
  attention_paths_kernel<<<1, kPathThreads, 0, stream>>>(p, paths);
  check(cudaGetLastError(), "launch of attention's paths");
  return {p, paths};
}

}  // namespace

void attention_tree(const AttentionParams& given, [[maybe_unused]] const AttentionPlan& plan, cudaStream_t stream) {
  const AttentionTree<AttentionParams> p = with_paths(given, given.workspace, stream);
  const bool vectors = attention_at_16_bytes(p);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
#if RLK_CUDA_SM90
      if (plan.kernel == AttentionKernel::kWgmma) return run_attention_wgmma<T, WgmmaForm::kWhole>(p, stream);
#endif
      run_attention_mma<T>(p, vectors, stream);
    } else {
      p.head_dim <= 128 ? launch_attention<T, AttentionTile<1, 128, 16>>(p, vectors, stream)
                        : launch_attention<T, AttentionTile<1, 256, 16>>(p, vectors, stream);
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

void attention_tree_backward(const AttentionBackwardParams& given, [[maybe_unused]] GradientKernel kernel,
                             cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (kernel == GradientKernel::kWgmma) {
    auto* const workspace = static_cast<unsigned char*>(given.workspace);
    const GradientLayout layout(given, kernel);
    return run_attention_gradients<WgmmaForm::kWhole>(with_paths(given, workspace + layout.paths_at, stream), kernel,
                                                      stream);
  }
#endif
  float* const behind_delta = static_cast<float*>(given.workspace) + attention_rows(given) * given.num_q_heads;
  run_attention_backward(with_paths(given, behind_delta, stream), stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
