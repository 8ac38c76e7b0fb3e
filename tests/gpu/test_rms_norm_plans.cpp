// Every kernel that can serve a call of rms_norm has the CPU's bits: all plans of forward and backward, as built for
// sm_90 and as PTX for sm_80.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/rms_norm/kernels.h"
#include "plan_memory.h"
#include "rlk/backends.h"
#include "rlk/ops/rms_norm.h"

namespace rlk::cuda {
namespace {

struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16;
  bool residual = false, weight = true, fp32_weight = false, round_before_weight = false, main_grad = false;
  float weight_offset = 0.0f;
  std::int64_t pad = 0;  // elements between the end of a row and the next row
};

// Numbers of rows: one row; a group of 64 and a tail; more groups than fill a block of narrow rows; two blocks of 8192
// and a rest. With a residual, more than 1024 rows use other kernels.
// Columns: a head; around every plan's maximum; widths of models; odd widths without vectors.
const std::vector<Case> kCases = {
    {1, 8},
    {3, 64, DType::kFloat32, true},
    {700, 128},
    {600, 128, DType::kFloat16, true, true, false, true, true, 1.0f, 64},
    {65, 136, DType::kBFloat16, true, true, true, false, false, 1.0f},
    {130, 256, DType::kFloat32, false, true, false, true},
    {66, 264, DType::kBFloat16, false, false},
    {5, 1024, DType::kBFloat16, true},
    {70, 1032, DType::kFloat16, true, true, true, true},
    {129, 2048, DType::kBFloat16, true, true, false, false, true},
    {3, 2560, DType::kBFloat16, false, true, true, true},
    {200, 4096, DType::kBFloat16, true, true, false, true, true},
    {2, 4104, DType::kFloat32, true},
    {67, 5120, DType::kBFloat16, true},
    {2, 8192, DType::kFloat32, true, true, false, false, true},
    {3, 8200, DType::kFloat32, true},
    {66, 8192, DType::kBFloat16, true, true, false, true, true, 0.5f, 8},
    {2, 16384, DType::kBFloat16, true},
    {65, 16392, DType::kFloat16, true},
    {70, 1, DType::kBFloat16, true},
    {65, 37, DType::kFloat32, false, true, false, false, true, 1.0f, 3},
    {130, 131, DType::kBFloat16, true, true, true, true, true},
    {3, 4099, DType::kFloat16, true, true, false, false, false, 0.0f, 5},
    {17000, 16, DType::kBFloat16, true, true, true, true, true},
    {17000, 8, DType::kFloat32},
    {1100, 256, DType::kBFloat16, true, true, false, true, false, 0.5f},
    {1025, 248, DType::kFloat16, true, true, false, false, false, 0.0f, 8},
    {1040, 4096, DType::kFloat32, true},
    {1040, 4096, DType::kBFloat16, true, true, false, true},
};

// `inner` rows are one stride apart, then another distance follows: kernels treat one stride and two differently.
std::string text(const Case& c, std::int64_t inner) {
  return std::string(short_name(c.dtype)) + " [" + std::to_string(c.rows) + ", " + std::to_string(c.columns) + "] by " +
         std::to_string(inner);
}

void run_forward_case(const Case& c, std::int64_t inner, std::mt19937* random) {
  const std::int64_t stride = c.columns + c.pad;
  const DType weight_dtype = c.fp32_weight ? DType::kFloat32 : c.dtype;
  const auto x = matrix(c.rows, c.columns, stride, c.dtype, random, true);
  const auto residual = matrix(c.rows, c.columns, stride, c.dtype, random, true);
  const auto weight = matrix(1, c.columns, c.columns, weight_dtype, random, false);
  std::vector<unsigned char> y(x.size(), kCanary), new_residual = y;
  std::vector<unsigned char> rstd(static_cast<std::size_t>(c.rows) * 4, kCanary);
  RmsNormParams p;
  p.x_rows = p.residual_rows = p.y_rows = p.new_residual_rows = {inner, inner * stride, stride};
  p.num_rows = c.rows;
  p.columns = c.columns;
  p.dtype = c.dtype;
  p.weight_dtype = weight_dtype;
  p.eps = 1e-6f;
  p.weight_offset = c.weight ? c.weight_offset : 0.0f;
  p.round_before_weight = c.round_before_weight;
  const OnDevice x_gpu(x), residual_gpu(residual), weight_gpu(weight);
  const auto point = [&](const void* a, const void* b, const void* w, void* out, void* sum, void* of_rows) {
    p.x = a;
    p.residual = c.residual ? b : nullptr;
    p.weight = c.weight ? w : nullptr;
    p.y = out;
    p.new_residual = c.residual ? sum : nullptr;
    p.rstd = static_cast<float*>(of_rows);
  };
  point(x.data(), residual.data(), weight.data(), y.data(), new_residual.data(), rstd.data());
  cpu::rms_norm(p);
  const std::vector<unsigned char> clean(y.size(), kCanary), clean_rows(rstd.size(), kCanary);
  for (const RmsNormPlan& plan : kRmsNormPlans) {
    for (const int arch : {90, 80}) {
      const OnDevice out(clean), sum(clean), of_rows(clean_rows);
      point(x_gpu.data, residual_gpu.data, weight_gpu.data, out.data, sum.data, of_rows.data);
      if (!serves(plan, p)) continue;
      arch == 90 ? sm90::rms_norm(p, plan, nullptr) : sm80::rms_norm(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "rms_norm");
      const std::string what = text(c, inner) + ", plan " + std::to_string(plan.threads) + " x " +
                               std::to_string(plan.vec8s) + ", sm_" + std::to_string(arch);
      expect(out.host(), y, what + ", y");
      expect(sum.host(), c.residual ? new_residual : clean, what + ", new_residual");
      expect(of_rows.host(), rstd, what + ", rstd");
    }
  }
}

void run_backward_case(const Case& c, std::int64_t inner, std::mt19937* random) {
  const std::int64_t stride = c.columns + c.pad;
  const DType weight_dtype = c.fp32_weight ? DType::kFloat32 : c.dtype;
  const DType dweight_dtype = c.main_grad ? DType::kFloat32 : weight_dtype;
  const auto dy = matrix(c.rows, c.columns, stride, c.dtype, random, c.rows < 100);
  const auto h = matrix(c.rows, c.columns, stride, c.dtype, random, c.rows < 100);
  const auto third = matrix(c.rows, c.columns, stride, c.dtype, random, true);
  const auto weight = matrix(1, c.columns, c.columns, weight_dtype, random, false);
  const auto rstd = matrix(1, c.rows, c.rows, DType::kFloat32, random, false);
  const auto main_grad = matrix(1, c.columns, c.columns, DType::kFloat32, random, false);
  std::vector<unsigned char> dx(dy.size(), kCanary);
  std::vector<unsigned char> dweight(static_cast<std::size_t>(c.columns * size_of(dweight_dtype)), kCanary);
  RmsNormBackwardParams p;
  p.dy_rows = p.h_rows = p.d_new_residual_rows = p.dx_rows = {inner, inner * stride, stride};
  p.num_rows = c.rows;
  p.columns = c.columns;
  p.dtype = c.dtype;
  p.weight_dtype = weight_dtype;
  p.dweight_dtype = dweight_dtype;
  p.weight_offset = c.weight ? c.weight_offset : 0.0f;
  p.round_before_weight = c.round_before_weight;
  const auto point = [&](const void* a, const void* b, const void* e, const void* w, const void* r, const void* m) {
    p.dy = a;
    p.h = b;
    p.d_new_residual = c.residual ? e : nullptr;
    p.weight = c.weight ? w : nullptr;
    p.rstd = static_cast<const float*>(r);
    p.main_grad = c.main_grad ? static_cast<const float*>(m) : nullptr;
  };
  point(dy.data(), h.data(), third.data(), weight.data(), rstd.data(), main_grad.data());
  p.dx = dx.data();
  p.dweight = dweight.data();
  cpu::rms_norm_backward(p);
  const OnDevice dy_gpu(dy), h_gpu(h), third_gpu(third), weight_gpu(weight), rstd_gpu(rstd), main_grad_gpu(main_grad);
  const std::vector<unsigned char> clean(dx.size(), kCanary), clean_weight(dweight.size(), kCanary);
  const OnDevice workspace(
      std::vector<unsigned char>(static_cast<std::size_t>(rms_norm_backward_workspace_bytes(p, 0)), 0xff));
  point(dy_gpu.data, h_gpu.data, third_gpu.data, weight_gpu.data, rstd_gpu.data, main_grad_gpu.data);
  p.workspace = workspace.data;
  for (const RmsNormBackwardPlan& plan : kRmsNormBackwardPlans) {
    for (const int arch : {90, 80}) {
      for (const int wanted : {3, 1, 2}) {  // dx and dweight, or only one of them
        const OnDevice out(clean), sums(clean_weight);
        p.dx = wanted & 1 ? out.data : nullptr;
        p.dweight = wanted & 2 ? sums.data : nullptr;
        if (!serves(plan, p)) continue;
        arch == 90 ? sm90::rms_norm_backward(p, plan, nullptr) : sm80::rms_norm_backward(p, plan, nullptr);
        check(cudaDeviceSynchronize(), "rms_norm_backward");
        const std::string what = text(c, inner) + ", backward plan " + std::to_string(plan.threads) + " x " +
                                 std::to_string(plan.vec8s) + (plan.halves ? " halves" : "") + ", sm_" +
                                 std::to_string(arch) + ", wanted " + std::to_string(wanted);
        expect(out.host(), wanted & 1 ? dx : clean, what + ", dx");
        expect(sums.host(), wanted & 2 ? dweight : clean_weight, what + ", dweight");
      }
    }
  }
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
  std::mt19937 random(1);
  for (const cuda::Case& c : cuda::kCases) {
    for (const std::int64_t inner : {c.rows, std::int64_t{3}}) {
      if (inner > c.rows) continue;
      cuda::run_forward_case(c, inner, &random);
      cuda::run_backward_case(c, inner, &random);
    }
  }
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
