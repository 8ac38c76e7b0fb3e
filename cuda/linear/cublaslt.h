// NVIDIA's cuBLASLt as an engine of linear, if this process or the system has the library. The library is found at run
// time and never linked. cuBLASLt computes a product only if an algorithm is recorded to give the bits of our kernels
// (cublaslt_records.h).
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gemm.h"

namespace rlk::cuda {

// The library's own description of an algorithm. The description may be stored, but only the same version of the
// library can read it.
using CublasLtAlgorithm = std::array<std::uint64_t, 8>;

class CublasLt {
 public:
  // The engine on a device, or null if no library of this build's CUDA major version is found. The library lives as
  // long as the process.
  static const CublasLt* on(int device);

  std::size_t version() const { return version_; }  // "130100" is 13.1.0

  // Whether a call of the library can compute the product. The contraction must be a single sum, without segments or
  // token blocks. The product must have dense rows that begin at multiples of 16 bytes, and neither a bias nor an
  // addend.
  static bool serves(const GemmParams& p);
  // Runs without a workspace. Throws if the library refuses.
  void run(const GemmParams& p, const CublasLtAlgorithm& algorithm, cudaStream_t stream) const;
  // The library's proposals for a product without a workspace, the library's favourite first.
  std::vector<CublasLtAlgorithm> propose(const GemmParams& p, int most) const;

 private:
  CublasLt() = default;
  void* handle_ = nullptr;
  std::size_t version_ = 0;
};

}  // namespace rlk::cuda
