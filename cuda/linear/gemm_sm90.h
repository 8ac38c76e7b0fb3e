// Host side of linear's sm_90 kernels: the plans that can compute a product, and the choice of the presumably fastest
// plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm.h"
#include "gemm_launch.h"

namespace rlk::cuda {

// A kernel and its tile for a product. Every plan gives the same bits.
struct GemmPlan {
  bool small_m = false;            // gemm_small_m_sm90: slices of tile_m weight rows, 8, 16 or 32 rows of x (tile_n)
  int tile_m = 128, tile_n = 256;  // rows and columns of d
  int cluster = 1;                 // 1 or 2 blocks that share loads: neighbours along m, or along n if transposed
  bool transposed = false;         // the weights are the first operand
  // 0 if TMA reads the weights. Otherwise the rows of the weights begin only at multiples of this number of bytes, 2, 4
  // or 8. If small_m is set, the rows of x also begin at these multiples.
  int row_unit = 0;
  bool copies = false;  // the kernel also copies operands
  std::string name() const;
};

// The plan whose kernel copies operands, for products for which gemm_sm90_copies() returns true.
inline constexpr GemmPlan kCopyingPlan{false, 128, 256, 1, false, 0, true};
bool gemm_sm90_copies(const GemmParams& p);
// Whether TMA can read an operand.
bool gemm_sm90_reads(const GemmOperand& operand, std::int64_t extent, std::int64_t contraction);
// Whether TMA can read both operands and every segment ends at the end of a stage.
bool gemm_sm90_serves(const GemmParams& p);
// Whether a kernel can read the weights by ordinary loads, for products whose B TMA cannot read.
bool gemm_sm90_loads_rows(const GemmParams& p);
// Whether the kernel that reads the weights by ordinary loads also reads x by ordinary loads. If not, TMA must be able
// to read A or a copy of A.
bool gemm_sm90_streams_x(const GemmParams& p);
// Every plan for a product. Requires gemm_sm90_serves(p), or, if TMA cannot read B, gemm_sm90_loads_rows(p).
std::vector<GemmPlan> gemm_plans_sm90(const GemmParams& p);
GemmPlan choose_plan_sm90(const GemmParams& p, int multiprocessors);
void gemm_sm90(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);

}  // namespace rlk::cuda
