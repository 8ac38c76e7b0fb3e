#include "cublaslt_records.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <span>

#include "../common/launch.h"

namespace rlk::cuda {
namespace {

// Names that the included records use. A `using enum` would give these names, but g++ 10 does not have it.
constexpr auto kForward = LinearPass::kForward, kInputGrad = LinearPass::kInputGrad,
               kWeightGrad = LinearPass::kWeightGrad;
constexpr auto kFloat32 = DType::kFloat32, kBFloat16 = DType::kBFloat16, kFloat16 = DType::kFloat16;

// The records are sorted by product.
constexpr CublasLtRecord kH200Version130100[] = {
#include "cublaslt_nvidia_h200_130100.inc"
};

struct Table {
  const char* gpu;
  int multiprocessors;
  std::size_t version;  // the library's version
  std::span<const CublasLtRecord> records;
};
static_assert(std::ranges::is_sorted(kH200Version130100, {}, &CublasLtRecord::products));

constexpr Table kTables[] = {{"NVIDIA H200", 132, 130100, kH200Version130100}};

// For each table of records, whether it was recorded on a GPU like this device.
const std::array<bool, std::size(kTables)>& tables_of(int device) {
  static std::array<bool, std::size(kTables)> of_device[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  std::call_once(asked[device], [&] {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::ranges::transform(kTables, of_device[device].begin(), [&](const Table& t) {
      return std::strcmp(properties.name, t.gpu) == 0 && properties.multiProcessorCount == t.multiprocessors;
    });
  });
  return of_device[device];
}

bool has_version(int device, std::size_t version) {
  const CublasLt* library = CublasLt::on(device);
  return library != nullptr && library->version() == version;
}

// The product as a search key. In the sorted records, the key comes before all records of this product with at least as
// many rows.
LinearProducts key_of(const GemmParams& p) {
  if (!p.a.contraction_contiguous) return {kWeightGrad, p.dtype, p.d_dtype, p.n, p.m, p.contraction, 0};
  if (!p.b.contraction_contiguous) return {kInputGrad, p.dtype, p.d_dtype, p.n, p.contraction, p.m, 0};
  return {kForward, p.dtype, p.d_dtype, p.contraction, p.n, p.m, 0};
}

bool contains(const LinearProducts& products, const LinearProducts& key) {
  LinearProducts same = key;
  same.last_rows = products.last_rows;
  same.first_rows = products.first_rows;
  return products == same && products.first_rows <= key.last_rows;
}

}  // namespace

const CublasLtRecord* recorded(const GemmParams& p, int device) {
  if (!CublasLt::serves(p)) return nullptr;
  const auto& applies = tables_of(device);
  const LinearProducts key = key_of(p);
  for (std::size_t i = 0; i < std::size(kTables); ++i) {
    if (!applies[i]) continue;
    const auto found = std::ranges::lower_bound(kTables[i].records, key, {}, &CublasLtRecord::products);
    if (found == kTables[i].records.end() || !contains(found->products, key)) continue;
    if (has_version(device, kTables[i].version)) return &*found;
  }
  return nullptr;
}

std::vector<LinearProducts> recorded_products(int device) {
  std::vector<LinearProducts> products;
  for (std::size_t i = 0; i < std::size(kTables); ++i) {
    if (!tables_of(device)[i] || !has_version(device, kTables[i].version)) continue;
    for (const CublasLtRecord& record : kTables[i].records) products.push_back(record.products);
  }
  return products;
}

}  // namespace rlk::cuda
