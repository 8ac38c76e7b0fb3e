// Tests the body of sample's cluster kernel (cuda/sample/cluster_row.h) against the CPU's bytes. The 2,048 threads of a
// cluster are fibers, in an order that changes at every barrier. Results go to the CPU's places.
#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/sample/cluster_row.h"
#include "rlk/kernels/sample_check.h"
#include "rlk/kernels/sample_kept.h"
#include "rlk/math/half.h"

namespace {

using rlk::Exp;
using rlk::kNumParts;
using rlk::SampleParams;

// ---- a cluster of eight teams ----

constexpr int kTeam = rlk::kMaxTeam, kThreads = kNumParts * kTeam, kWarp = 32;
constexpr std::size_t kStackBytes = 64 << 10, kSharedBytes = 256 << 10;

enum class Waits { kNot, kForWarp, kForTeam, kForCluster, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  Waits waits = Waits::kDone;
  std::uint64_t value = 0;  // given to its neighbours
};

class Cluster {
 public:
  Cluster() : fibers_(kThreads), shared_(kNumParts * kSharedBytes) { running_ = this; }

  static Cluster& now() { return *running_; }
  int thread() const { return current_; }
  std::uint64_t value_of(int thread) const { return fibers_[static_cast<std::size_t>(thread)].value; }
  void give(std::uint64_t value) { fiber(current_).value = value; }
  unsigned char* shared(int team) { return shared_.data() + static_cast<std::size_t>(team) * kSharedBytes; }

  void wait(Waits what) {
    fiber(current_).waits = what;
    swapcontext(&fiber(current_).context, &scheduler_);
  }
  // Runs `body` by every thread. Returns whether all of them ended, and none waits for one that never comes.
  bool run(std::function<void()> body) {
    body_ = std::move(body);
    std::memset(shared_.data(), 0xa5, shared_.size());
    for (int i = 0; i < kThreads; ++i) {
      Fiber& f = fiber(i);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = kStackBytes;
      f.context.uc_link = &scheduler_;
      makecontext(
          &f.context, [] { now().enter(); }, 0);
      f.waits = Waits::kNot;
    }
    std::vector<int> order(kThreads);
    std::iota(order.begin(), order.end(), 0);
    for (;;) {
      std::shuffle(order.begin(), order.end(), random_);
      bool ran = false;
      for (const int i : order) {
        if (fiber(i).waits != Waits::kNot) continue;
        current_ = i;
        ran = true;
        swapcontext(&scheduler_, &fiber(i).context);
      }
      const bool released =
          release(kWarp, Waits::kForWarp) | release(kTeam, Waits::kForTeam) | release(kThreads, Waits::kForCluster);
      if (!ran && !released) break;
    }
    return std::ranges::all_of(fibers_, [](const Fiber& f) { return f.waits == Waits::kDone; });
  }

 private:
  Fiber& fiber(int i) { return fibers_[static_cast<std::size_t>(i)]; }
  void enter() {
    body_();
    fiber(current_).waits = Waits::kDone;
  }
  // Lets groups of `size` neighbours go on whose threads all wait for each other, or have ended.
  bool release(int size, Waits what) {
    bool any = false;
    for (int first = 0; first < kThreads; first += size) {
      int waiting = 0, done = 0;
      for (int i = first; i < first + size; ++i) {
        waiting += fiber(i).waits == what ? 1 : 0;
        done += fiber(i).waits == Waits::kDone ? 1 : 0;
      }
      if (waiting == 0 || waiting + done != size) continue;
      any = true;
      for (int i = first; i < first + size; ++i) {
        if (fiber(i).waits == what) fiber(i).waits = Waits::kNot;
      }
    }
    return any;
  }

