// The inner loops of the backward of the operator `embedding`. CMake compiles this file once per instruction set. Each
// lane of a vector computes one column.
#include "embedding_simd.h"

#include "simd.h"
#include "simd_memory.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

RLK_HD Floats load_floats(const float* p, std::int64_t k, int columns) {
  return load_at<Fp32>(reinterpret_cast<const unsigned char*>(p), k, columns);
}
RLK_HD void store_floats(float* p, std::int64_t k, int columns, Floats x) {
  std::memcpy(p + k, &x, static_cast<std::size_t>(columns) * sizeof(float));
}

void add_row(const unsigned char* row, DType dtype, std::int64_t count, float* sums) {
  with_type(dtype, [&](auto t) {
    for_each_vector(count, [&](std::int64_t k, int columns) {
      store_floats(sums, k, columns, add_rn(load_floats(sums, k, columns), load_at<decltype(t)>(row, k, columns)));
    });
  });
}

void join(const float* earlier, std::int64_t count, float* sums) {
  for_each_vector(count, [&](std::int64_t k, int columns) {
    store_floats(sums, k, columns, add_rn(load_floats(earlier, k, columns), load_floats(sums, k, columns)));
  });
}

void store(const float* sums, std::int64_t count, unsigned char* to, DType dtype) {
  with_type(dtype, [&](auto t) {
    for_each_vector(count, [&](std::int64_t k, int columns) {
      store_at<decltype(t)>(to, k, columns, load_floats(sums, k, columns));
    });
  });
}

}  // namespace

const EmbeddingLanes embedding_simd = {add_row, join, store};

}  // namespace rlk::cpu::RLK_CPU_ISA
