// Compares a case of attention with the contract's reference. The backend is the CPU or, with RLK_TEST_HIP, HIP.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_reference.h"
#include "rlk/backends.h"
#include "rlk/ops/attention.h"

namespace attention_test {
namespace {

using linear_test::for_each_backend;
using linear_test::kCanonicalNan;
using linear_test::kWholeElements;
using rlk::Arithmetic;

constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
#if RLK_TEST_HIP
constexpr bool kBadListsThrow = false;
constexpr Exp kExps[] = {Exp::kPortable};
constexpr bool kInTurn = true;                      // options that do not interact take turns, since the emulation is
                                                    // slow
constexpr std::int64_t kOrderWidths[] = {64, 192};  // one width per tile, since the emulation is slow
constexpr Arithmetic kForwardArithmetics[] = {Arithmetic::kIeee};
constexpr rlk::Device kDevice{rlk::DeviceType::kRocm, 0};
void run_here(const AttentionParams& p) { rlk::hip::attention(p, 0, 0); }
void run_here(const AttentionBackwardParams& p) { rlk::hip::attention_backward(p, 0, 0); }
#else
constexpr bool kBadListsThrow = true;
constexpr Exp kExps[] = {Exp::kPortable, Exp::kHardware};
constexpr bool kInTurn = false;
constexpr std::int64_t kOrderWidths[] = {64, 128, 192, 256};
constexpr Arithmetic kForwardArithmetics[] = {Arithmetic::kIeee, Arithmetic::kSm90};
constexpr rlk::Device kDevice{rlk::DeviceType::kCpu, 0};
void run_here(const AttentionParams& p) { rlk::cpu::attention(p); }
void run_here(const AttentionBackwardParams& p) { rlk::cpu::attention_backward(p); }
#endif

constexpr std::size_t kGuard = 64;
constexpr unsigned char kCanary = 0x5a;

// Runs a call with a workspace of exactly the required bytes, and checks that nothing is written after them.
template <class Params>
void run_with(Params p, std::int64_t bytes) {
  std::vector<unsigned char> workspace(static_cast<std::size_t>(bytes) + kGuard, kCanary);
  p.workspace = workspace.data();
  run_here(p);
  for (std::size_t i = 0; i < kGuard; ++i) ASSERT_EQ(workspace[workspace.size() - 1 - i], kCanary) << "workspace";
}
void run(const AttentionParams& p) { run_with(p, attention_workspace_bytes(p, kDevice)); }
void run(const AttentionBackwardParams& p) { run_with(p, attention_backward_workspace_bytes(p, kDevice)); }

// Contiguous elements between canaries.
class Output {
 public:
  Output(std::int64_t elements, DType dtype, std::size_t shift = 0)
      : dtype_(dtype), begin_(kGuard + shift), size_(static_cast<std::size_t>(elements * rlk::size_of(dtype))) {
    memory_.assign(begin_ + size_ + kGuard, kCanary);
  }
  void* data() { return memory_.data() + begin_; }

  void expect(const Patterns& want, const std::string& where) const {
    for (std::size_t i = 0; i < want.size(); ++i) {
      const std::uint32_t got = load_pattern(memory_.data() + begin_, dtype_, static_cast<std::int64_t>(i));
      const bool nans = !kCanonicalNan && std::isnan(value_of(got, dtype_)) && std::isnan(value_of(want[i], dtype_));
      ASSERT_TRUE(got == want[i] || nans) << where << ", element " << i << " of " << want.size() << std::hex
                                          << ": wanted " << want[i] << ", got " << got;
    }
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(memory_[begin_ - 1 - i], kCanary) << where << ": written in front of the output";
      ASSERT_EQ(memory_[begin_ + size_ + i], kCanary) << where << ": written behind the output";
    }
  }

