// Microbenchmark of the CUDA kernels of logprob: one row per case, with the bytes it must move and its share of a ceiling
// measured in the same run, of reading for the forward and of copying for the backward. Usage:
// bench_logprob [--arch 80|90] [--only PART_OF_A_NAME] [--vocab COLUMNS] | --verify
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "bench/verify_logprob.h"
#include "cuda/common/kernels.h"
#include "cuda/logprob/plan.h"
#include "kernels/vocabulary/logprob_groups.h"
#include "rlk/backends.h"
#include "rlk/ops/logprob.h"

namespace rlk::bench {
namespace {

struct Case {
  const char* name;
  std::int64_t rows, vocab;
  DType dtype;
  Exp exp;
  bool all_outputs;
  bool backward;
};

constexpr float kLogitDeviation = 3.0f;

void run(const Case& c, int arch, double ceiling) {
  const std::size_t elements = static_cast<std::size_t>(c.rows) * c.vocab;
  // With few rows, calls rotate among buffers that together exceed the L2 several times.
  const int copies = static_cast<int>(std::max<std::size_t>(1, (512u << 20) / (elements * size_of(c.dtype))));
  const int buffers = copies > 64 ? 64 : copies;
  void *logits, *dlogits = nullptr, *workspace;
  float* rows;
  std::int64_t* target;
  cuda::check(cudaMalloc(&logits, elements * buffers * size_of(c.dtype)), "cudaMalloc");
  cuda::check(cudaMalloc(&workspace, 16 << 20), "cudaMalloc");
  cuda::check(cudaMalloc(&rows, 5 * c.rows * sizeof(float)), "cudaMalloc");
  cuda::check(cudaMalloc(&target, c.rows * sizeof(std::int64_t)), "cudaMalloc");
  if (c.backward) cuda::check(cudaMalloc(&dlogits, elements * size_of(c.dtype)), "cudaMalloc");
  fill_normal(logits, elements * buffers, c.dtype, kLogitDeviation);
  std::vector<std::int64_t> ids(c.rows);
  for (std::int64_t i = 0; i < c.rows; ++i) ids[i] = (i * 7919) % c.vocab;
  cuda::check(cudaMemcpy(target, ids.data(), ids.size() * 8, cudaMemcpyHostToDevice), "copy");

  LogprobInput in;
  in.target = target;
  in.dtype = c.dtype;
  in.exp = c.exp;
  in.logits_rows = {.inner = c.rows, .outer_stride = 0, .inner_stride = c.vocab};
  in.target_rows = {.inner = c.rows, .outer_stride = 0, .inner_stride = 1};
  in.num_rows = c.rows;
  in.num_columns = in.vocab_size = in.valid_vocab = c.vocab;
  const auto input = [&](int i) {
    LogprobInput p = in;
    p.logits = static_cast<std::uint8_t*>(logits) + (i % buffers) * elements * size_of(c.dtype);
    return p;
  };
  const auto forward = [&](cudaStream_t stream, int i) {
    LogprobParams p;
    static_cast<LogprobInput&>(p) = input(i);
    p.logprob = rows;
    p.lse = rows + c.rows;
    if (c.all_outputs) {
      p.entropy = rows + 2 * c.rows;
      p.sum_p_sq = rows + 3 * c.rows;
    }
    p.workspace = workspace;
    if (arch == 80) {
      cuda::sm80::logprob_forward(p, group_grid(p), cuda::LogprobPlan::kStream, stream);
    } else {
      cuda::logprob(p, 0, reinterpret_cast<Stream>(stream));
    }
  };
  const auto backward = [&](cudaStream_t stream, int i) {
    LogprobBackwardParams p;
    static_cast<LogprobInput&>(p) = input(i);
    p.lse = rows + c.rows;
    p.dlogprob = rows;
    p.dlogprob_rows = in.target_rows;
    p.dlogits = dlogits;
    p.dlogits_rows = in.logits_rows;
    if (arch == 80) {
      cuda::sm80::logprob_backward(p, stream);
    } else {
      cuda::logprob_backward(p, 0, reinterpret_cast<Stream>(stream));
    }
  };
  forward(nullptr, 0);
  cuda::check(cudaDeviceSynchronize(), "forward");
  const int calls = buffers > 1 ? buffers : 1;
  const double us = median_us(c.backward ? std::function<void(cudaStream_t, int)>(backward) : forward, calls, 15);
  const double bytes = static_cast<double>(elements) * size_of(c.dtype) * (c.backward ? 2 : 1);
  std::printf("%-28s sm_%d %6ld x %-6ld %9.2f us %7.1f MB %6.2f TB/s %5.1f %% of %s\n", c.name, arch, c.rows, c.vocab,
              us, bytes / 1e6, bytes / us / 1e6, 100 * bytes / us * 1e6 / ceiling, c.backward ? "copy" : "read");
  cudaFree(logits);
  cudaFree(workspace);
  cudaFree(rows);
  cudaFree(target);
  cudaFree(dlogits);
}

int main_(int argc, char** argv) {
  std::int64_t arch = 90, vocab_alone = 0;
  std::string only;
  bool verifies = false;
  CommandLine line;
  line.flag("verify", &verifies).value("arch", "90|80", &arch).value("only", "PART_OF_A_NAME", &only);
  line.value("vocab", "V", &vocab_alone);
  if (!line.read(argc, argv)) return 2;
  if (verifies) return verify() == 0 ? 0 : 1;
  std::vector<std::int64_t> vocabs = {128256, 151936};
  if (vocab_alone > 0) vocabs = {vocab_alone};
  const double copy = copy_ceiling(), read = read_ceiling();
  std::printf("copy ceiling %.2f TB/s, read ceiling %.2f TB/s\n", copy / 1e12, read / 1e12);
  constexpr auto hw = Exp::kHardware, portable = Exp::kPortable;
  constexpr auto bf16 = DType::kBFloat16, f16 = DType::kFloat16, f32 = DType::kFloat32;
  std::vector<Case> cases;
  for (std::int64_t vocab : vocabs) {
    for (const Case& c : {Case{"forward bf16 hw", 8192, vocab, bf16, hw, false, false},
                          Case{"forward bf16 hw all", 8192, vocab, bf16, hw, true, false},
                          Case{"backward bf16 hw", 8192, vocab, bf16, hw, false, true},
                          Case{"forward bf16 portable", 8192, vocab, bf16, portable, false, false},
                          Case{"forward bf16 portable all", 8192, vocab, bf16, portable, true, false},
                          Case{"backward bf16 portable", 8192, vocab, bf16, portable, false, true},
                          Case{"forward f16 hw", 8192, vocab, f16, hw, false, false},
                          Case{"forward f32 hw", 8192, vocab, f32, hw, false, false},
                          Case{"backward f32 hw", 8192, vocab, f32, hw, false, true},
                          Case{"one row bf16 hw", 1, vocab, bf16, hw, false, false},
                          Case{"one row bf16 portable all", 1, vocab, bf16, portable, true, false},
                          Case{"8 rows bf16 hw", 8, vocab, bf16, hw, false, false},
                          Case{"64 rows bf16 hw", 64, vocab, bf16, hw, false, false}}) {
      cases.push_back(c);
    }
  }
  cases.push_back({"unaligned forward bf16 hw", 8192, 151665, bf16, hw, false, false});
  cases.push_back({"unaligned backward bf16 hw", 8192, 151665, bf16, hw, false, true});
  cases.push_back({"small forward bf16 hw", 65536, 4096, bf16, hw, false, false});
  for (const Case& c : cases) {
    if (std::string(c.name).find(only) != std::string::npos) run(c, static_cast<int>(arch), c.backward ? copy : read);
  }
  return 0;
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) { return rlk::bench::main_(argc, argv); }
