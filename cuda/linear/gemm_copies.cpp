// Products whose operands must be copied first. A product is split into parts whose copies fit the workspace, and each
// part is launched.
#include "gemm_copies.h"

#include <algorithm>

#include "../common/alignment.h"
#include "gemm_sm90.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kUsualBytes = std::int64_t{256} << 20;
// A part's number of rows is a multiple of kTogether, so a part has whole tiles and its rows of D stay aligned.
constexpr std::int64_t kTogether = 256;
constexpr std::int64_t kFewest = 256;  // if D has fewer rows or columns, copies cost more than they save
// Up to this number of rows of D, ordinary loads of B take less time than a copy of B. The limit is lower for rows that
// begin at odd elements, because their loads take more time.
std::int64_t most_loaded(const GemmOperand& b) {
  const bool even = reinterpret_cast<std::uintptr_t>(b.data) % 4 == 0 && b.rows.inner_stride % 2 == 0;
  return even ? 512 : 256;
}

// Whether the product takes long enough to hide copies by its own kernel. The first tiles wait for their copies, and
// these copies are slower than those of a kernel that only copies (README.md).
constexpr double kLeastProducts = 3e10;
constexpr std::int64_t kLeastContraction = 4000;
double products_of(const GemmParams& p) {
  return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.contraction);
}
bool hides_copies(const GemmParams& p) {
  return p.contraction >= kLeastContraction && products_of(p) >= kLeastProducts;
}

constexpr int kLineBytes = 128;  // a line of the L2
// Rows of copies begin at lines: a box of TMA then reads whole lines.
std::int64_t pitch_of(std::int64_t columns) { return (columns + 63) / 64 * 64; }
// Whether the rows of an operand that TMA can read begin at multiples of 128 bytes (lines). Otherwise a box reads two
// lines for each of its rows.
bool begins_at_lines(const GemmOperand& x, std::int64_t extent, std::int64_t contraction) {
  const std::int64_t rows = x.contraction_contiguous ? extent : contraction;
  return reinterpret_cast<std::uintptr_t>(x.data) % kLineBytes == 0 &&
         (rows <= 1 || x.rows.inner_stride * 2 % kLineBytes == 0);
}

std::int64_t bytes_of(const GemmOperand& x, std::int64_t extent, std::int64_t contraction) {
  return x.contraction_contiguous ? extent * pitch_of(contraction) * 2 : contraction * pitch_of(extent) * 2;
}
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
// Number of counters of a part whose kernel copies operands.
std::int64_t counters_of(std::int64_t m, std::int64_t n, std::int64_t contraction) {
  return 1 + (ceil_div(m, kCopyingPlan.tile_m) + ceil_div(n, kCopyingPlan.tile_n)) * ceil_div(contraction, kCopyRange);
}
// The largest number of rows whose copy fits into `bytes`: all rows, or a multiple of kTogether, or at least one row.
std::int64_t most_rows(const GemmOperand& x, std::int64_t extent, std::int64_t contraction, std::int64_t bytes) {
  if (bytes_of(x, extent, contraction) <= bytes) return extent;
  const std::int64_t fitting = bytes / bytes_of(x, kTogether, contraction) * kTogether;
  return std::min(std::max(fitting, kTogether), extent);
}

