// Worst error of every function of rlk/math against double, over all 2^32 fp32 inputs.
//
//   math_error [--stride N] [--threads N] [--only NAME]
//
// One row per function: inputs tried, worst error in ulp, the input it occurs at, how often the result falls from one
// tried input to the next larger input, seconds. An ulp is the spacing of fp32 at the exact result; a result that a
// contract flushes must be +0 to count as exact. The reference is a double function of an exactly converted input: its
// own error, below 1e-8 fp32 ulp, is under the printed digits. Build with -O3 -mfma -mavx2 -ffp-contract=off.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "bench/command_line.h"
#include "rlk/math/erf.h"
#include "rlk/math/exp.h"
#include "rlk/math/exp2.h"
#include "rlk/math/expm1.h"
#include "rlk/math/log2.h"
#include "rlk/math/sigmoid.h"
#include "rlk/math/tanh.h"
#include "tests/cpp/ulp.h"

namespace {

using rlk::Small;

struct Options {
  std::uint64_t stride = 1;
  unsigned threads = 1;
  std::string only;
};

struct Worst {
  double ulp = 0;
  float input = 0;
  std::uint64_t decreases = 0;
};

float input_of(std::uint64_t bits) {
  return rlk::float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(bits)));
}

template <class Function, class Reference>
void measure(const Options& options, const char* name, Small small, Function function, Reference reference) {
  if (!options.only.empty() && options.only != name) return;
  const auto start = std::chrono::steady_clock::now();
  const std::uint64_t inputs = ((1ull << 32) + options.stride - 1) / options.stride;
  std::vector<Worst> worst(options.threads);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < options.threads; ++t) {
    threads.emplace_back([&, t] {
      Worst mine;
      // A block and the last input of the previous block, so that every step from input to input is seen once.
      const std::uint64_t begin = inputs * t / options.threads, end = inputs * (t + 1) / options.threads;
      float previous = function(input_of(begin == 0 ? 0 : (begin - 1) * options.stride));
      for (std::uint64_t i = begin; i < end; ++i) {
        const float x = input_of(i * options.stride);
        const float y = function(x);
        const double ulp = rlk::error_in_ulp(y, reference(static_cast<double>(x)), small);
        if (ulp > mine.ulp) {
          mine.ulp = ulp;
          mine.input = x;
        }
        mine.decreases += std::signbit(x) ? y > previous : y < previous;  // negative floats ascend in magnitude
        previous = y;
      }
      worst[t] = mine;
    });
  }
  for (std::thread& thread : threads) thread.join();
  Worst all;
  for (const Worst& w : worst) {
    if (w.ulp > all.ulp) {
      all.ulp = w.ulp;
      all.input = w.input;
    }
    all.decreases += w.decreases;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%-12s %10llu  %8.4f  %-16a %-14.9g %9llu %7.1f\n", name, static_cast<unsigned long long>(inputs),
              all.ulp, static_cast<double>(all.input), static_cast<double>(all.input),
              static_cast<unsigned long long>(all.decreases), seconds.count());
  std::fflush(stdout);
}

double logsigmoid_reference(double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); }

}  // namespace

int main(int argc, char** argv) {
  Options options;
  std::int64_t stride = 1, threads = 1;
  rlk::bench::CommandLine line;
  line.value("stride", "N", &stride, 1).value("threads", "N", &threads, 1).value("only", "NAME", &options.only);
  if (!line.read(argc, argv)) return 2;
  options.stride = static_cast<std::uint64_t>(stride);
  options.threads = static_cast<unsigned>(threads);
  std::printf("%-12s %10s  %8s  %-16s %-14s %9s %7s\n", "function", "inputs", "ulp", "at", "", "decreases", "seconds");
  const auto nan_below = [](double x, double low, double y) { return x < low ? std::nan("") : y; };
  measure(
      options, "exp2", Small::kFlushed, [](float x) { return rlk::exp2(x); }, [](double x) { return std::exp2(x); });
  measure(
      options, "exp2_stat", Small::kKept,
      [](float x) { return std::fabs(x) <= 0.5f ? rlk::exp2_stat(x) : rlk::canonical_nan(); },
      [](double x) { return std::fabs(x) <= 0.5 ? std::exp2(x) : std::nan(""); });
  measure(
      options, "exp", Small::kFlushed, [](float x) { return rlk::exp(x); }, [](double x) { return std::exp(x); });
  measure(
      options, "expm1", Small::kKept, [](float x) { return rlk::expm1(x); }, [](double x) { return std::expm1(x); });
  measure(
      options, "log2", Small::kKept, [](float x) { return rlk::log2(x); },
      [&](double x) { return nan_below(x, 0, std::log2(x)); });
  measure(
      options, "log1p", Small::kKept, [](float x) { return rlk::log1p(x); },
      [&](double x) { return nan_below(x, -1, std::log1p(x)); });
  measure(
      options, "tanh", Small::kKept, [](float x) { return rlk::tanh(x); }, [](double x) { return std::tanh(x); });
  measure(
      options, "sigmoid", Small::kFlushed, [](float x) { return rlk::sigmoid(x); },
      [](double x) { return 1 / (1 + std::exp(-x)); });
  measure(
      options, "logsigmoid", Small::kFlushed, [](float x) { return rlk::logsigmoid(x); }, logsigmoid_reference);
  measure(
      options, "erf", Small::kKept, [](float x) { return rlk::erf(x); }, [](double x) { return std::erf(x); });
  return 0;
}