 private:
  DType dtype_;
  std::size_t begin_, size_;
  std::vector<unsigned char> memory_;
};

void check_forward(const Problem& problem, Arithmetic arithmetic) {
  const Case& c = problem.what();
  AttentionParams p{problem.input};
  p.arithmetic = arithmetic;
  const ForwardPatterns want = reference(p);
  for_each_backend([&](const std::string& way) {
    const std::string backend = way + ", " + linear_test::name(arithmetic);
    Output out(problem.q_places() * c.values(), c.dtype, c.shift), lse(problem.q_places(), DType::kFloat32);
    p.out = out.data();
    p.lse = static_cast<float*>(lse.data());
    run(p);
    ASSERT_NO_FATAL_FAILURE(out.expect(want.out, c.text() + ", out, " + backend));
    ASSERT_NO_FATAL_FAILURE(lse.expect(want.lse, c.text() + ", lse, " + backend));
    Output alone(problem.q_places() * c.values(), c.dtype);
    p.out = alone.data();
    p.lse = nullptr;
    run(p);
    ASSERT_NO_FATAL_FAILURE(alone.expect(want.out, c.text() + ", out without lse, " + backend));
  });
}
void check_forward(const Problem& problem) {
  for (const Arithmetic arithmetic : kForwardArithmetics) {
    if (arithmetic != Arithmetic::kIeee && problem.what().dtype == DType::kFloat32) continue;
    ASSERT_NO_FATAL_FAILURE(check_forward(problem, arithmetic));
  }
}

void check_backward(Problem& problem) {
  const Case& c = problem.what();
  AttentionBackwardParams p{problem.input};
  p.dout = problem.like_out();
  // A backward accepts any out and lse. lse is close to forward's, so that probabilities are realistic.
  AttentionParams forward{problem.input};
  ForwardPatterns saved = reference(forward);
  std::vector<unsigned char> out(saved.out.size() * static_cast<std::size_t>(rlk::size_of(c.dtype)) + 1);
  for (std::size_t i = 0; i < saved.out.size(); ++i) {
    const auto bytes = static_cast<std::size_t>(rlk::size_of(c.dtype));
    std::memcpy(&out[i * bytes], &saved.out[i], bytes);
  }
  std::vector<float> lse(saved.lse.size() + 1), dlse(saved.lse.size() + 1);
  for (std::size_t i = 0; i < saved.lse.size(); ++i) lse[i] = value_of(saved.lse[i], DType::kFloat32);
  for (std::size_t i = 0; i < dlse.size(); ++i) dlse[i] = static_cast<float>(static_cast<int>(i * 37 % 11) - 5) / 8;
  p.out = {out.data(), problem.input.q_tokens * c.q_heads * c.values(), c.q_heads * c.values(), c.values()};
  p.lse = lse.data();
  if (c.dlse) p.dlse = dlse.data();
  const BackwardPatterns want = reference(p);
  for_each_backend([&](const std::string& backend) {
    Output dq(problem.q_places() * c.head_dim, c.dtype, c.shift);
    Output dk(problem.k_places() * c.head_dim, c.dtype, c.shift), dv(problem.k_places() * c.values(), c.dtype);
    p.dq = dq.data();
    p.dk = dk.data();
    p.dv = dv.data();
    Output dsinks(c.q_heads, DType::kFloat32);
    if (c.sinks) p.dsinks = static_cast<float*>(dsinks.data());
    run(p);
    ASSERT_NO_FATAL_FAILURE(dsinks.expect(want.dsinks, c.text() + ", dsinks, " + backend));
    ASSERT_NO_FATAL_FAILURE(dq.expect(want.dq, c.text() + ", dq, " + backend));
    ASSERT_NO_FATAL_FAILURE(dk.expect(want.dk, c.text() + ", dk, " + backend));
    ASSERT_NO_FATAL_FAILURE(dv.expect(want.dv, c.text() + ", dv, " + backend));
  });
}

void check(const Case& c) {
  Problem problem(c);
  ASSERT_NO_FATAL_FAILURE(check_forward(problem));
  if (c.k_form == Form::kPaged) return;
  ASSERT_NO_FATAL_FAILURE(check_backward(problem));
}

}  // namespace
}  // namespace attention_test
