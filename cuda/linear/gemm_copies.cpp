// Products whose operands must be copied first: splits them into parts that fit the workspace, and launches each part.
#include "gemm_copies.h"

#include <algorithm>

#include "../common/alignment.h"
#include "gemm_sm90.h"
#include "kernels/rows/row_pitch.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kUsualBytes = std::int64_t{256} << 20;
constexpr std::int64_t kTogether = 256;  // a part's rows are a multiple of this: whole tiles, and D stays aligned
constexpr std::int64_t kFewest = 256;    // with fewer rows or columns of D, copies cost more than they save
// Up to this number of rows of D, ordinary loads of B cost less time than a copy of B. The limit is lower if rows begin
// at odd elements, whose loads take more time.
std::int64_t most_loaded(const GemmOperand& b) {
  const bool even = reinterpret_cast<std::uintptr_t>(b.data) % 4 == 0 && b.rows.inner_stride % 2 == 0;
  return even ? 512 : 256;
}

std::int64_t bytes_of(const GemmOperand& x, std::int64_t extent, std::int64_t contraction) {
  return x.contraction_contiguous ? extent * round_up_8(contraction) * 2 : contraction * round_up_8(extent) * 2;
}
// The largest number of rows whose copy fits into `bytes`, in multiples of kTogether, at least one row.
std::int64_t most_rows(const GemmOperand& x, std::int64_t extent, std::int64_t contraction, std::int64_t bytes) {
  if (bytes_of(x, extent, contraction) <= bytes) return extent;
  const std::int64_t fitting = bytes / bytes_of(x, kTogether, contraction) * kTogether;
  return std::min(std::max(fitting, kTogether), extent);
}

GemmOperand of_copy(const GemmOperand& x, void* to, std::int64_t extent, std::int64_t contraction) {
  const std::int64_t rows = x.contraction_contiguous ? extent : contraction;
  return {to,
          {std::max<std::int64_t>(rows, 1), 0, round_up_8(x.contraction_contiguous ? contraction : extent)},
          x.contraction_contiguous};
}
// Rows [first, first + extent) of an operand, side by side at `to`.
GemmOperand copied(const GemmOperand& x, std::int64_t first, std::int64_t extent, std::int64_t contraction, void* to,
                   int device, cudaStream_t stream) {
  AlignedRowsParams p;
  const bool rows = x.contraction_contiguous;
  p.from = static_cast<const unsigned char*>(x.data) + (rows ? 0 : first * 2);
  p.from_rows = x.rows;
  p.first_row = rows ? first : 0;
  p.rows = rows ? extent : contraction;
  p.columns = rows ? contraction : extent;
  p.pitch = round_up_8(p.columns);
  p.to = to;
  RLK_CUDA_IN_USE("linear", device, aligned_rows)(p, stream);
  return of_copy(x, to, extent, contraction);
}

}  // namespace

GemmCopies gemm_copies_within(const GemmParams& p, std::int64_t bytes) {
  const bool a = !gemm_sm90_reads(p.a, p.m, p.contraction), b = !gemm_sm90_reads(p.b, p.n, p.contraction);
  void* const somewhere = reinterpret_cast<void*>(256);
  GemmParams q = p;
  if (a) q.a = of_copy(p.a, somewhere, p.m, p.contraction);
  if (b) q.b = of_copy(p.b, somewhere, p.n, p.contraction);
  // A row limit counts rows of the whole product. The kernel for any layout also computes products whose rows of D
  // begin at multiples of 16 bytes but do not end at one: a test of such a product failed (README.md).
  const bool ends_inside =
      rows_begin_at_16_bytes(p.d, p.d_rows, p.m, size_of(p.d_dtype)) && p.n * size_of(p.d_dtype) % 16 != 0;
  if ((!a && !b) || p.row_limit != nullptr || ends_inside || !gemm_sm90_serves(q)) return {};
  // An operand that fits into half of the bytes is copied once. If neither operand fits, each gets half of the bytes.
  const std::int64_t all_a = a ? bytes_of(p.a, p.m, p.contraction) : 0;
  const std::int64_t all_b = b ? bytes_of(p.b, p.n, p.contraction) : 0;
  GemmCopies copies;
  if (a) {
    copies.rows_a = most_rows(p.a, p.m, p.contraction, std::max(bytes / 2, bytes - all_b));
    copies.bytes += bytes_of(p.a, copies.rows_a, p.contraction);
  }
  if (b) {
    copies.rows_b = most_rows(p.b, p.n, p.contraction, std::max(bytes / 2, bytes - all_a));
    copies.bytes += bytes_of(p.b, copies.rows_b, p.contraction);
  }
  return copies;
}

GemmCopies gemm_copies(const GemmParams& p) {
  if (p.m <= most_loaded(p.b) && gemm_sm90_loads_rows(p) && !gemm_sm90_reads(p.b, p.n, p.contraction)) {
    GemmCopies copies;
    copies.loads_rows = true;
    if (!gemm_sm90_reads(p.a, p.m, p.contraction) && !gemm_sm90_streams_x(p))
      copies.rows_a = p.m, copies.bytes = bytes_of(p.a, p.m, p.contraction);
    return copies;
  }
  if (std::min(p.m, p.n) < kFewest || gemm_sm90_serves(p)) return {};
  return gemm_copies_within(p, kUsualBytes);
}

void gemm_by_copies(const GemmParams& p, const GemmCopies& copies, void* workspace, int device, cudaStream_t stream) {
  const std::int64_t rows_a = copies.rows_a == 0 ? p.m : copies.rows_a;
  const std::int64_t rows_b = copies.rows_b == 0 ? p.n : copies.rows_b;
  auto* const of_a = static_cast<unsigned char*>(workspace);
  auto* const of_b = of_a + (copies.rows_a == 0 ? 0 : bytes_of(p.a, rows_a, p.contraction));
  const int blocks = multiprocessors(device);
  GemmOperand a = p.a;  // the last copy, which serves all columns of D if it is the whole operand
  for (std::int64_t j = 0; j < p.n; j += rows_b) {
    GemmParams q = p;
    q.n = std::min(rows_b, p.n - j);
    q.b = copies.rows_b == 0 ? p.b : copied(p.b, j, q.n, p.contraction, of_b, device, stream);
    if (p.bias != nullptr) q.bias = static_cast<const unsigned char*>(p.bias) + j * size_of(p.bias_dtype);
    for (std::int64_t i = 0; i < p.m; i += rows_a) {
      q.m = std::min(rows_a, p.m - i);
      if (copies.rows_a > 0 && (j == 0 || rows_a < p.m)) {
        a = copied(p.a, i, q.m, p.contraction, of_a, device, stream);
      }
      q.a = a;
      q.a_is_copy = copies.rows_a > 0;
      q.d = static_cast<unsigned char*>(p.d) + (i * p.d_rows.inner_stride + j) * size_of(p.d_dtype);
      if (p.addend != nullptr) q.addend = p.addend + i * p.addend_rows.inner_stride + j;
      gemm_sm90(q, choose_plan_sm90(q, blocks), stream);
    }
  }
}

}  // namespace rlk::cuda
