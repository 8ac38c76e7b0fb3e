// A matrix product for the kernels of linear: D[m, n] = sum_i A[m, i] B[n, i]. The sum over i (the contraction) has the
// order of ops/linear.h. Forward: A = x and B = weight. Input gradient: A = dy and B = weight, whose rows are
// contracted. Weight gradient: A = dy and B = x; the rows of both are contracted.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../common/launch.h"
#include "rlk/base.h"

namespace rlk::cuda {

// An operand [extent, contraction]. The extent is the index that is not contracted: m of A, n of B. The contiguous
// index is the contraction or the extent; `rows` lays out the other index.
struct GemmOperand {
  const void* data = nullptr;
  RowLayout rows;
  bool contraction_contiguous = true;
};

struct GemmParams {
  GemmOperand a, b;
  void* d = nullptr;  // [m, n], d_dtype
  RowLayout d_rows;
  const void* bias = nullptr;     // [n], bias_dtype, or null
  const float* addend = nullptr;  // [m, n] or null: main_grad, which is added to the first token block; may be d
  bool a_is_copy = false;         // the stream's previous kernel copies A; B and D are ready before that kernel begins
  // Operands that the product's own kernel copies to a and b (GemmPlan::copies), or null. The counters start at 0. The
  // first counts claimed pieces. The others count finished pieces, one for each panel of A or B and range of the
  // contraction.
  const GemmOperand *copied_a = nullptr, *copied_b = nullptr;
  std::uint32_t* copy_counters = nullptr;
  bool continues = false;  // the accumulators start with the addend; requires one token block and one segment
  RowLayout addend_rows;
  std::int64_t m = 0, n = 0, contraction = 0;
  int segments = 1;  // segments of the contraction: 1, 2, 4 or 8 of equal length (rule 2 of docs/numerics.md)
  // Contraction indices per token block (rule 9 of docs/numerics.md), if there is one segment; 0: one block.
  std::int64_t block = 0;
  const std::int32_t* row_limit = nullptr;  // only for gradients: row_limit of ops/linear.h; a kernel may ignore it
  DType dtype = DType::kBFloat16;           // dtype of a and b: kBFloat16, kFloat16
  DType d_dtype = DType::kBFloat16, bias_dtype = DType::kBFloat16;
};

// The kernel for any shape, stride and alignment, on compute capability 8.0 and later. A product uses one of these
// tiles of D; the choice changes no bit.
enum class Sm80Tile { kFewestRows, kSmallM, kMedium, kSquare, kLarge, kBlocks };
RLK_CUDA_KERNELS(std::vector<Sm80Tile> gemm_tiles(const GemmParams& p);  // tiles that can compute `p`
                 Sm80Tile choose_tile(const GemmParams& p);
                 void gemm_by_tile(const GemmParams& p, Sm80Tile tile, cudaStream_t stream);
                 void gemm(const GemmParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
