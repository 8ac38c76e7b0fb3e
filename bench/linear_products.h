// The products that the microbenchmarks of linear measure, as its CUDA kernels see them, and their device memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "bench/normal_data.h"
#include "cuda/linear/gemm.h"
#include "rlk/ops/linear.h"

namespace rlk::bench {

struct Layer {
  std::int64_t out_features, in_features;
};
// Llama 3 8B and Qwen3 8B: q, k, v; o; gate and up; down; heads.
constexpr Layer kLayers[] = {{6144, 4096},  {4096, 4096},  {28672, 4096},  {24576, 4096},
                             {4096, 14336}, {4096, 12288}, {128256, 4096}, {151936, 4096}};

// Parses the numbers of rows of --rows: "1,8,16".
inline bool row_list(const char* text, std::vector<std::int64_t>* rows) {
  std::stringstream list(text);
  for (std::string m; std::getline(list, m, ',');) {
    rows->push_back(std::strtoll(m.c_str(), nullptr, 10));
    if (rows->back() <= 0) return false;
  }
  return !rows->empty();
}

// Operands and results in bf16; the type of dweight is an argument. Weights rotate among at least three buffers that
// together exceed the L2 several times. With a single buffer, part of it would stay in L2, whatever its size.
class ProductMemory {
 public:
  ProductMemory(LinearPass pass, std::int64_t rows, const Layer& layer, DType out_dtype, bool main_grad)
      : pass_(pass), rows_(rows), layer_(layer), out_dtype_(out_dtype), main_grad_(main_grad) {
    const std::int64_t weights = layer.out_features * layer.in_features;
    const std::int64_t reads[] = {rows * layer.in_features, rows * layer.out_features, rows * layer.out_features};
    const std::int64_t writes[] = {rows * layer.out_features, rows * layer.in_features, weights};
    const int which = static_cast<int>(pass);
    buffers_ =
        pass == LinearPass::kForward ? static_cast<int>(std::clamp<std::int64_t>((200 << 20) / weights, 3, 12)) : 1;
    second_size_ = pass == LinearPass::kWeightGrad ? rows * layer.in_features : weights;
    first_ = allocate(reads[which] * 2);
    second_ = allocate(second_size_ * buffers_ * 2);
    result_bytes_ = writes[which] * size_of(out_dtype);
    result_ = allocate(result_bytes_);
    cuda::check(cudaMemset(result_, 0, static_cast<std::size_t>(result_bytes_)), "cudaMemset");
    fill(0);
  }
  ~ProductMemory() {
    for (void* p : {first_, second_, result_}) cudaFree(p);
  }
  ProductMemory(const ProductMemory&) = delete;
  ProductMemory& operator=(const ProductMemory&) = delete;

  // Fills operands with normal data. `spread` widens their exponents by this many binary orders.
  void fill(float spread) {
    const std::int64_t size = pass_ == LinearPass::kForward ? rows_ * layer_.in_features : rows_ * layer_.out_features;
    fill_normal(first_, static_cast<std::size_t>(size), DType::kBFloat16, 1.0f, spread);
    fill_normal(second_, static_cast<std::size_t>(second_size_ * buffers_), DType::kBFloat16, 1.0f, spread);
  }

  int buffers() const { return buffers_; }
  void* result() const { return result_; }
  std::int64_t result_bytes() const { return result_bytes_; }
  double flops() const {
    return 2.0 * static_cast<double>(rows_) * static_cast<double>(layer_.out_features * layer_.in_features);
  }

  cuda::GemmParams params(int buffer, int segments = 1) const {
    const auto dense = [](std::int64_t rows, std::int64_t stride) { return RowLayout{rows, 0, stride}; };
    const auto [out, in] = layer_;
    void* second = static_cast<std::uint16_t*>(second_) + buffer * second_size_;
    cuda::GemmParams p;
    p.d = result_;
    p.d_dtype = out_dtype_;
    if (pass_ == LinearPass::kWeightGrad) {
      p.a = {first_, dense(rows_, out), false};
      p.b = {second, dense(rows_, in), false};
      p.d_rows = p.addend_rows = dense(out, in);
      p.addend = main_grad_ ? static_cast<const float*>(result_) : nullptr;
      p.m = out, p.n = in, p.contraction = rows_, p.block = kTokenBlock;
      return p;
    }
    const bool forward = pass_ == LinearPass::kForward;
    p.a = {first_, dense(rows_, forward ? in : out), true};
    p.b = {second, dense(out, in), forward};
    p.m = rows_, p.n = forward ? out : in, p.contraction = forward ? in : out;
    p.d_rows = dense(rows_, p.n);
    p.segments = segments;
    return p;
  }

 private:
  static void* allocate(std::int64_t bytes) {
    void* p;
    cuda::check(cudaMalloc(&p, static_cast<std::size_t>(bytes)), "cudaMalloc");
    return p;
  }

  LinearPass pass_;
  std::int64_t rows_;
  Layer layer_;
  DType out_dtype_;
  bool main_grad_;
  int buffers_ = 1;
  std::int64_t second_size_ = 0, result_bytes_ = 0;
  void *first_ = nullptr, *second_ = nullptr, *result_ = nullptr;
};

}  // namespace rlk::bench
