// Products with a recorded algorithm of cuBLASLt. On the recorded GPU and cuBLASLt version, the algorithm gave the bits
// of our kernels in less time. bench/record_cublaslt.cpp writes the table. test_linear_engines.py runs the table's
// records.
#pragma once

#include <cstdint>
#include <vector>

#include "cublaslt.h"
#include "gemm.h"
#include "rlk/ops/linear.h"

namespace rlk::cuda {

struct CublasLtRecord {
  LinearProducts products;
  CublasLtAlgorithm algorithm;
};

// The recorded algorithm for a product. Null if the product is in no table, if the library is missing, or if no table
// is for this device and this version of the library. The library is loaded only once a product is in a table.
const CublasLtRecord* recorded(const GemmParams& p, int device);

// The products for which a record applies on a device.
std::vector<LinearProducts> recorded_products(int device);

}  // namespace rlk::cuda