GemmOperand of_copy(const GemmOperand& x, void* to, std::int64_t extent, std::int64_t contraction) {
  const std::int64_t rows = x.contraction_contiguous ? extent : contraction;
  return {to,
          {std::max<std::int64_t>(rows, 1), 0, pitch_of(x.contraction_contiguous ? contraction : extent)},
          x.contraction_contiguous};
}
// Rows [first, first + extent) of an operand whose rows have one stride.
GemmOperand part_of(const GemmOperand& x, std::int64_t first) {
  const std::int64_t elements = x.contraction_contiguous ? first * x.rows.inner_stride : first;
  return {static_cast<const unsigned char*>(x.data) + elements * 2, x.rows, x.contraction_contiguous};
}
// Copies rows [first, first + extent) of an operand side by side to `to`.
void copy(const GemmOperand& x, std::int64_t first, std::int64_t extent, std::int64_t contraction, void* to, int device,
          cudaStream_t stream) {
  AlignedRowsParams p;
  const bool rows = x.contraction_contiguous;
  p.from = static_cast<const unsigned char*>(x.data) + (rows ? 0 : first * 2);
  p.from_rows = x.rows;
  p.first_row = rows ? first : 0;
  p.rows = rows ? extent : contraction;
  p.columns = rows ? contraction : extent;
  p.pitch = pitch_of(p.columns);
  p.to = to;
  RLK_CUDA_IN_USE("linear", device, aligned_rows)(p, stream);
}

// Plans copies of A, of B or of both, in a workspace of about `bytes`. TMA must be able to read the other operand.
GemmCopies copies_of(const GemmParams& p, bool a, bool b, std::int64_t bytes) {
  void* const somewhere = reinterpret_cast<void*>(256);
  GemmParams q = p;
  if (a) q.a = of_copy(p.a, somewhere, p.m, p.contraction);
  if (b) q.b = of_copy(p.b, somewhere, p.n, p.contraction);
  // `row_limit` counts rows of the whole product, so a part of the product cannot use it. If rows of D begin but do not
  // end at multiples of 16 bytes, the product runs the kernel for any layout, because such a product failed a test
  // (README.md).
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
  // To copy an operand, the product's kernel loads whole vectors of 16 bytes from its first byte to its last. So its
  // rows must not overlap in memory.
  const auto lie_apart = [&](const GemmOperand& x, std::int64_t extent) {
    const std::int64_t rows = x.contraction_contiguous ? extent : p.contraction;
    const std::int64_t columns = x.contraction_contiguous ? p.contraction : extent;
    return rows <= 1 || (x.rows.inner >= rows && x.rows.inner_stride >= std::max<std::int64_t>(columns, 16));
  };
  if ((!a || lie_apart(p.a, p.m)) && (!b || lie_apart(p.b, p.n)) && gemm_sm90_copies(q)) {
    const std::int64_t rows_a = a ? copies.rows_a : p.m, rows_b = b ? copies.rows_b : p.n;
    copies.counters = ceil_div(p.m, rows_a) * ceil_div(p.n, rows_b) * counters_of(rows_a, rows_b, p.contraction);
    copies.bytes += copies.counters * 4;
  }
  return copies;
}

// Plans copies of operands that TMA reads in place, but whose rows do not begin at lines. Loads from two lines cost a
// forward product of two such operands about 0.4 of its time, and other products 0.15 (README.md). So copies must take
// less time than these loads: the limits are those of measured products.
GemmCopies copies_to_lines(const GemmParams& p) {
  const bool a = !begins_at_lines(p.a, p.m, p.contraction), b = !begins_at_lines(p.b, p.n, p.contraction);
  if (!a && !b) return {};
  const bool forward = p.a.contraction_contiguous && p.b.contraction_contiguous && a && b;
  const double least_products = forward ? kLeastProducts : 6.5e10, least_uses = forward ? 900 : 1500;
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n);
  // Products per copied element.
  const double uses = m * n / ((a ? m : 0) + (b ? n : 0));
  if (uses < least_uses || p.contraction < kLeastContraction || products_of(p) < least_products) return {};
  const GemmCopies copies = copies_of(p, a, b, kUsualBytes);
  return copies.counters > 0 ? copies : GemmCopies{};
}

}  // namespace

GemmCopies gemm_copies_within(const GemmParams& p, std::int64_t bytes) {
  return copies_of(p, !gemm_sm90_reads(p.a, p.m, p.contraction), !gemm_sm90_reads(p.b, p.n, p.contraction), bytes);
}

