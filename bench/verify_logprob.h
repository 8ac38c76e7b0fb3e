// Compares all implementations of logprob bit by bit: the kernels for many rows and for few rows, on both
// architectures, and the CPU backend. Rows hold realistic values and every special case of the contract.
#pragma once

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/kernels.h"
#include "cuda/logprob/plan.h"
#include "kernels/vocabulary/logprob_groups.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/ops/logprob.h"

namespace rlk::bench {

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t n) : n_(n) { cuda::check(cudaMalloc(&data_, n * sizeof(T) + 16), "cudaMalloc"); }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    cuda::check(cudaMemcpy(data_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> h(n_);
    cuda::check(cudaMemcpy(h.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return h;
  }
  void poison() const { cuda::check(cudaMemset(data_, 0xa5, n_ * sizeof(T)), "memset"); }

 private:
  T* data_ = nullptr;
  std::size_t n_;
};

struct VerifyCase {
  std::int64_t rows, vocab;
  DType dtype;
  Exp exp;
  bool special;  // rows and options of every kind; otherwise a plain call
};

class Verifier {
 public:
  explicit Verifier(const VerifyCase& c) : c_(c), random_(static_cast<unsigned>(c.vocab)) {
    make_logits();
    make_rows();
  }
  // Returns the number of differing bytes, and prints a line for each kind of difference.
  std::size_t run() {
    forward();
    backward();
    std::printf("%s vocab %6ld rows %3ld %s %s %s\n", differing_ ? "DIFFERS" : "equal  ", static_cast<long>(c_.vocab),
                static_cast<long>(c_.rows),
                c_.dtype == DType::kFloat32    ? "f32 "
                : c_.dtype == DType::kBFloat16 ? "bf16"
                                               : "f16 ",
                c_.exp == Exp::kHardware ? "hardware" : "portable", c_.special ? "special rows" : "plain");
    return differing_;
  }

 private:
  static constexpr std::int64_t kFewRows = 96;  // rows that the kernels for few rows and the CPU take at a time
  static constexpr int kOutputs = 5 + kStatsFields;
  using Bytes = std::vector<std::uint8_t>;

  void set(std::int64_t row, std::int64_t column, float x) {
    std::uint8_t* to = &logits_[(row * c_.vocab + column) * size_of(c_.dtype)];
    if (c_.dtype == DType::kFloat32) {
      std::memcpy(to, &x, 4);
    } else {
      const std::uint16_t h = c_.dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
      std::memcpy(to, &h, 2);
    }
  }
  float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(random_); }
  std::int64_t column() { return std::uniform_int_distribution<std::int64_t>(0, c_.vocab - 1)(random_); }

  void make_logits() {
    logits_.resize(c_.rows * c_.vocab * size_of(c_.dtype));
    std::normal_distribution<float> normal(0.0f, 3.0f);
    const std::int64_t total = c_.rows * c_.vocab, pattern = std::min<std::int64_t>(total, (1 << 20) - 3);
    for (std::int64_t i = 0; i < pattern; ++i) set(0, i, normal(random_));
    for (std::int64_t done = pattern; done < total; done += pattern) {
      std::memcpy(&logits_[done * size_of(c_.dtype)], &logits_[0], std::min(pattern, total - done) * size_of(c_.dtype));
    }
  }
  void make_rows() {
    for (std::int64_t i = 0; i < c_.rows; ++i) {
      target_.push_back(column());
      temperature_.push_back(uniform(0.3f, 2.0f));
      for (std::vector<float>* g : {&dlogprob_, &dlse_, &dentropy_})
        g->push_back(i % 7 == 3 ? 0.0f : uniform(-2.0f, 2.0f));
      kept_offsets_.push_back(static_cast<std::int64_t>(kept_.size()));
      if (!c_.special) continue;
      if (i % 5 == 2) {
        for (int k = 0; k < 40; ++k) kept_.push_back(static_cast<std::int32_t>(column()));
      }
      make_special(i);
    }
    kept_offsets_.push_back(static_cast<std::int64_t>(kept_.size()));
    if (kept_.empty()) kept_.push_back(0);
  }
  void make_special(std::int64_t i) {
    const float infinite = infinity();
    const auto every = [&](float value) {
      for (std::int64_t j = 0; j < c_.vocab; ++j) set(i, j, value);
    };
    switch (i % 23) {
      case 3:
        for (std::int64_t j = 0; j < c_.vocab; ++j) {
          if (uniform(0, 1) < 0.3f) set(i, j, -infinite);
        }
        break;
      case 5:
        return set(i, column(), canonical_nan());
      case 6:
        return set(i, column(), infinite);
      case 7:
        return every(-infinite);
      case 8:
        for (std::int64_t j = 0; j < c_.vocab; ++j) set(i, j, uniform(-3e3f, 3e3f));
        break;
      case 9:
        return set(i, column(), -6e4f);
      case 10:
        return set(i, target_[i], -infinite);
      case 11:
        target_[i] = -100;
        return every(canonical_nan());
      case 12:
        target_[i] = c_.vocab + 5;
        break;
      case 13:
        target_[i] = -1;
        break;
      case 14:
        return every(3e4f);
      case 15:
        temperature_[i] = 0.0f;
        break;
      case 16:
        temperature_[i] = canonical_nan();
        break;
      case 17:
        temperature_[i] = 1e-3f;
        break;
      case 18:
        temperature_[i] = 50.0f;
        break;
      case 19:
        kept_.push_back(static_cast<std::int32_t>(c_.vocab + 3));
        break;
      default:
        break;
    }
  }

  template <class Params>
  void fill(Params* p, const void* logits, const std::int64_t* target, const float* temperature,
            const std::int32_t* kept, const std::int64_t* kept_offsets, std::int64_t first, std::int64_t rows) const {
    p->logits = static_cast<const std::uint8_t*>(logits) + first * c_.vocab * size_of(c_.dtype);
    p->target = target + first;
    p->dtype = c_.dtype;
    p->exp = c_.exp;
    p->logits_rows = {.inner = rows, .outer_stride = 0, .inner_stride = c_.vocab};
    p->target_rows = {.inner = rows, .outer_stride = 0, .inner_stride = 1};
    p->num_rows = rows;
    p->num_columns = p->vocab_size = p->valid_vocab = c_.vocab;
    if (!c_.special) return;
    p->temperature = temperature + first;
    p->kept_ids = kept;
    p->kept_offsets = kept_offsets + first;
    p->kept_size = static_cast<std::int64_t>(kept_.size());
    p->valid_vocab = c_.vocab - c_.vocab / 100;
    if (c_.vocab % 2 == 0) p->logit_scale = 0.75f;
    if (c_.vocab % 1000 == 0) p->softcap = 30.0f;
  }
  void outputs(LogprobParams* p, float* to, std::int64_t first, bool stats) const {
    if (stats) {
      p->stats = to + 5 * c_.rows + first * kStatsFields;
      return;
    }
    p->logprob = to + first;
    p->lse = to + c_.rows + first;
    p->entropy = to + 2 * c_.rows + first;
    p->sum_p_sq = to + 3 * c_.rows + first;
    p->status = reinterpret_cast<std::int32_t*>(to + 4 * c_.rows + first);
  }

  void compare(const char* what, const void* a, const void* b, std::size_t bytes) {
    const auto* x = static_cast<const std::uint8_t*>(a);
    const auto* y = static_cast<const std::uint8_t*>(b);
    if (std::memcmp(x, y, bytes) == 0) return;
    std::size_t count = 0, at = bytes;
    for (std::size_t i = 0; i < bytes; ++i) {
      if (x[i] == y[i]) continue;
      ++count;
      if (at == bytes) at = i;
    }
    std::printf("  %s: %zu of %zu bytes differ, first at %zu\n", what, count, bytes, at);
    differing_ += count;
  }

  void forward() {
    const DeviceArray<std::uint8_t> logits(logits_);
    const DeviceArray<std::int64_t> target(target_), kept_offsets(kept_offsets_);
    const DeviceArray<float> temperature(temperature_);
    const DeviceArray<std::int32_t> kept(kept_);
    const DeviceArray<std::uint8_t> workspace(16 << 20);
    const DeviceArray<float> result(c_.rows * kOutputs);
    const auto on_device = [&](int arch, std::int64_t rows_at_once) {
      result.poison();
      for (std::int64_t first = 0; first < c_.rows; first += rows_at_once) {
        for (const bool stats : {false, true}) {
          LogprobParams p;
          fill(&p, logits.get(), target.get(), temperature.get(), kept.get(), kept_offsets.get(), first,
               std::min(rows_at_once, c_.rows - first));
          outputs(&p, result.get(), first, stats);
          p.workspace = workspace.get();
          const auto plan = cuda::choose_plan(p, arch, cuda::multiprocessors(0));
          arch == 80 ? cuda::sm80::logprob_forward(p, group_grid(p), plan, nullptr)
                     : cuda::sm90::logprob_forward(p, group_grid(p), plan, nullptr);
        }
      }
      cuda::check(cudaDeviceSynchronize(), "forward");
      return result.host();
    };
    stream_ = on_device(90, c_.rows);
    const std::size_t bytes = stream_.size() * 4;
    compare("forward sm_90 few rows", on_device(90, kFewRows).data(), stream_.data(), bytes);
    compare("forward sm_80", on_device(80, c_.rows).data(), stream_.data(), bytes);
    compare("forward sm_80 few rows", on_device(80, 5).data(), stream_.data(), bytes);
    forward_on_cpu();
  }
  void forward_on_cpu() {
    std::vector<float> cpu = stream_;
    const std::int64_t rows = std::min(c_.rows, kFewRows);
    for (const bool stats : {false, true}) {
      LogprobParams p;
      fill(&p, logits_.data(), target_.data(), temperature_.data(), kept_.data(), kept_offsets_.data(), 0, rows);
      outputs(&p, cpu.data(), 0, stats);
      logprob(p, Device{}, 0);
    }
    constexpr const char* kNames[] = {"logprob on CPU", "lse on CPU", "entropy on CPU", "sum_p_sq on CPU",
                                      "status on CPU"};
    for (int i = 0; i < 5; ++i) compare(kNames[i], &cpu[i * c_.rows], &stream_[i * c_.rows], rows * 4);
    compare("stats on CPU", &cpu[5 * c_.rows], &stream_[5 * c_.rows], rows * kStatsFields * 4);
  }

  void gradients(LogprobBackwardParams* p, const float* of_rows, void* dlogits, std::int64_t rows) const {
    p->lse = of_rows + c_.rows;
    p->entropy = of_rows + 2 * c_.rows;
    p->dlogprob = of_rows + kOutputs * c_.rows;
    p->dlogprob_rows = p->dlse_rows = p->dentropy_rows = p->target_rows;
    if (c_.special) {
      p->dlse = p->dlogprob + c_.rows;
      p->dentropy = p->dlse + c_.rows;
    }
    p->dlogits = dlogits;
    p->dlogits_rows = {.inner = rows, .outer_stride = 0, .inner_stride = c_.vocab};
  }
  void backward() {
    const std::int64_t rows = std::min(c_.rows, kFewRows);
    const std::size_t bytes = rows * c_.vocab * size_of(c_.dtype);
    std::vector<float> of_rows = stream_;
    for (const auto& g : {dlogprob_, dlse_, dentropy_}) of_rows.insert(of_rows.end(), g.begin(), g.end());
    const Bytes few(logits_.begin(), logits_.begin() + static_cast<std::ptrdiff_t>(bytes));
    const DeviceArray<std::int64_t> target(target_), kept_offsets(kept_offsets_);
    const DeviceArray<float> temperature(temperature_), values(of_rows);
    const DeviceArray<std::int32_t> kept(kept_);
    // dlogits begins `offset` bytes after a multiple of 256. Without an offset the call is in place.
    const auto on_device = [&](int arch, std::size_t offset, bool in_place) {
      const DeviceArray<std::uint8_t> logits(few), other(bytes + offset);
      other.poison();
      std::uint8_t* dlogits = in_place ? logits.get() : other.get() + offset;
      LogprobBackwardParams p;
      fill(&p, logits.get(), target.get(), temperature.get(), kept.get(), kept_offsets.get(), 0, rows);
      gradients(&p, values.get(), dlogits, rows);
      arch == 80 ? cuda::sm80::logprob_backward(p, nullptr) : cuda::sm90::logprob_backward(p, nullptr);
      Bytes host(bytes);
      cuda::check(cudaMemcpy(host.data(), dlogits, bytes, cudaMemcpyDeviceToHost), "backward");
      return host;
    };
    Bytes cpu(bytes);
    LogprobBackwardParams p;
    fill(&p, few.data(), target_.data(), temperature_.data(), kept_.data(), kept_offsets_.data(), 0, rows);
    gradients(&p, of_rows.data(), cpu.data(), rows);
    logprob_backward(p, Device{}, 0);
    compare("backward sm_90", on_device(90, 0, false).data(), cpu.data(), bytes);
    compare("backward sm_80", on_device(80, 0, false).data(), cpu.data(), bytes);
    compare("backward in place", on_device(90, 0, true).data(), cpu.data(), bytes);
    compare("backward shifted", on_device(90, size_of(c_.dtype) * 3, false).data(), cpu.data(), bytes);
  }

  VerifyCase c_;
  std::mt19937 random_;
  Bytes logits_;
  std::vector<std::int64_t> target_, kept_offsets_;
  std::vector<float> temperature_, dlogprob_, dlse_, dentropy_, stream_;
  std::vector<std::int32_t> kept_;
  std::size_t differing_ = 0;
};

// Differing bytes over all cases.
inline std::size_t verify() {
  std::size_t differing = 0;
  for (const std::int64_t vocab : {1, 7, 8, 129, 1000, 4096, 32003, 50257, 128256, 151665}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const Exp exp : {Exp::kHardware, Exp::kPortable}) {
        for (const bool special : {false, true}) {
          differing += Verifier({600, vocab, dtype, exp, special}).run();  // more than the kernels for few rows take
        }
      }
    }
  }
  std::printf("%zu differing bytes\n", differing);
  return differing;
}

}  // namespace rlk::bench
