// Microbenchmark of the CUDA kernels of elementwise operators. It prints one line per case: time, bytes that
// the case must move, and share of the copy ceiling, which the same run measures. Usage:
//   bench_elementwise [--only PART_OF_A_NAME] [--columns N] [--plans]
// --plans runs every plan that serves, not only the chosen plan.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "cuda/elementwise/kernels.h"
#include "kernels/rows/elementwise_formulas.h"

namespace rlk::bench {
namespace {

// packed: an array with kBeside and the array before it are the two halves of the same rows.
struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16;
  bool packed = true, round_before_mul = true;
};

template <class Params>
struct Function {
  std::string name;
  void (*kernel)(const Params& p, int vec8s, cudaStream_t stream);
};

template <class Params>
void run(const Function<Params>& function, int form, const Case& c, double ceiling, bool every_plan) {
  const std::int64_t bytes = c.rows * c.columns * size_of(c.dtype);
  constexpr int kAll = kInputs<Params> + kOutputs<Params>;
  const int count = static_cast<int>(std::clamp<std::int64_t>((512 << 20) / (kAll * bytes), 1, 64));
  const int calls = std::max(count, static_cast<int>(std::clamp<std::int64_t>((256 << 20) / bytes, 1, 64)));
  const Buffers buffers(static_cast<std::size_t>(kAll * bytes), count, c.dtype, true);
  const auto params_of = [&](int call) {
    Params p;
    p.num_rows = c.rows;
    p.columns = c.columns;
    p.dtype = c.dtype;
    if constexpr (requires { Elementwise<Params>::kForm; }) {
      auto& member = p.*Elementwise<Params>::kForm;
      member = static_cast<std::remove_reference_t<decltype(member)>>(form);
    }
    if constexpr (requires { p.round_before_mul; }) p.round_before_mul = c.round_before_mul;
    auto* next = static_cast<unsigned char*>(buffers.at(call));
    const auto put = [&](auto array, int) {
      if constexpr (!kIsNull<decltype(array.kRowsBefore)>) {
        if (c.packed) {  // the second half of the previous array's rows
          p.*array.kRowsBefore = p.*array.kRows = {c.rows, 0, 2 * c.columns};
          p.*array.kData = next - bytes + c.columns * size_of(c.dtype);
          next += bytes;
          return;
        }
      }
      p.*array.kRows = {c.rows, 0, c.columns};
      p.*array.kData = next;
      next += bytes;
    };
    for_each(typename Elementwise<Params>::Inputs{}, put);
    for_each(typename Elementwise<Params>::Outputs{}, put);
    return p;
  };
  const Params p = params_of(0);
  const int chosen = cuda::choose_vec8s(p, cuda::multiprocessors(0));
  for (const int vec8s : cuda::kElementwiseVec8s) {
    if (!cuda::serves(vec8s, p) || (!every_plan && vec8s != chosen)) continue;
    const double us =
        median_us([&](cudaStream_t s, int call) { function.kernel(params_of(call), vec8s, s); }, calls, 15);
    const double moved = static_cast<double>(kAll * bytes);
    std::printf(
        "%-22s %-4s %7lld x %-6lld %-6s %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  %s%s\n", function.name.c_str(),
        c.dtype == DType::kFloat32   ? "f32"
        : c.dtype == DType::kFloat16 ? "f16"
                                     : "bf16",
        static_cast<long long>(c.rows), static_cast<long long>(c.columns), c.packed ? "packed" : "apart", us,
        moved / 1e6, moved / us / 1e6, 100 * moved / (us * 1e-6) / ceiling,
        vec8s == 0 ? "any layout" : (std::to_string(vec8s) + " vec8s").c_str(), vec8s == chosen ? " chosen" : "");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::DType;
  std::string only;
  std::int64_t columns = 0;
  bool every_plan = false;
  CommandLine line;
  line.value("only", "PART_OF_A_NAME", &only).value("columns", "N", &columns).flag("plans", &every_plan);
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  std::vector<Case> cases;
  // Rows of decode steps, micro-batches and training steps. Columns are the intermediate sizes of an expert, Qwen3
  // 4B and 8B, and Llama 3 8B and 70B.
  for (const std::int64_t rows : {1, 8, 16, 64, 256, 1024, 2048, 8192, 16384}) cases.push_back({rows, 12288});
  for (const std::int64_t i : {768, 3072, 9728, 14336, 28672}) cases.push_back({8192, i});
  cases.push_back({64, 14336});
  cases.push_back({8192, 12288, DType::kFloat16});
  cases.push_back({8192, 12288, DType::kFloat32});
  cases.push_back({8192, 12288, DType::kBFloat16, false});
  cases.push_back({8192, 12288, DType::kBFloat16, true, false});  // the activation kept in float32
  cases.push_back({8192, 12287, DType::kBFloat16});               // rows that are not whole vec8s
  const auto run_all = [&](const auto& function, int forms) {
    for (int form = 0; form < forms; ++form) {
      auto of_form = function;
      if (forms > 1) of_form.name += " " + std::to_string(form);
      if (of_form.name.find(only) == std::string::npos) continue;
      for (const Case& c : cases) {
        if (columns == 0 || c.columns == columns) run(of_form, form, c, ceiling, every_plan);
      }
    }
  };
#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  run_all(Function<rlk::Params>{#function, rlk::cuda::sm90::function}, forms);
#include "rlk/elementwise.inc"
}
