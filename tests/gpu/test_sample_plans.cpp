// sample has the CPU's bits, as built for sm_90 and as PTX for sm_80. Calls are random: every cut and order, rows that
// differ in all parameters, ties, masks, padding, kept sets with too little room, the n best. Guard bands surround
// every output.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/sample/check.h"
#include "rlk/backends.h"
#include "tests/gpu/plan_memory.h"

namespace rlk::cuda {
namespace {

using Bytes = std::vector<unsigned char>;
constexpr std::int64_t kGuard = 64;

template <class T>
T chosen(std::mt19937* random, std::initializer_list<T> from) {
  return *(from.begin() + (*random)() % from.size());
}
template <class T>
Bytes bytes_of(const std::vector<T>& v) {
  Bytes b(v.size() * sizeof(T));
  std::memcpy(b.data(), v.data(), b.size());
  return b;
}

// The outputs of a call, one after another in one array; guards lie between them.
struct Outputs {
  std::int64_t used = kGuard;
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t at = used;
    used += (bytes + kGuard - 1) / kGuard * kGuard + kGuard;
    return at;
  }
};

struct Call {
  SampleParams p;
  Bytes logits, allowed, temperature, top_p, min_p, top_k, seed, sample_id, position, greedy;
  std::int64_t ids, status, logprob, raw, top, top_logprobs, raw_top, raw_top_logprobs, kept, offsets, output_bytes;

  explicit Call(unsigned seed_of_call) {
    std::mt19937 random(seed_of_call);
    const auto pick = [&](auto... x) { return chosen(&random, {x...}); };
    auto rows = pick(std::int64_t{1}, std::int64_t{3}, std::int64_t{9}, std::int64_t{60});
    std::int64_t vocab = pick(1, 7, 130, 1000, 2500, 20000, 33000, 70000);
    const bool only_share = random() % 4 == 0;  // top_p alone, which clusters of blocks compute for few rows
    if (only_share) {
      // An H200 computes up to 7 rows in clusters of 16 blocks, 40 in clusters of 8, and 66 in clusters of 2.
      // Clusters of 2 read columns again if a row has more than 65,536.
      vocab = pick(17000, 33001, 70000, 131072, 160003);
      rows = vocab > 40000
                 ? pick(std::int64_t{1}, std::int64_t{8}, std::int64_t{35}, std::int64_t{50})
                 : pick(std::int64_t{1}, std::int64_t{7}, std::int64_t{9}, std::int64_t{40}, std::int64_t{64});
    }
    p.num_rows = rows;
    p.vocab_size = vocab;
    p.valid_vocab = random() % 3 == 0 ? 1 + random() % vocab : vocab;
    p.logits_stride = vocab + (random() % 3 == 0 ? random() % 9 : 0);
    p.dtype = pick(DType::kFloat32, DType::kBFloat16, DType::kFloat16);
    p.order = pick(SampleOrder::kVllm, SampleOrder::kHf, SampleOrder::kSglang);
    p.random_stream = static_cast<std::int32_t>(random() % 3);
    std::normal_distribution<float> normal;
    // 0: constant rows of +0 and -0
    const float scale = only_share ? pick(0.0f, 1.0f, 4.0f, 10.0f) : pick(0.5f, 1.0f, 4.0f, 10.0f);
    const bool ties = random() % 4 == 0, wild = random() % 4 == 0;
    logits.resize(static_cast<std::size_t>(rows * p.logits_stride * size_of(p.dtype)));
    for (std::int64_t i = 0; i < rows * p.logits_stride; ++i) {
      float z = scale * normal(random);
      if (ties) z = std::round(z);
      if (wild && random() % 5000 == 0) z = pick(NAN, INFINITY, -INFINITY, 1e20f);
      if (p.dtype == DType::kFloat32) {
        std::memcpy(&logits[i * 4], &z, 4);
      } else {
        const std::uint16_t half = p.dtype == DType::kBFloat16 ? bf16_rn(z) : f16_rn(z);
        std::memcpy(&logits[i * 2], &half, 2);
      }
    }
    std::vector<float> t(rows), tp(rows), mp(rows);
    std::vector<std::int64_t> tk(rows), s(rows), id(rows), at(rows);
    std::vector<std::uint8_t> g(rows);
    const bool cuts = !only_share && random() % 5 != 0, counts = cuts && random() % 2 == 0;
    const bool shares = only_share || (cuts && random() % 2 == 0);
    for (std::int64_t i = 0; i < rows; ++i) {
      t[i] = pick(0.3f, 0.7f, 1.0f, 1.5f);
      tp[i] = shares ? pick(0.1f, 0.5f, 0.9f, 0.95f, 1.0f) : 1.0f;
      mp[i] = cuts ? pick(0.0f, 0.0f, 0.001f, 0.1f, 1.0f) : 0.0f;
      tk[i] = counts ? pick(std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{50}, std::int64_t{600},
                            vocab + 3)
                     : 0;
      s[i] = static_cast<std::int64_t>(random()) << random() % 30;
      id[i] = random();
      at[i] = random() % 40 == 0 ? -1 : static_cast<std::int64_t>(random() % 100000);
      g[i] = random() % 10 == 0;
      if (random() % 40 == 0) t[i] = -1.0f;
    }
    temperature = bytes_of(t), top_p = bytes_of(tp), min_p = bytes_of(mp), top_k = bytes_of(tk);
    seed = bytes_of(s), sample_id = bytes_of(id), position = bytes_of(at), greedy = bytes_of(g);
    p.temperature.stride = p.top_p.stride = p.min_p.stride = p.top_k.stride = 1;
    p.seed.stride = p.sample_id.stride = p.position.stride = p.greedy_stride = 1;
    p.top_k.dtype = p.seed.dtype = p.sample_id.dtype = p.position.dtype = DType::kInt64;
    // One value for all rows selects other launches than an array.
    if (!counts || random() % 2 == 0) p.top_k.value = counts ? tk[0] : 0, top_k.clear();
    if (!shares || random() % 2 == 0) p.top_p.value = tp[0], top_p.clear();
    if (!cuts || random() % 2 == 0) p.min_p.value = mp[0], min_p.clear();
    if (random() % 2 == 0) p.temperature.value = 0.8f, temperature.clear();
    if (only_share || random() % 2 == 0) greedy.clear();
    if (random() % 3 == 0) {
      p.allowed_stride = (vocab + 31) / 32;
      std::vector<std::int32_t> words(rows * p.allowed_stride);
      for (auto& w : words) w = static_cast<std::int32_t>(random() | random());
      allowed = bytes_of(words);
    }
    p.n_logprobs = !only_share && random() % 3 == 0 ? std::min<std::int64_t>(p.valid_vocab, pick(1, 5, 20)) : 0;
    const bool wants_raw = random() % 2 == 0, wants_kept = random() % 4 != 0;
    p.kept_capacity = !wants_kept ? 0 : random() % 4 == 0 ? rows * vocab / 3 : rows * vocab;
    Outputs o;
    ids = o.take(8 * rows), status = o.take(4 * rows), logprob = o.take(4 * rows);
    raw = wants_raw ? o.take(4 * rows) : -1;
    top = p.n_logprobs > 0 ? o.take(8 * rows * p.n_logprobs) : -1;
    top_logprobs = p.n_logprobs > 0 ? o.take(4 * rows * p.n_logprobs) : -1;
    raw_top = p.n_logprobs > 0 && wants_raw ? o.take(8 * rows * p.n_logprobs) : -1;
    raw_top_logprobs = raw_top >= 0 ? o.take(4 * rows * p.n_logprobs) : -1;
    kept = wants_kept ? o.take(4 * p.kept_capacity) : -1;
    offsets = wants_kept ? o.take(8 * (rows + 1)) : -1;
    output_bytes = o.used;
  }

