// Every kernel that can serve a product of linear has the CPU's bits under sm_90 arithmetic. The test runs the sm_90
// plans, over copied parts of operands that TMA cannot read, each plan that reads weights in place, and each tile of
// the sm_80 kernel. The sm_80 kernel takes any layout, and its PTX runs here.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/linear/gemm_copies.h"
#include "cuda/linear/gemm_sm90.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/ops/linear.h"

namespace rlk::cuda {
namespace {

constexpr int kSkipped = 77;

enum class Product { kForward, kInputGrad, kWeightGrad };

struct Case {
  Product product;
  std::int64_t m, n, contraction;
  int segments = 1;
  DType d_dtype = DType::kBFloat16;
  bool bias = false, addend = false;
  std::int64_t pad = 0;  // elements between the end of a row of d and the next row
  std::int64_t split =
      0;        // number of rows of x or dy per outer index, where rows have two strides; sm_90 copies such operands
  int odd = 0;  // elements of a row beyond a multiple of 16 bytes; sm_90 copies such rows, or reads them in place
};

// Sizes: around a tile and a stage; several tiles; once a head's width; more than one token block.
const std::vector<Case> kCases = {
    {Product::kForward, 1, 136, 72},
    {Product::kForward, 7, 4096, 512, 8},
    {Product::kForward, 9, 1000, 1032, 1, DType::kFloat32, true, false, 3},
    {Product::kForward, 31, 200, 4096, 2, DType::kFloat16, true},
    {Product::kForward, 33, 264, 1024, 4, DType::kBFloat16, true},
    {Product::kForward, 64, 128256, 64},
    {Product::kForward, 5, 70'001, 200},
    {Product::kForward, 20, 70'001, 136, 1, DType::kFloat32, true},
    {Product::kForward, 100, 33'333, 264},
    {Product::kForward, 127, 129, 64, 1, DType::kFloat32, true},
    {Product::kForward, 81, 72, 4104, 1, DType::kBFloat16, true},
    {Product::kForward, 150, 1000, 520, 1, DType::kFloat32, true, false, 3},
    {Product::kForward, 200, 1000, 14336, 1, DType::kBFloat16, false, false, 5},
    {Product::kForward, 300, 520, 4096, 8, DType::kFloat32},
    {Product::kForward, 700, 393, 136, 1, DType::kFloat16, true},
    {Product::kForward, 1025, 777, 192, 1, DType::kFloat16},
    {Product::kForward, 4097, 264, 8},
    {Product::kForward, 7, 129, 24, 1, DType::kBFloat16, true, true, 2},
    {Product::kForward, 130, 520, 1000, 1, DType::kFloat32, false, true},
    {Product::kForward, 1000, 264, 64, 1, DType::kFloat16, true, true, 3},
    {Product::kInputGrad, 1, 64, 8},
    {Product::kInputGrad, 130, 520, 1000},
    {Product::kInputGrad, 1000, 264, 4104},
    {Product::kInputGrad, 130, 520, 1000, 1, DType::kFloat32, false, true},
    {Product::kInputGrad, 1000, 264, 4104, 1, DType::kBFloat16, false, true, 3},
    {Product::kInputGrad, 7, 129, 24, 1, DType::kFloat32, false, true, 2},
    {Product::kWeightGrad, 64, 64, 1},
    {Product::kWeightGrad, 264, 1000, 4104, 1, DType::kBFloat16, false, true, 3},
    {Product::kWeightGrad, 130, 520, 8192, 1, DType::kFloat16, false, true},
    {Product::kWeightGrad, 136, 520, 1000, 1, DType::kFloat32, false, true},
    {Product::kWeightGrad, 264, 200, 8192},
    {Product::kWeightGrad, 72, 136, 8200, 1, DType::kFloat32},
    {Product::kWeightGrad, 72, 136, 20000, 1, DType::kFloat32, false, true, 2},
    {Product::kWeightGrad, 200, 264, 20000},
    {Product::kForward, 300, 520, 1000, 1, DType::kFloat32, true, false, 0, 77},
    {Product::kForward, 130, 260, 192, 1, DType::kBFloat16, false, false, 1, 0, 1},
    {Product::kInputGrad, 300, 520, 200, 1, DType::kBFloat16, false, false, 0, 1},
    {Product::kInputGrad, 130, 259, 193, 1, DType::kFloat32, false, true, 0, 0, 1},
    {Product::kWeightGrad, 264, 520, 9000, 1, DType::kFloat32, false, true, 0, 1000},
    {Product::kWeightGrad, 136, 264, 640, 1, DType::kBFloat16, false, false, 0, 64},
    {Product::kWeightGrad, 129, 257, 8300, 1, DType::kBFloat16, false, false, 3, 65, 1},
    {Product::kWeightGrad, 136, 520, 1000, 1, DType::kFloat32, false, false, 0, 100},
    {Product::kWeightGrad, 136, 264, 200, 1, DType::kFloat32, false, false, 0, 1},
    // Copies in several waves of tiles.
    {Product::kForward, 2600, 2100, 1100, 1, DType::kBFloat16, true, false, 0, 0, 1},
    // Both operands are copied in several parts.
    {Product::kForward, 600, 777, 1003, 1, DType::kBFloat16, true, false, 0, 0, 1},
    // Weights that are read in place: less than a vector; several tiles of a block, the last stage partial.
    {Product::kForward, 2, 3, 1, 1, DType::kBFloat16, true, false, 0, 0, 1},
    {Product::kForward, 70, 9000, 190, 1, DType::kBFloat16, false, false, 3, 0, 1},
    {Product::kForward, 200, 521, 4092, 1, DType::kFloat32, true, false, 2, 0, 1},
    {Product::kForward, 8, 9001, 127, 1, DType::kBFloat16, true, false, 0, 0, 1},
    {Product::kForward, 16, 20000, 129, 1, DType::kFloat32, false, false, 1, 0, 1},
    {Product::kForward, 31, 300, 4095, 1, DType::kBFloat16, false, false, 0, 0, 1},
    {Product::kForward, 1, 9000, 4092, 1, DType::kBFloat16, false, false, 0, 0, 4},
    {Product::kForward, 30, 1000, 200, 1, DType::kBFloat16, true, false, 0, 0, 2},
    {Product::kInputGrad, 600, 530, 777, 1, DType::kFloat32, false, true, 2, 0, 1},
    {Product::kInputGrad, 600, 530, 777, 1, DType::kFloat32, false, true, 3, 0, 1},
    {Product::kWeightGrad, 521, 700, 1000, 1, DType::kFloat32, false, true, 3, 0, 1},
    {Product::kWeightGrad, 300, 523, 8300, 1, DType::kBFloat16, false, false, 0, 0, 1},
};

template <class T>
struct OnDevice {
  explicit OnDevice(const std::vector<T>& host) : size(host.size()) {
    check(cudaMalloc(&data, size * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~OnDevice() { cudaFree(data); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data = nullptr;
  std::size_t size;
};

// Exponents are far apart, so the bits that alignment cuts off depend on the order.
std::vector<std::uint16_t> operand(std::int64_t size, DType dtype, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> v(static_cast<std::size_t>(size));
  for (auto& x : v) {
    const float value = normal(*random) * std::exp2(dtype == DType::kBFloat16 ? 4 * normal(*random) : normal(*random));
    x = dtype == DType::kBFloat16 ? bf16_rn(value) : f16_rn(value);
  }
  return v;
}

bool run_case(const Case& c, DType dtype) {
  std::mt19937 random(1);
  const bool a_contiguous = c.product != Product::kWeightGrad, b_contiguous = c.product == Product::kForward;
  // Rows are 16-byte aligned, as TMA needs them, or are not.
  const auto stride_of = [&](std::int64_t columns) { return (columns + 7) / 8 * 8 + 8 + c.odd; };
  const std::int64_t gap = 16;  // elements added to the stride between rows that `split` separates
  const std::int64_t a_stride = stride_of(a_contiguous ? c.contraction : c.m);
  const std::int64_t b_stride = stride_of(b_contiguous ? c.contraction : c.n), d_stride = c.n + c.pad;
  const auto rows_of = [&](std::int64_t stride, bool weights) {
    return c.split > 0 && !weights ? RowLayout{c.split, c.split * stride + gap, stride}
                                   : RowLayout{std::int64_t{1} << 40, 0, stride};
  };
  const RowLayout a_rows = rows_of(a_stride, false), b_rows = rows_of(b_stride, c.product != Product::kWeightGrad);
  const auto a = operand(a_rows.offset(a_contiguous ? c.m : c.contraction) + a_stride, dtype, &random);
  const auto b = operand(b_rows.offset(b_contiguous ? c.n : c.contraction) + b_stride, dtype, &random);
  const auto bias = operand(c.n, dtype, &random);
  std::vector<float> addend(static_cast<std::size_t>(c.m * d_stride));
  std::normal_distribution<float> normal;
  for (auto& x : addend) x = normal(random);
  const OnDevice<std::uint16_t> a_gpu(a), b_gpu(b), bias_gpu(bias);
  const OnDevice<float> addend_gpu(addend);

  GemmParams p;
  p.a = {a_gpu.data, a_rows, a_contiguous};
  p.b = {b_gpu.data, b_rows, b_contiguous};
  p.d_rows = p.addend_rows = {std::int64_t{1} << 40, 0, d_stride};
  p.bias = c.bias ? bias_gpu.data : nullptr;
  p.addend = c.addend ? addend_gpu.data : nullptr;
  p.continues = c.addend && c.product != Product::kWeightGrad;
  p.m = c.m;
  p.n = c.n;
  p.contraction = c.contraction;
  p.segments = c.segments;
  p.block = c.product == Product::kWeightGrad ? kTokenBlock : 0;
  p.dtype = dtype;
  p.d_dtype = c.d_dtype == DType::kFloat32 ? DType::kFloat32 : c.product == Product::kForward ? c.d_dtype : dtype;
  p.bias_dtype = dtype;
  const std::size_t bytes = static_cast<std::size_t>(c.m * d_stride * size_of(p.d_dtype));
  const auto result = [&](const auto& run) {
    std::vector<unsigned char> host(bytes, 0xcd);
    const OnDevice<unsigned char> d(host);  // bytes between the rows must not change
    p.d = d.data;
    run();
    check(cudaDeviceSynchronize(), "product");
    check(cudaMemcpy(host.data(), d.data, bytes, cudaMemcpyDeviceToHost), "copy");
    return host;
  };

  static const char* const kProducts[] = {"forward", "input grad", "weight grad"};
  std::ostringstream text;
  text << kProducts[static_cast<int>(c.product)] << " m " << c.m << " n " << c.n << " contraction " << c.contraction
       << " segments " << c.segments << (dtype == DType::kBFloat16 ? " bf16" : " f16") << (c.addend ? " addend" : "")
       << (c.odd > 0 ? " odd" : "") << " split " << c.split;
  const std::string name = text.str();
  std::vector<unsigned char> cpu(bytes, 0xcd);
  const RowLayout d_rows = p.d_rows;
  if (c.product == Product::kForward) {
    LinearParams q;
    q.x = a.data(), q.weight = b.data(), q.y = cpu.data();
    q.bias = c.bias ? bias.data() : nullptr;
    q.start = c.addend ? addend.data() : nullptr;
    q.start_stride = d_stride;
    q.x_rows = p.a.rows;
    q.y_rows = d_rows;
    q.weight_stride = b_stride;
    q.num_rows = c.m, q.in_features = c.contraction, q.out_features = c.n;
    q.dtype = q.bias_dtype = dtype;
    q.out_dtype = p.d_dtype;
    q.k_segments = c.segments;
    q.arithmetic = Arithmetic::kSm90;
    cpu::linear(q);
  } else if (c.product == Product::kInputGrad) {
    LinearInputGradParams q;
    q.dy = a.data(), q.weight = b.data(), q.dx = cpu.data();
    q.dy_rows = p.a.rows;
    q.dx_rows = d_rows;
    q.weight_stride = b_stride;
    q.num_rows = c.m, q.in_features = c.n, q.out_features = c.contraction;
    q.start = p.continues ? addend.data() : nullptr;
    q.start_stride = d_stride;
    q.dtype = dtype;
    q.dx_dtype = p.d_dtype;
    q.arithmetic = Arithmetic::kSm90;
    cpu::linear_input_grad(q);
  } else {
    LinearWeightGradParams q;
    q.dy = a.data(), q.x = b.data(), q.dweight = cpu.data();
    q.main_grad = c.addend ? addend.data() : nullptr;
    q.dy_rows = p.a.rows;
    q.x_rows = p.b.rows;
    q.main_grad_stride = q.dweight_stride = d_stride;
    q.num_rows = c.contraction, q.in_features = c.n, q.out_features = c.m;
    q.dtype = dtype;
    q.dweight_dtype = p.d_dtype;
    q.arithmetic = Arithmetic::kSm90;
    cpu::linear_weight_grad(q);
  }

  bool same = true;
  for (const int arch : {90, 80}) {
    for (const Sm80Tile tile : arch == 90 ? sm90::gemm_tiles(p) : sm80::gemm_tiles(p)) {
      const auto run = arch == 90 ? sm90::gemm_by_tile : sm80::gemm_by_tile;
      if (result([&] { run(p, tile, nullptr); }) == cpu) continue;
      std::printf("%s: tile %d of mma.sync, sm_%d, and the CPU differ\n", name.c_str(), static_cast<int>(tile), arch);
      same = false;
    }
  }
  if (gemm_sm90_serves(p) == (c.split > 0 || c.odd > 0)) {
    std::printf("%s: sm_90 serves it, or does not, unexpectedly\n", name.c_str());
    return false;
  }
  // Runs the product over copies, in parts of three sizes. `nothing`: no operand has to be copied, or none may be.
  const auto run_copies = [&](const auto& copies_within, bool nothing) {
    for (const std::int64_t within : {std::int64_t{1}, std::int64_t{1} << 20, std::int64_t{1} << 30}) {
      GemmCopies copies = copies_within(p, within);
      // NaN in every element that is read before it is copied, and counters that are not 0.
      const std::vector<unsigned char> poison(static_cast<std::size_t>(copies.bytes) + 1, 0xff);
      const OnDevice<unsigned char> workspace(poison);
      for (const bool in_products : {true, false}) {
        if (in_products && copies.counters == 0) continue;
        if (!in_products) copies.counters = 0;
        const auto run = [&] { gemm_by_copies(p, copies, workspace.data, 0, nullptr); };
        if (nothing ? copies.bytes == 0 : copies.bytes > 0 && result(run) == cpu) continue;
        std::printf("%s: copies of %lld bytes %s and the CPU differ\n", name.c_str(),
                    static_cast<long long>(copies.bytes), in_products ? "by the products" : "before the products");
        same = false;
      }
    }
  };
  // Copies leave out rows of d at multiples of 16 bytes that end inside 16 bytes.
  const bool left_out = d_stride * size_of(p.d_dtype) % 16 == 0 && p.n * size_of(p.d_dtype) % 16 != 0;
  if (c.split > 0 || c.odd > 0) {
    run_copies(gemm_copies_within, left_out);
    const GemmCopies copies = gemm_copies(p);
    if (!copies.loads_rows) return same;
    const std::int64_t pitch = (p.contraction + 7) / 8 * 8;
    const std::int64_t most = std::max(copies.bytes, p.m * pitch * 2);
    const OnDevice<unsigned char> workspace(std::vector<unsigned char>(static_cast<std::size_t>(most)));
    if (result([&] { gemm_by_copies(p, copies, workspace.data, 0, nullptr); }) != cpu) {
      std::printf("%s: weights read in place and the CPU differ\n", name.c_str());
      same = false;
    }
    // Runs every plan that reads the weights in place, with x itself and with a copy of x. A kernel for a smaller unit
    // of alignment serves larger units, too.
    for (const bool copies_x : {false, true}) {
      GemmParams q = p;
      if (copies_x) q.a = {workspace.data, {p.m, 0, pitch}, true};
      q.a_is_copy = copies_x;
      for (GemmPlan plan : gemm_plans_sm90(q)) {
        for (;; plan.row_unit /= 2) {
          const auto run = [&] {
            if (copies_x) {
              sm90::aligned_rows({p.a.data, workspace.data, p.a.rows, 0, p.m, p.contraction, pitch}, nullptr);
            }
            q.d = p.d;
            gemm_sm90(q, plan, nullptr);
          };
          if (result(run) != cpu) {
            std::printf("%s: plan %s and the CPU differ\n", name.c_str(), plan.name().c_str());
            same = false;
          }
          if (plan.row_unit == 2) break;
        }
      }
    }
    return same;
  }
  const auto at_lines = [](std::int64_t rows, std::int64_t stride) { return rows <= 1 || stride % 64 == 0; };
  run_copies(gemm_copies_to_lines, left_out || (at_lines(a_contiguous ? c.m : c.contraction, a_stride) &&
                                                at_lines(b_contiguous ? c.n : c.contraction, b_stride)));
  auto plans = gemm_plans_sm90(p);
  plans.push_back(choose_plan_sm90(p, multiprocessors(0)));
  for (const GemmPlan& plan : plans) {
    if (result([&] { gemm_sm90(p, plan, nullptr); }) == cpu) continue;
    std::printf("%s: plan %s and the CPU differ\n", name.c_str(), plan.name().c_str());
    same = false;
  }
  return same;
}

// Two rows are so far apart that the number of 16-byte units between them exceeds 32 bits. The far rows have the bits
// of two near rows.
bool run_far_rows() {
  constexpr std::int64_t kColumns = 136, kContraction = 200, kFar = (std::int64_t{1} << 34) + 64;
  std::uint16_t* far = nullptr;
  if (cudaMalloc(&far, (kFar + kContraction) * 2) != cudaSuccess) {
    cudaGetLastError();
    std::printf("rows 34 GB apart: not run, no memory\n");
    return true;
  }
  std::mt19937 random(1);
  const auto x = operand(2 * kContraction, DType::kBFloat16, &random);
  const OnDevice<std::uint16_t> near(x), weight(operand(kColumns * kContraction, DType::kBFloat16, &random));
  check(cudaMemcpy(far, x.data(), kContraction * 2, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(far + kFar, x.data() + kContraction, kContraction * 2, cudaMemcpyHostToDevice), "copy");
  GemmParams p;
  p.b = {weight.data, {std::int64_t{1} << 40, 0, kContraction}, true};
  p.d_rows = {std::int64_t{1} << 40, 0, kColumns};
  p.m = 2;
  p.n = kColumns;
  p.contraction = kContraction;
  const auto result = [&](const std::uint16_t* rows, std::int64_t stride, Sm80Tile tile) {
    std::vector<std::uint16_t> host(2 * kColumns);
    const OnDevice<std::uint16_t> d(host);
    p.a = {rows, {std::int64_t{1} << 40, 0, stride}, true};
    p.d = d.data;
    sm90::gemm_by_tile(p, tile, nullptr);
    check(cudaMemcpy(host.data(), d.data, host.size() * 2, cudaMemcpyDeviceToHost), "copy");
    return host;
  };
  bool same = true;
  for (const Sm80Tile tile : sm90::gemm_tiles(p)) {
    if (result(far, kFar, tile) == result(near.data, kContraction, tile)) continue;
    std::printf("rows 34 GB apart: tile %d differs\n", static_cast<int>(tile));
    same = false;
  }
  cudaFree(far);
  return same;
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::printf("skipped: no device of compute capability 9.0\n");
    return cuda::kSkipped;
  }
  int wrong = 0;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const cuda::Case& c : cuda::kCases) wrong += !cuda::run_case(c, dtype);
  }
  wrong += !cuda::run_far_rows();
  std::printf("%d of %zu products differ\n", wrong, 2 * cuda::kCases.size() + 1);
  return wrong > 0;
}
