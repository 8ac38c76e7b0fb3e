// Products with a recorded algorithm of cuBLASLt. On the recorded GPU and cuBLASLt version the algorithm gave the bits
// of our kernels in less time. bench/record_cublaslt.cpp writes the table; test_linear_engines.py runs it.
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

// The algorithm to run a product with, or null: it is not in the table, the library is not there, or this device or
// version is none of the table's. Asks for the library only once a product is in the table.
const CublasLtRecord* recorded(const GemmParams& p, int device);

// The products that records serve on a device.
std::vector<LinearProducts> recorded_products(int device);

}  // namespace rlk::cuda
