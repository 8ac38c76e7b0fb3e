// Repeats the backward of attention on SM90 by mma.sync, for calls whose gradients by wgmma hold a NaN. If a mask hides
// a key from a query, the wgmma kernel multiplies p = 0 by dp - delta, which may be Inf or NaN. The mma.sync kernel
// sets p and ds of such a pair to +0.
#include "gradients/mma.cuh"
#include "gradients/work_sm90.cuh"

namespace rlk {
namespace cuda {
namespace {  // each architecture compiles its own copy of this code

template <class Params>
struct RepeatedGradients : Params {
  GradientTiles tiles;
};

}  // namespace
}  // namespace cuda

template <class Params>
constexpr bool kMayBranch<cuda::RepeatedGradients<Params>> = kMayBranch<Params>;

namespace cuda {
namespace {

// Returns the delta of a query. The wgmma backward has computed and stored this delta.
template <class Params>
__device__ __forceinline__ float delta_of(const RepeatedGradients<Params>& p, const AttentionSpan& span, std::int64_t i,
                                          std::int64_t head, std::int64_t) {
  const GradientQueries q = gradient_queries(p, p.tiles, span);
  const std::int64_t row = q.past - q.base + i;
  return p.tiles.scalars[(head * p.tiles.slots + q.slot + row / 64) * 128 + 64 + row % 64];
}

// The grids of the pass for dq and of the pass for dk and dv. Each pass takes its blocks in the same order as the
// kernel that has only this pass.
struct RepeatedGrid {
  AttentionGrid queries, keys;
  std::int64_t query_blocks, key_blocks;
};
template <class T, class Tile, class Params>
__device__ __forceinline__ void repeat_pass(const Params& p, const AttentionGrid& g, std::int64_t block,
                                            std::int64_t blocks, unsigned char* memory) {
  const std::int64_t at = block / Tile::kParts, tiles = blocks / Tile::kParts;
  const AttentionPlace place(p, g, Tile::kOfKeys ? tiles - 1 - at : at, Tile::kRows);
  MmaBackward<T, Tile, Params> backward(p, g, static_cast<int>(block % Tile::kParts), memory);
#pragma unroll 1
  for (std::int64_t begin = place.first; begin < place.last;) begin = backward.run(place, begin);
}
template <class T, class QueryTile, class KeyTile, class Params>
__global__ void __launch_bounds__(QueryTile::kThreads)
    attention_repeat_kernel(const __grid_constant__ Params p, const __grid_constant__ RepeatedGrid g) {
  extern __shared__ __align__(128) unsigned char memory[];
  wait_for_previous_kernel();
  if (__ldcg(p.tiles.has_nan) == 0) return;
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < g.query_blocks; block += gridDim.x) {
    repeat_pass<T, QueryTile>(p, g.queries, block, g.query_blocks, memory);
  }
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < g.key_blocks; block += gridDim.x) {
    repeat_pass<T, KeyTile>(p, g.keys, block, g.key_blocks, memory);
  }
}

template <class T, int kColumns, class Params>
void launch_repeated_gradients(const RepeatedGradients<Params>& p, cudaStream_t stream) {
  constexpr int kMostOut = kMayBranch<Params> ? 32 : 64;  // sums of more columns would spill
  using QueryTile = BackwardMmaTile<kColumns, false, kMostOut>;
  using KeyTile = BackwardMmaTile<kColumns, true, kMostOut>;
  static_assert(QueryTile::kThreads == KeyTile::kThreads && QueryTile::kBytes == KeyTile::kBytes);
  const bool vectors = attention_at_16_bytes(p) && attention_at_16_bytes(p.dout, p.dtype);
  RepeatedGrid g;
  g.queries = attention_query_grid(p, QueryTile::kRows, vectors);
  g.keys = attention_key_grid(p, KeyTile::kRows, vectors);
  g.query_blocks = p.dq != nullptr ? attention_blocks(p, g.queries) * QueryTile::kParts : 0;
  g.key_blocks = p.dk != nullptr ? attention_blocks(p, g.keys) * KeyTile::kParts : 0;
  // The kernel has few blocks of threads, so that it ends soon if nothing is to be repeated.
  const int blocks = multiprocessors(current_device()) * (kColumns > 128 ? 1 : 2);
  const auto kernel = attention_repeat_kernel<T, QueryTile, KeyTile, RepeatedGradients<Params>>;
  allow_shared_memory<attention_repeat_kernel<T, QueryTile, KeyTile, RepeatedGradients<Params>>>();
  launch_dependent<true>(kernel, blocks, QueryTile::kThreads, QueryTile::kBytes, stream, p, g);
}

template <class Params>
void repeat_gradients(const Params& p, const GradientTiles& tiles, cudaStream_t stream) {
  const RepeatedGradients<Params> repeated{p, tiles};
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      if (p.head_dim <= 64) return launch_repeated_gradients<T, 64>(repeated, stream);
      if (p.head_dim <= 128) return launch_repeated_gradients<T, 128>(repeated, stream);
      if constexpr (!kMayBranch<Params>) launch_repeated_gradients<T, 256>(repeated, stream);  // no trees
    }
  });
}

}  // namespace

namespace sm90 {

void attention_repeat_backward(const AttentionBackwardParams& p, const std::uint32_t* paths, const GradientTiles& tiles,
                               cudaStream_t stream) {
  if (paths != nullptr) {
    repeat_gradients(AttentionTree<AttentionBackwardParams>{p, paths}, tiles, stream);
  } else {
    repeat_gradients(p, tiles, stream);
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace rlk
