// The kernels of linear under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and for
// the emulation.
#include "hip/linear/gemm.h"
#include "hip/linear/reductions.h"

namespace rlk::hip {

// In y = x W^T, the contraction runs along the rows of both operands in memory. In dx = dy W, the contraction runs
// along the rows of dy, but across the rows of the weight. In dW = dy^T x, the contraction runs across the rows of both
// operands.
template <class Operand, class Tile, Fold kFold>
RLK_DEVICE void forward_gemm(const GemmParams& p, std::int64_t first_tile) {
  gemm_kernel<Operand, Tile, AlongRows<kTileRows<Tile>, Tile::kStageK>, AlongRows<kTileColumns<Tile>, Tile::kStageK>,
              kFold>(p, first_tile);
}
template <class Operand, class Tile>
RLK_DEVICE void input_grad_gemm(const GemmParams& p, std::int64_t first_tile) {
  gemm_kernel<Operand, Tile, AlongRows<kTileRows<Tile>, Tile::kStageK>, AcrossRows<kTileColumns<Tile>, Tile::kStageK>,
              Fold::kNone>(p, first_tile);
}
template <class Operand, class Tile>
RLK_DEVICE void weight_grad_gemm(const GemmParams& p, std::int64_t first_tile) {
  gemm_kernel<Operand, Tile, AcrossRows<kTileRows<Tile>, Tile::kStageK>, AcrossRows<kTileColumns<Tile>, Tile::kStageK>,
              Fold::kAscending>(p, first_tile);
}

}  // namespace rlk::hip

#define RLK_LINEAR_GEMM(name, ...)                                                                  \
  RLK_KERNEL(rlk::hip::kGemmThreads)                                                                \
  RLK_WAVES_PER_SIMD(rlk::hip::kGemmBlocks) name(rlk::hip::GemmParams p, std::int64_t first_tile) { \
    using namespace rlk::hip;                                                                       \
    __VA_ARGS__(p, first_tile);                                                                     \
  }
#define RLK_LINEAR_GEMMS(type, Operand)                                                                       \
  RLK_LINEAR_GEMM(rlk_linear_forward_small_##type, forward_gemm<Operand, SmallTile, Fold::kNone>)             \
  RLK_LINEAR_GEMM(rlk_linear_forward_large_##type, forward_gemm<Operand, LargeTile, Fold::kNone>)             \
  RLK_LINEAR_GEMM(rlk_linear_forward_segments_small_##type, forward_gemm<Operand, SmallTile, Fold::kTree>)    \
  RLK_LINEAR_GEMM(rlk_linear_forward_segments_large_##type, forward_gemm<Operand, SegmentsTile, Fold::kTree>) \
  RLK_LINEAR_GEMM(rlk_linear_input_grad_small_##type, input_grad_gemm<Operand, SmallTile>)                    \
  RLK_LINEAR_GEMM(rlk_linear_input_grad_large_##type, input_grad_gemm<Operand, LargeTile>)                    \
  RLK_LINEAR_GEMM(rlk_linear_weight_grad_small_##type, weight_grad_gemm<Operand, SmallTile>)                  \
  RLK_LINEAR_GEMM(rlk_linear_weight_grad_large_##type, weight_grad_gemm<Operand, LargeTile>)

RLK_LINEAR_GEMMS(bf16, Bf16x4)
RLK_LINEAR_GEMMS(f16, Fp16x4)

#define RLK_LINEAR_REDUCTIONS(type, T)                                                 \
  RLK_KERNEL(rlk::hip::kBiasThreads)                                                   \
  rlk_linear_bias_grad_##type(rlk::LinearBiasGradParams p, std::int64_t first_block) { \
    rlk::hip::bias_grad_kernel<rlk::hip::T>(p, first_block);                           \
  }                                                                                    \
  RLK_KERNEL(rlk::hip::kTreeThreads)                                                   \
  rlk_linear_tree_sum_##type(rlk::TreeSumParams p, std::int64_t first_block) {         \
    rlk::hip::tree_sum_kernel<rlk::hip::T>(p, first_block);                            \
  }

RLK_LINEAR_REDUCTIONS(bf16, Bf16)
RLK_LINEAR_REDUCTIONS(f16, Fp16)
RLK_LINEAR_REDUCTIONS(f32, Fp32)
