// Every plan of policy_loss has the CPU's bits, as built for sm_90 and for sm_80, whose PTX runs here: random specs,
// padded and packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpp/cpu/policy_loss.h"
#include "cuda/policy_loss/kernels.h"
#include "cuda/policy_loss/policy_loss.h"
#include "tests/policy_loss_cases.h"

namespace rlk::cuda {
namespace {

constexpr int kSkipped = 77;
constexpr std::size_t kGuard = 64;

class OnDevice {
 public:
  OnDevice(const void* host, std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes + 256), "cudaMalloc");
    if (bytes > 0) check(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "copy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  void* data() const { return data_; }
  void get(void* host) const {
    if (bytes_ > 0) check(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost), "copy");
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

struct Outputs {
  std::vector<float> loss, metrics, d_logprob, d_entropy;
  explicit Outputs(std::int64_t slots)
      : loss(1 + kGuard, -7.0f),
        metrics(kPolicyMetrics + kGuard, -7.0f),
        d_logprob(static_cast<std::size_t>(slots) + kGuard, -7.0f),
        d_entropy(d_logprob) {}
  std::vector<float>* all(int i) {
    std::vector<float>* const arrays[] = {&loss, &metrics, &d_logprob, &d_entropy};
    return arrays[i];
  }
  void point(PolicyLossParams* p, float* const (&to)[4]) const {
    p->loss = to[0];
    p->metrics = to[1];
    p->d_logprob = to[2];
    p->d_entropy = p->entropy.data == nullptr ? nullptr : to[3];
  }
};

int wrong = 0, compared = 0;

void run_case(policy_test::Case& c) {
  const std::int64_t slots = c.p.sequences.num_slots();
  Outputs want(slots);
  PolicyLossParams p = c.p;
  want.point(&p, {want.loss.data(), want.metrics.data(), want.d_logprob.data(), want.d_entropy.data()});
  cpu::policy_loss(p);

  std::vector<OnDevice*> kept;
  const auto put = [&](const void* data, std::size_t bytes) {
    kept.push_back(new OnDevice(data, bytes));
    return kept.back()->data();
  };
  PolicyTokens* const arrays[] = {&p.logprob,    &p.old_logprob, &p.advantage, &p.ref_logprob,
                                  &p.importance, &p.entropy,     &p.selected};
  for (int k = 0; k < 7; ++k) {
    if (arrays[k]->data == nullptr) continue;
    arrays[k]->data = static_cast<const float*>(put(c.arrays[k].data(), c.arrays[k].size() * sizeof(float)));
  }
  p.mask.data = put(c.mask.data(), c.mask.size());
  if (p.sequences.packed()) {
    p.sequences.cu_seqlens = p.sequences.cu_dtype == DType::kInt64 ? put(c.cuts64.data(), c.cuts64.size() * 8)
                                                                   : put(c.cuts32.data(), c.cuts32.size() * 4);
  }
  const std::vector<unsigned char> garbage(static_cast<std::size_t>(policy_loss_workspace_bytes(p)) + (1 << 20), 0xcd);
  for (const TokenPlan& plan : kTokenPlans) {
    if (plan.tile == 7 && p.sequences.num_slots() > 200000) continue;  // more slots than the workspace here
    for (const int arch : {90, 80}) {
      const OnDevice workspace(garbage.data(), garbage.size());
      Outputs got(slots);
      OnDevice* outputs[4];
      float* to[4];
      for (int i = 0; i < 4; ++i) {
        outputs[i] = new OnDevice(got.all(i)->data(), got.all(i)->size() * sizeof(float));
        to[i] = static_cast<float*>(outputs[i]->data());
      }
      got.point(&p, {to[0], to[1], to[2], to[3]});
      p.workspace = workspace.data();
      arch == 90 ? policy_loss_sm90(p, plan, nullptr) : policy_loss_sm80(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "policy_loss");
      for (int i = 0; i < 4; ++i) {
        outputs[i]->get(got.all(i)->data());
        delete outputs[i];
        ++compared;
        if (std::memcmp(got.all(i)->data(), want.all(i)->data(), want.all(i)->size() * sizeof(float)) == 0) continue;
        ++wrong;
        std::size_t at = 0;
        while (std::memcmp(&(*got.all(i))[at], &(*want.all(i))[at], 4) == 0) ++at;
        if (wrong < 20) {
          std::printf("%s, tile %d, sm_%d, output %d, element %zu: wanted %a, got %a\n", c.text.c_str(), plan.tile,
                      arch, i, at, (*want.all(i))[at], (*got.all(i))[at]);
        }
      }
    }
  }
  for (OnDevice* array : kept) delete array;
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
  // No sequence; no token; one; short; more sequences than a block sums; one tile and a token; many tiles.
  constexpr std::int64_t kShapes[][2] = {{0, 7},     {3, 0},    {1, 1},     {5, 13},    {70, 3},
                                         {300, 129}, {9, 256},  {2, 1025},  {33, 2048}, {1, 9000},
                                         {130, 40},  {4, 8193}, {2, 20000}, {1, 70000}};
  unsigned seed = 1;
  for (const auto& shape : kShapes) {
    for (const bool packed : {false, true}) {
      for (int i = 0; i < (shape[0] * shape[1] > 30000 ? 6 : 25); ++i) {
        policy_test::Case c;
        policy_test::make_case(seed++, shape[0], shape[1], packed, &c);
        cuda::run_case(c);
      }
    }
  }
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