  // The call with its inputs and outputs in the given memory; at(bytes) places an input there.
  template <class Place>
  SampleParams placed(unsigned char* out, Place at) const {
    SampleParams q = p;
    q.logits = at(logits);
    q.allowed = reinterpret_cast<const std::int32_t*>(at(allowed));
    q.temperature.data = reinterpret_cast<const float*>(at(temperature));
    q.top_p.data = reinterpret_cast<const float*>(at(top_p));
    q.min_p.data = reinterpret_cast<const float*>(at(min_p));
    q.top_k.data = at(top_k);
    q.seed.data = at(seed), q.sample_id.data = at(sample_id), q.position.data = at(position);
    q.is_greedy = at(greedy);
    const auto to = [&](auto** field, std::int64_t from) {
      *field = from < 0 ? nullptr : reinterpret_cast<std::remove_reference_t<decltype(*field)>>(out + from);
    };
    to(&q.ids, ids), to(&q.status, status), to(&q.logprob, logprob), to(&q.raw_logprob, raw);
    to(&q.top_ids, top), to(&q.top_logprobs, top_logprobs);
    to(&q.raw_top_ids, raw_top), to(&q.raw_top_logprobs, raw_top_logprobs);
    to(&q.kept_ids, kept), to(&q.kept_offsets, offsets);
    return q;
  }
};

// The number of architectures whose outputs differ from the CPU's.
int run_case(unsigned seed) {
  const Call call(seed);
  Bytes want(static_cast<std::size_t>(call.output_bytes), kCanary);
  cpu::sample(call.placed(want.data(), [](const Bytes& b) { return b.empty() ? nullptr : b.data(); }));
  std::vector<OnDevice*> inputs;
  const auto put = [&](const Bytes& b) -> const unsigned char* {
    if (b.empty()) return nullptr;
    inputs.push_back(new OnDevice(b));
    return static_cast<const unsigned char*>(inputs.back()->data);
  };
  OnDevice out(Bytes(want.size(), kCanary));
  SampleParams p = call.placed(static_cast<unsigned char*>(out.data), put);
  OnDevice workspace(Bytes(static_cast<std::size_t>(sample_workspace(p).bytes), 0xff));
  p.workspace = workspace.data;
  int differ = 0;
  for (const int arch : {90, 80}) {
    check(cudaMemset(out.data, kCanary, out.size), "memset");
    check(cudaMemset(workspace.data, 0xff, workspace.size), "memset");
    arch == 90 ? sm90::sample(p, nullptr) : sm80::sample(p, nullptr);
    check(cudaDeviceSynchronize(), "sample");
    const Bytes got = out.host();
    if (got == want) continue;
    ++differ;
    std::size_t at = 0;
    while (got[at] == want[at]) ++at;
    std::printf("call %u, sm_%d: byte %zu differs\n", seed, arch, at);
  }
  for (OnDevice* input : inputs) delete input;
  return differ;
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return cuda::kSkipped;
  const char* const asked = std::getenv("RLK_SAMPLE_PLAN_CASES");
  const int cases = asked == nullptr ? 400 : std::atoi(asked);
  int differ = 0;
  for (int i = 0; i < cases; ++i) differ += cuda::run_case(static_cast<unsigned>(i));
  std::printf("%d of %d calls differ\n", differ, 2 * cases);
  return differ != 0;
}
