// attention over trees on CUDA, compiled once per architecture: mma.sync, and tiles for float32. Each key is found by
// its number along the path.
#include "backward.cuh"
#include "forward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {

void attention_tree(const AttentionParams& given, cudaStream_t stream) {
  const AttentionTree<AttentionParams> p{given};
  bool vectors = true;
  for (const AttentionHeads* a : {&p.q, &p.k, &p.v}) vectors = vectors && attention_at_16_bytes(*a, p.dtype);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      run_attention_mma<T>(p, vectors, stream);
    } else {
      p.head_dim <= 128 ? launch_attention<T, AttentionTile<1, 128, 16>>(p, vectors, stream)
                        : launch_attention<T, AttentionTile<1, 256, 16>>(p, vectors, stream);
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

void attention_tree_backward(const AttentionBackwardParams& given, cudaStream_t stream) {
  run_attention_backward(AttentionTree<AttentionBackwardParams>{given}, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
