// The part of cuBLASLt's binary interface that a product needs, and the calls of cuBLASLt's functions.
#include "cublaslt.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <string>

#include "../common/launch.h"

namespace rlk::cuda {
namespace {

// Types and values of cublasLt.h. The values are equal in the major versions 12 and 13.
struct Layout {
  std::uint64_t data[8];
};
struct Operation {
  std::uint64_t data[32];
};
struct Preference {
  std::uint64_t data[8];
};
struct Heuristic {
  CublasLtAlgorithm algorithm;
  std::size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
constexpr int kCompute32F = 68;                  // CUBLAS_COMPUTE_32F
constexpr int kReal32F = 0;                      // CUDA_R_32F
constexpr int kReal16F = 2, kReal16Bf = 14;      // CUDA_R_16F, CUDA_R_16BF
constexpr int kTransposeA = 3, kTransposeB = 4;  // CUBLASLT_MATMUL_DESC_TRANS*
constexpr std::int32_t kTransposed = 1;          // CUBLAS_OP_T

struct Library {
  std::size_t (*version)();
  int (*create)(void** handle);
  int (*init_layout)(Layout*, std::size_t, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride);
  int (*init_operation)(Operation*, std::size_t, int compute, int scale_type);
  int (*set_operation)(Operation*, int attribute, const void* value, std::size_t bytes);
  int (*init_preference)(Preference*, std::size_t);
  int (*propose)(void* handle, Operation*, Layout* a, Layout* b, Layout* c, Layout* d, Preference*, int most,
                 Heuristic* found, int* count);
  int (*multiply)(void* handle, Operation*, const void* alpha, const void* a, Layout*, const void* b, Layout*,
                  const void* beta, const void* c, Layout*, void* d, Layout*, const CublasLtAlgorithm*, void* workspace,
                  std::size_t workspace_bytes, cudaStream_t);
};

// The cuBLASLt library that the process has already loaded (torch loads one), or else the system's library. Null if no
// library is found or if it lacks a function.
const Library* library() {
  static const Library* const found = []() -> const Library* {
    const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
    void* file = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (file == nullptr) file = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) return nullptr;
    static Library l;
    bool complete = true;
    const auto load = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(file, symbol));
      complete = complete && function != nullptr;
    };
    load(l.version, "cublasLtGetVersion");
    load(l.create, "cublasLtCreate");
    load(l.init_layout, "cublasLtMatrixLayoutInit_internal");
    load(l.init_operation, "cublasLtMatmulDescInit_internal");
    load(l.set_operation, "cublasLtMatmulDescSetAttribute");
    load(l.init_preference, "cublasLtMatmulPreferenceInit_internal");
    load(l.propose, "cublasLtMatmulAlgoGetHeuristic");
    load(l.multiply, "cublasLtMatmul");
    return complete ? &l : nullptr;
  }();
  return found;
}

void require(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string(what) + ": cuBLAS status " + std::to_string(status));
}

// cuBLASLt's matrices are column-major. So cuBLASLt computes the transpose of d, and its first operand is our second
// operand.
struct Call {
  Operation operation{};
  Layout a{}, b{}, d{};

  explicit Call(const GemmParams& p) {
    require(library()->init_operation(&operation, sizeof operation, kCompute32F, kReal32F), "cublasLtMatmulDescInit");
    const auto layout = [](Layout* l, DType t, std::int64_t columns, std::int64_t rows) {
      const int type = t == DType::kFloat32 ? kReal32F : t == DType::kBFloat16 ? kReal16Bf : kReal16F;
      require(library()->init_layout(l, sizeof *l, type, columns, rows, columns), "cublasLtMatrixLayoutInit");
    };
    const auto operand = [&](Layout* l, const GemmOperand& o, std::int64_t extent) {
      const bool contiguous = o.contraction_contiguous;
      layout(l, p.dtype, contiguous ? p.contraction : extent, contiguous ? extent : p.contraction);
    };
    operand(&a, p.b, p.n);
    operand(&b, p.a, p.m);
    layout(&d, p.d_dtype, p.n, p.m);
    const auto transpose = [&](int which) {
      require(library()->set_operation(&operation, which, &kTransposed, sizeof kTransposed),
              "cublasLtMatmulDescSetAttribute");
    };
    if (p.b.contraction_contiguous) transpose(kTransposeA);
    if (!p.a.contraction_contiguous) transpose(kTransposeB);
  }
};

bool is_dense(const void* data, const RowLayout& rows, std::int64_t num, std::int64_t columns, int element_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && columns * element_bytes % 16 == 0 &&
         (num <= 1 || (rows.inner >= num && rows.inner_stride == columns));
}

}  // namespace

const CublasLt* CublasLt::on(int device) {
  static CublasLt on_device[kMaxDevices];
  static std::once_flag made[kMaxDevices];
  if (device < 0 || device >= kMaxDevices || library() == nullptr) return nullptr;
  std::call_once(made[device], [&] {
    const DeviceGuard guard(device);
    // Creating a handle allocates memory. While a stream is captured, this thread may allocate only if its capture mode
    // is relaxed.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const int status = library()->create(&on_device[device].handle_);
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    require(status, "cublasLtCreate");
    on_device[device].version_ = library()->version();
  });
  return &on_device[device];
}

bool CublasLt::serves(const GemmParams& p) {
  const auto operand = [&](const GemmOperand& o, std::int64_t extent) {
    return o.contraction_contiguous ? is_dense(o.data, o.rows, extent, p.contraction, 2)
                                    : is_dense(o.data, o.rows, p.contraction, extent, 2);
  };
  return p.m > 0 && p.n > 0 && p.contraction > 0 && p.segments == 1 && p.bias == nullptr && p.addend == nullptr &&
         (p.block == 0 || p.contraction <= p.block) && operand(p.a, p.m) && operand(p.b, p.n) &&
         is_dense(p.d, p.d_rows, p.m, p.n, size_of(p.d_dtype));
}

void CublasLt::run(const GemmParams& p, const CublasLtAlgorithm& algorithm, cudaStream_t stream) const {
  Call call(p);
  constexpr float kOne = 1.0f, kZero = 0.0f;
  require(library()->multiply(handle_, &call.operation, &kOne, p.b.data, &call.a, p.a.data, &call.b, &kZero, p.d,
                              &call.d, p.d, &call.d, &algorithm, nullptr, 0, stream),
          "cublasLtMatmul");
}

std::vector<CublasLtAlgorithm> CublasLt::propose(const GemmParams& p, int most) const {
  Call call(p);
  Preference preference{};  // the default preference allows no workspace
  require(library()->init_preference(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
  std::vector<Heuristic> found(static_cast<std::size_t>(most));
  int count = 0;
  const int status = library()->propose(handle_, &call.operation, &call.a, &call.b, &call.d, &call.d, &preference, most,
                                        found.data(), &count);
  std::vector<CublasLtAlgorithm> algorithms;
  for (int i = 0; status == 0 && i < count; ++i) {
    if (found[i].state == 0 && found[i].workspace_bytes == 0) algorithms.push_back(found[i].algorithm);
  }
  return algorithms;
}

}  // namespace rlk::cuda