  static inline Cluster* running_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<unsigned char> shared_;
  std::function<void()> body_;
  ucontext_t scheduler_;
  std::mt19937 random_{1};
  int current_ = 0;
};

struct Team {
  using Memory = rlk::PlainMemory;
  static constexpr int kLanes = 8, kAhead = 8;
  static int thread() { return Cluster::now().thread() % kTeam; }
  static constexpr int threads() { return kTeam; }
  static int rank() { return Cluster::now().thread() / kTeam; }
  static void barrier() { Cluster::now().wait(Waits::kForTeam); }
  static void cluster_barrier() { Cluster::now().wait(Waits::kForCluster); }
  static std::uint32_t shuffle_xor(std::uint32_t x, int distance) {
    Cluster& cluster = Cluster::now();
    const int from = cluster.thread() ^ distance;
    cluster.give(x);
    cluster.wait(Waits::kForWarp);
    const auto got = static_cast<std::uint32_t>(cluster.value_of(from));
    cluster.wait(Waits::kForWarp);
    return got;
  }
  static std::int32_t shuffle_xor(std::int32_t x, int distance) {
    return static_cast<std::int32_t>(shuffle_xor(static_cast<std::uint32_t>(x), distance));
  }
  static float shuffle_xor(float x, int distance) { return rlk::float_of(shuffle_xor(rlk::bits_of(x), distance)); }
  template <class N>
  static void add(N* to, N x) {
    *to += x;
  }
  static std::uint32_t take(std::uint32_t* counter) { return (*counter)++; }
  static std::uint32_t sum(std::uint32_t x, std::uint32_t* scratch) {
    for (int d = 1; d < kWarp; d *= 2) x += shuffle_xor(x, d);
    scratch[thread() / kWarp] = x;
    barrier();
    const std::uint32_t all = std::accumulate(scratch, scratch + kTeam / kWarp, 0u);
    barrier();
    return all;
  }
  template <class X>
  static X* peer(X* pointer, int of_rank) {
    const auto offset = reinterpret_cast<unsigned char*>(pointer) - Cluster::now().shared(rank());
    EXPECT_TRUE(offset >= 0 && offset < static_cast<std::ptrdiff_t>(kSharedBytes));
    return reinterpret_cast<X*>(Cluster::now().shared(of_rank) + offset);
  }
  template <Exp kExp>
  static float exponential(float z, float c, float m) {
    return rlk::stat_exp_portable(z, c, rlk::sub_rn(rlk::kStatsShift, m));
  }
  template <class P>
  static P* global(P* pointer) {
    return pointer;
  }
  template <class N>
  static N own(N x) {
    return x;
  }
};
struct Alone {  // for the kept sets
  static constexpr int thread() { return 0; }
  static constexpr int threads() { return 1; }
  static void barrier() {}
  template <class P>
  static P* global(P* pointer) {
    return pointer;
  }
};
struct Fp32 {
  using Storage = float;
  static float load(Storage s) { return s; }
};
struct Bf16 {
  using Storage = std::uint16_t;
  static float load(Storage s) { return rlk::float_of_bf16(s); }
};

// A part of a block's shared memory: the object, its nodes, and the logits.
constexpr std::size_t kNodesAt = 32 << 10, kLogitsAt = 64 << 10;

template <class T>
void run_row(Cluster* cluster, const SampleParams& p, std::int64_t row, std::uint32_t* mask, bool takes_raw) {
  using Storage = typename T::Storage;
  const auto* whole = static_cast<const Storage*>(p.logits) + row * p.logits_stride;
  std::vector<SampleParams> params(kNumParts, p);
  const auto body = [&] {
    const int part = Team::rank();
    unsigned char* const shared = cluster->shared(part);
    auto* const logits = reinterpret_cast<Storage*>(shared + kLogitsAt);
    const std::int64_t first = rlk::part_cut(p.vocab_size, part);
    const std::int64_t end = std::min(rlk::part_cut(p.vocab_size, part + 1), p.valid_vocab);
    if (Team::thread() == 0) {
      std::copy(whole + first, whole + std::max(first, end), logits);
      params[static_cast<std::size_t>(part)].logits = logits;
      params[static_cast<std::size_t>(part)].logits_stride = 0;
    }
    Team::barrier();
    rlk::ClusterRow<Team, T, Exp::kPortable>(Team(), params[static_cast<std::size_t>(part)], row,
                                             reinterpret_cast<rlk::ClusterShared*>(shared), whole, mask,
                                             reinterpret_cast<float*>(shared + kNodesAt))
        .run(takes_raw, [] { Team::cluster_barrier(); });
  };
  EXPECT_TRUE(cluster->run(body)) << "threads wait for one that never comes";
}

// ---- cases ----

constexpr std::int64_t kRows = 2;

struct Results {
  std::vector<std::int64_t> ids = std::vector<std::int64_t>(kRows), offsets = std::vector<std::int64_t>(kRows + 1);
  std::vector<std::int64_t> top, raw_top;
  std::vector<std::int32_t> status = std::vector<std::int32_t>(kRows), kept;
  std::vector<float> floats;  // logprob, raw_logprob, the n best, the raw n best