GemmCopies gemm_copies_to_lines(const GemmParams& p, std::int64_t bytes) {
  return copies_of(p, !begins_at_lines(p.a, p.m, p.contraction), !begins_at_lines(p.b, p.n, p.contraction), bytes);
}

GemmCopies gemm_copies(const GemmParams& p) {
  if (p.m <= most_loaded(p.b) && gemm_sm90_loads_rows(p) && !gemm_sm90_reads(p.b, p.n, p.contraction)) {
    GemmCopies copies;
    copies.loads_rows = true;
    if (!gemm_sm90_reads(p.a, p.m, p.contraction) && !gemm_sm90_streams_x(p))
      copies.rows_a = p.m, copies.bytes = bytes_of(p.a, p.m, p.contraction);
    return copies;
  }
  if (std::min(p.m, p.n) < kFewest) return {};
  if (gemm_sm90_serves(p)) return copies_to_lines(p);
  GemmCopies copies = gemm_copies_within(p, kUsualBytes);
  if (!hides_copies(p)) copies.counters = 0;
  return copies;
}

void gemm_by_copies(const GemmParams& p, const GemmCopies& copies, void* workspace, int device, cudaStream_t stream) {
  const std::int64_t rows_a = copies.rows_a == 0 ? p.m : copies.rows_a;
  const std::int64_t rows_b = copies.rows_b == 0 ? p.n : copies.rows_b;
  auto* const of_a = static_cast<unsigned char*>(workspace);
  auto* const of_b = of_a + (copies.rows_a == 0 ? 0 : bytes_of(p.a, rows_a, p.contraction));
  auto* const after = of_b + (copies.rows_b == 0 ? 0 : bytes_of(p.b, rows_b, p.contraction));
  const int blocks = multiprocessors(device);
  const bool in_product = copies.counters > 0;
  auto* counters = reinterpret_cast<std::uint32_t*>(after);
  if (in_product) check(cudaMemsetAsync(counters, 0, copies.counters * 4, stream), "counters of copies");
  for (std::int64_t j = 0; j < p.n; j += rows_b) {
    GemmParams q = p;
    q.n = std::min(rows_b, p.n - j);
    if (p.bias != nullptr) q.bias = static_cast<const unsigned char*>(p.bias) + j * size_of(p.bias_dtype);
    for (std::int64_t i = 0; i < p.m; i += rows_a) {
      q.m = std::min(rows_a, p.m - i);
      // All parts use one copy of the whole operand.
      const bool copies_a = copies.rows_a > 0 && (j == 0 || rows_a < p.m), copies_b = copies.rows_b > 0 && i == 0;
      if (copies.rows_a > 0) q.a = of_copy(p.a, of_a, q.m, p.contraction);
      if (copies.rows_b > 0) q.b = of_copy(p.b, of_b, q.n, p.contraction);
      q.a_is_copy = copies.rows_a > 0;
      q.d = static_cast<unsigned char*>(p.d) + (i * p.d_rows.inner_stride + j) * size_of(p.d_dtype);
      if (p.addend != nullptr) q.addend = p.addend + i * p.addend_rows.inner_stride + j;
      if (in_product) {
        const GemmOperand from_a = part_of(p.a, i), from_b = part_of(p.b, j);
        q.copied_a = copies_a ? &from_a : nullptr;
        q.copied_b = copies_b ? &from_b : nullptr;
        q.copy_counters = counters;
        counters += counters_of(q.m, q.n, p.contraction);
        gemm_sm90(q, kCopyingPlan, stream);
      } else {
        if (copies_b) copy(p.b, j, q.n, p.contraction, of_b, device, stream);
        if (copies_a) copy(p.a, i, q.m, p.contraction, of_a, device, stream);
        gemm_sm90(q, choose_plan_sm90(q, blocks), stream);
      }
    }
  }
}

}  // namespace rlk::cuda
