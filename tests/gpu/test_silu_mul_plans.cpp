// Tests that every kernel that can serve a call of silu_mul or gelu_mul has the CPU's bits. All plans of forward and
// backward run, in the sm_90 build and in the sm_80 build, whose PTX runs here.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/elementwise/kernels.h"
#include "plan_memory.h"
#include "rlk/backends.h"
#include "rlk/elementwise/silu_mul.h"

namespace rlk::cuda {
namespace {

enum class Gates { kNormal, kEveryHalf, kEveryMagnitude };

struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16;
  bool packed = false, round_before_mul = false;
  std::int64_t pad = 0;    // elements between the end of a row and the next row
  std::int64_t shift = 0;  // elements before the first
  Gates gates = Gates::kNormal;
};

// Column counts: a vec8; a block's share in each plan, also with one vec8 less and more; rows that need fewer threads
// than a block has; widths of models. Odd counts allow no vectors, and neither do rows that are not aligned to 16
// bytes.
const std::vector<Case> kCases = {
    {1, 8},
    {300, 8, DType::kBFloat16, true},
    {129, 24, DType::kFloat16, true, true},
    {65, 504, DType::kFloat32},
    {3, 1016},
    {7, 1024, DType::kBFloat16, false, true, 8},
    {2, 1032, DType::kFloat16, true},
    {5, 2040, DType::kFloat32, true, true},
    {3, 2056, DType::kBFloat16, true},
    {4, 4104, DType::kBFloat16, false, false, 16},
    {2, 11008, DType::kFloat16, true},
    {3, 12288, DType::kBFloat16, true, true},
    {64, 14336, DType::kBFloat16, true},
    {1, 14336, DType::kFloat32, true},
    {70, 1, DType::kBFloat16, true, true},
    {33, 37, DType::kFloat32, false, false, 3},
    {5, 1023, DType::kBFloat16, true},
    {3, 4099, DType::kFloat16, false, true, 5},
    {3, 1024, DType::kBFloat16, true, false, 0, 1},
    {70000, 40, DType::kBFloat16, true},
    {16, 4096, DType::kBFloat16, false, false, 0, 0, Gates::kEveryHalf},
    {16, 4096, DType::kBFloat16, false, true, 0, 0, Gates::kEveryHalf},
    {16, 4096, DType::kFloat16, false, true, 0, 0, Gates::kEveryHalf},
    {512, 8192, DType::kFloat32, false, false, 0, 0, Gates::kEveryMagnitude},
};

std::string text(const Case& c, Activation activation) {
  constexpr const char* kNames[] = {"silu", "gelu", "gelu_tanh"};
  return std::string(kNames[static_cast<int>(activation)]) + " " + short_name(c.dtype) + " [" + std::to_string(c.rows) +
         ", " + std::to_string(c.columns) + "]" + (c.packed ? " packed" : "");
}

// Bytes of a matrix with `halves` times the columns of the case, behind `shift` elements of kCanary.
std::vector<unsigned char> memory_of(const Case& c, int halves, std::mt19937* random, bool special) {
  const std::int64_t columns = halves * c.columns;
  auto values = matrix(c.rows, columns, columns + c.pad, c.dtype, random, special);
  values.insert(values.begin(), static_cast<std::size_t>(c.shift * size_of(c.dtype)), kCanary);
  return values;
}

void set_gates(const Case& c, std::mt19937* random, std::vector<unsigned char>* gate) {
  for (std::int64_t i = 0; c.gates != Gates::kNormal && i < c.rows * c.columns; ++i) {
    if (c.gates == Gates::kEveryHalf) {
      const auto pattern = static_cast<std::uint16_t>(i);
      std::memcpy(gate->data() + 2 * i, &pattern, 2);
    } else {  // one random pattern from each 1024 consecutive patterns of float32
      const std::uint32_t pattern = static_cast<std::uint32_t>(i) * 1024u + (*random)() % 1024u;
      std::memcpy(gate->data() + 4 * i, &pattern, 4);
    }
  }
}

void run_case(const Case& c, Activation activation, std::mt19937* random) {
  const int halves = c.packed ? 2 : 1;
  const std::int64_t bytes = size_of(c.dtype), start = c.shift * bytes, middle = start + c.columns * bytes;
  const RowLayout single = {c.rows, 0, c.columns + c.pad}, wide = {c.rows, 0, halves * c.columns + c.pad};
  auto gate = memory_of(c, halves, random, true);
  set_gates(c, random, &gate);
  const auto up = memory_of(c, 1, random, true), dy = memory_of(c, 1, random, true);
  GatedMulParams p;
  GatedMulBackwardParams q;
  p.num_rows = q.num_rows = c.rows;
  p.columns = q.columns = c.columns;
  p.dtype = q.dtype = c.dtype;
  p.activation = q.activation = activation;
  p.round_before_mul = q.round_before_mul = c.round_before_mul;
  p.gate_rows = p.up_rows = q.gate_rows = q.up_rows = q.d_gate_rows = q.d_up_rows = wide;
  p.y_rows = q.dy_rows = single;
  const auto at = [](auto* memory, std::int64_t offset) { return memory + offset; };
  const auto point = [&](const unsigned char* a, const unsigned char* b, const unsigned char* d) {
    p.gate = q.gate = at(a, start);
    p.up = q.up = c.packed ? at(a, middle) : at(b, start);
    q.dy = at(d, start);
  };
  const auto point_out = [&](unsigned char* y, unsigned char* a, unsigned char* b) {
    p.y = at(y, start);
    q.d_gate = at(a, start);
    q.d_up = c.packed ? at(a, middle) : at(b, start);
  };
  std::vector<unsigned char> y(dy.size(), kCanary), d_gate(gate.size(), kCanary), d_up(up.size(), kCanary);
  point(gate.data(), up.data(), dy.data());
  point_out(y.data(), d_gate.data(), d_up.data());
  cpu::gated_mul(p);
  cpu::gated_mul_backward(q);
  const OnDevice gate_gpu(gate), up_gpu(up), dy_gpu(dy);
  const auto data = [](const OnDevice& m) { return static_cast<unsigned char*>(m.data); };
  for (const int vec8s : kElementwiseVec8s) {
    for (const int arch : {90, 80}) {
      const OnDevice y_gpu(std::vector<unsigned char>(y.size(), kCanary));
      const OnDevice d_gate_gpu(std::vector<unsigned char>(gate.size(), kCanary));
      const OnDevice d_up_gpu(std::vector<unsigned char>(up.size(), kCanary));
      point(data(gate_gpu), data(up_gpu), data(dy_gpu));
      point_out(data(y_gpu), data(d_gate_gpu), data(d_up_gpu));
      const std::string what =
          text(c, activation) + ", " + std::to_string(vec8s) + " vec8s, sm_" + std::to_string(arch);
      if (serves(vec8s, p)) {
        arch == 90 ? sm90::gated_mul(p, vec8s, nullptr) : sm80::gated_mul(p, vec8s, nullptr);
        check(cudaDeviceSynchronize(), "silu_mul");
        expect(y_gpu.host(), y, what + ", y");
      }
      if (!serves(vec8s, q)) continue;
      arch == 90 ? sm90::gated_mul_backward(q, vec8s, nullptr) : sm80::gated_mul_backward(q, vec8s, nullptr);
      check(cudaDeviceSynchronize(), "silu_mul_backward");
      expect(d_gate_gpu.host(), d_gate, what + ", d_gate");
      expect(d_up_gpu.host(), d_up, what + ", d_up");
    }
  }
  if (c.packed || c.shift > 0) return;
  // In place: each gradient overwrites its own input, and y overwrites gate.
  const OnDevice gate_over(gate), up_over(up), y_over(gate);
  point(data(gate_over), data(up_over), data(dy_gpu));
  point_out(data(y_over), data(gate_over), data(up_over));
  sm90::gated_mul_backward(q, choose_vec8s(q, multiprocessors(0)), nullptr);
  expect(gate_over.host(), d_gate, text(c, activation) + ", d_gate over gate");
  expect(up_over.host(), d_up, text(c, activation) + ", d_up over up");
  p.gate = data(y_over);
  p.up = data(up_gpu);
  sm90::gated_mul(p, choose_vec8s(p, multiprocessors(0)), nullptr);
  expect(y_over.host(), y, text(c, activation) + ", y over gate");
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
    for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
      cuda::run_case(c, activation, &random);
    }
  }
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