  Results(SampleParams* p, bool takes_raw, bool takes_raw_top)
      : kept(static_cast<std::size_t>(kRows * p->vocab_size), -7), floats(kRows * (2 + 2 * 256), -7.0f) {
    const std::int64_t n = p->n_logprobs;
    top.assign(static_cast<std::size_t>(kRows * n), -7);
    raw_top = top;
    p->ids = ids.data();
    p->status = status.data();
    p->logprob = floats.data();
    p->raw_logprob = takes_raw ? floats.data() + kRows : nullptr;
    p->top_ids = n > 0 ? top.data() : nullptr;
    p->top_logprobs = n > 0 ? floats.data() + 2 * kRows : nullptr;
    p->raw_top_ids = n > 0 && takes_raw_top ? raw_top.data() : nullptr;
    p->raw_top_logprobs = n > 0 && takes_raw_top ? floats.data() + 2 * kRows + kRows * n : nullptr;
    p->kept_ids = kept.data();
    p->kept_offsets = offsets.data();
    p->kept_capacity = kRows * p->vocab_size;
  }
  std::string bytes() const {
    std::string all;
    const auto add = [&](const auto& x) {
      all.append(reinterpret_cast<const char*>(x.data()), x.size() * sizeof x[0]);
    };
    add(ids), add(offsets), add(top), add(raw_top), add(status), add(kept), add(floats);
    return all;
  }
};

class SampleClusters : public testing::TestWithParam<int> {
 protected:
  template <class X>
  X any(std::initializer_list<X> of) {
    return *(of.begin() + random_() % of.size());
  }
  std::mt19937 random_{static_cast<unsigned>(GetParam())};
};

TEST_P(SampleClusters, HaveTheBytesOfTheCpu) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer does not follow these fibers";
#endif
  SampleParams p;
  const std::int64_t vocab = any<std::int64_t>({1, 7, 130, 999, 1024, 3001, 8192, 20000, 40961});
  const bool packed = random_() % 3 == 0;
  p.num_rows = kRows;
  p.vocab_size = p.logits_stride = vocab;
  p.valid_vocab = random_() % 3 != 0 ? vocab : 1 + static_cast<std::int64_t>(random_() % static_cast<unsigned>(vocab));
  p.dtype = packed ? rlk::DType::kBFloat16 : rlk::DType::kFloat32;
  std::normal_distribution<float> normal(0.0f, any({0.001f, 1.0f, 4.0f, 100.0f}));
  std::vector<float> z(static_cast<std::size_t>(kRows * vocab));
  for (float& x : z) {
    x = normal(random_);
    if (random_() % 50 == 0) x = -rlk::infinity();
    if (random_() % 40 == 0) x = random_() % 2 == 0 ? 0.0f : -0.0f;
  }
  if (random_() % 12 == 0) z[random_() % z.size()] = rlk::canonical_nan();
  if (random_() % 12 == 0) z[random_() % z.size()] = rlk::infinity();
  if (random_() % 5 == 0) std::ranges::fill(z, any({1.5f, 1.5f, 1.5f, -rlk::infinity()}));  // lists overflow
  std::vector<std::uint16_t> halves;
  for (const float x : z)
    halves.push_back(static_cast<std::uint16_t>(static_cast<std::uint32_t>(rlk::bits_of(x)) >> 16));
  p.logits = packed ? static_cast<const void*>(halves.data()) : z.data();
  p.temperature.value = any({1.0f, 0.7f, 0.01f, 30.0f, 1e-20f});
  p.top_p.value = any({1.0f, 1.0f, 0.9f, 0.5f, 0.999f, 1e-6f});
  p.min_p.value = any({0.0f, 0.0f, 0.05f, 0.5f, 1e-6f, 1.0f});
  p.top_k.value = any<std::int64_t>({0, 0, 1, 5, 50, 300, 401, 2000, 1'000'000'000});
  p.greedy = random_() % 8 == 0;
  p.order = any({rlk::SampleOrder::kVllm, rlk::SampleOrder::kHf, rlk::SampleOrder::kSglang});
  p.seed.value = random_();
  p.position.value = random_();
  p.n_logprobs = std::min(p.valid_vocab, any<std::int64_t>({0, 1, 5, 20, 256}));
  std::vector<std::int32_t> allowed(static_cast<std::size_t>(kRows * ((vocab + 31) / 32)));
  for (std::int32_t& word : allowed) word = random_() % 2 == 0 ? -1 : static_cast<std::int32_t>(random_() & random_());
  if (random_() % 3 == 0) {
    p.allowed = allowed.data();
    p.allowed_stride = (vocab + 31) / 32;
  }
  const bool takes_raw = random_() % 2 == 0, takes_raw_top = takes_raw && random_() % 2 == 0;

  const rlk::Device cpu{rlk::DeviceType::kCpu, 0};
  Results want(&p, takes_raw, takes_raw_top);
  std::vector<std::uint64_t> workspace(static_cast<std::size_t>(sample_workspace_bytes(p, cpu)) / 8 + 2);
  p.workspace = workspace.data();
  sample(p, cpu, rlk::Stream{});

  Results got(&p, takes_raw, takes_raw_top);
  Cluster cluster;
  const std::int64_t words = rlk::sample_mask_words(vocab);
  std::vector<std::uint32_t> masks(static_cast<std::size_t>(kRows * words));
  for (std::int64_t row = 0; row < kRows; ++row) {
    std::uint32_t* const mask = masks.data() + row * words;
    packed ? run_row<Bf16>(&cluster, p, row, mask, takes_raw) : run_row<Fp32>(&cluster, p, row, mask, takes_raw);
  }
  std::uint32_t closed = 0;
  const auto shared = std::make_unique<rlk::SampleShared>();
  offsets_of_counts(Alone(), p, 0, kRows, &closed, shared.get());
  for (std::int64_t row = 0; row < kRows; ++row) {
    write_kept_ids(Alone(), p, row, masks.data() + row * words, shared.get());
  }
  EXPECT_EQ(got.ids, want.ids);
  EXPECT_EQ(got.status, want.status);
  EXPECT_EQ(got.offsets, want.offsets);
  EXPECT_EQ(got.top, want.top);
  EXPECT_TRUE(got.bytes() == want.bytes())
      << "vocab " << vocab << ", valid " << p.valid_vocab << ", top_k " << p.top_k.value << ", top_p " << p.top_p.value
      << ", min_p " << p.min_p.value << ", temperature " << p.temperature.value << ", n " << p.n_logprobs;
}

INSTANTIATE_TEST_SUITE_P(Fuzz, SampleClusters, testing::Range(0, 30));

}  // namespace
