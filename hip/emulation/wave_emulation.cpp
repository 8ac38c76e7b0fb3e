// The fibers, their scheduler, and the operations that the lanes of a wave perform together.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "hip/common/wave.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace rlk::hip {
namespace {

using emulation::Launch;
using emulation::Order;

enum class Meeting { kShuffle, kBallot, kWaveBarrier, kBlockBarrier, kMfma32, kMfma16, kEnd };

const char* name_of(Meeting m) {
  constexpr const char* kNames[] = {"shuffle_xor",  "ballot",        "wave_barrier",    "block_barrier",
                                    "mfma_32x32x8", "mfma_16x16x16", "the kernel's end"};
  return kNames[static_cast<int>(m)];
}

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackBytes = 256 << 10;
#else
constexpr std::size_t kStackBytes = 64 << 10;
#endif

#if defined(__x86_64__)
// A suspended fiber is represented by its stack pointer. The top of its stack holds the callee-saved registers. The
// functions of ucontext are not used, because they make two system calls per switch. With these functions, an exception
// under the address sanitizer would also clear the shadow of a whole stack.
struct Context {
  void* top = nullptr;
};

// Suspends the running stack into `from` and resumes `to`.
[[gnu::naked, gnu::noinline]] void switch_context([[maybe_unused]] Context& from, [[maybe_unused]] const Context& to) {
  asm(R"(
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret)");
}

// Sets `context` to start `entry` on an empty stack. `entry` never returns.
void begin_context(Context& context, unsigned char* stack, std::size_t bytes, void (*entry)()) {
  auto end = reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t{15};
  // words: six registers, the address of `entry`, and a return address of null
  auto* words = reinterpret_cast<void**>(end) - 8;
  std::fill_n(words, 8, nullptr);
  words[6] = reinterpret_cast<void*>(entry);
  context.top = words;
}
#else
struct Context {
  ucontext_t context;
};

void switch_context(Context& from, const Context& to) { swapcontext(&from.context, &to.context); }

void begin_context(Context& context, unsigned char* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = bytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}
#endif

struct Lane {
  Context context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  int thread = 0;  // index of the lane's thread in its block
  // The operation at which the lane waits.
  Meeting meeting = Meeting::kEnd;
  SourceLocation here;
  std::int32_t value = 0;  // operand, and later result, of a shuffle or a ballot
  int mask = 0;
  std::uint64_t votes = 0;
  DType type = DType::kBFloat16;
  std::uint16_t a[4] = {}, b[4] = {};
  float c[16] = {};
};

// Lanes that no launch uses at the moment. The pool keeps them, because allocating new stacks would take most of the
// time of a small launch.
class Pool {
 public:
  std::unique_ptr<Lane> take() {
    const std::lock_guard lock(mutex_);
    if (lanes_.empty()) return std::make_unique<Lane>();
    auto lane = std::move(lanes_.back());
    lanes_.pop_back();
    return lane;
  }
  void give(std::unique_ptr<Lane> lane) {
    const std::lock_guard lock(mutex_);
    lanes_.push_back(std::move(lane));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

// The state of a host thread, which runs one block at a time.
struct Block {
  const Launch* launch = nullptr;
  const std::function<void()>* kernel = nullptr;
  Context scheduler;
  std::vector<std::unique_ptr<Lane>> lanes;
  Lane* running = nullptr;
  int x = 0, y = 0;
  std::unique_ptr<unsigned char[]> lds;
  const void* scheduler_stack = nullptr;
  std::size_t scheduler_stack_bytes = 0;
};
thread_local Block* block_ = nullptr;

// Switches stacks, and announces both stacks to the address sanitizer.
void enter_lane(Block& b, Lane& lane) {
  b.running = &lane;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, lane.stack.get(), kStackBytes);
#endif
  switch_context(b.scheduler, lane.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}
void leave_lane(Block& b, bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  if (ends) __asan_handle_no_return();  // clears the shadow of this stack, which the next lane uses again
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, b.scheduler_stack, b.scheduler_stack_bytes);
#endif
  switch_context(b.running->context, b.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void run_lane() {
  Block& b = *block_;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &b.scheduler_stack, &b.scheduler_stack_bytes);
#endif
  (*b.kernel)();
  b.running->meeting = Meeting::kEnd;
  b.running->here = {};
  leave_lane(b, true);
}

Lane& meet(Meeting meeting, SourceLocation here) {
  Lane& lane = *block_->running;
  lane.meeting = meeting;
  lane.here = here;
  leave_lane(*block_, false);
  return lane;
}

[[noreturn]] void part_ways(const Block& b, const Lane& one, const Lane& other) {
  const auto print = [](const Lane& lane) {
    std::fprintf(stderr, "  thread %d: %s at %s:%u\n", lane.thread, name_of(lane.meeting), lane.here.file_name(),
                 static_cast<unsigned>(lane.here.line()));
  };
  std::fprintf(stderr, "hip emulation: lanes part ways in block (%d, %d)\n", b.x, b.y);
  print(one);
  print(other);
  std::abort();
}

bool same_place(const Lane& a, const Lane& b) {
  return a.meeting == b.meeting && a.here.line() == b.here.line() && a.here.column() == b.here.column() &&
         (a.here.file_name() == b.here.file_name() || std::strcmp(a.here.file_name(), b.here.file_name()) == 0);
}

using Wave = Lane* const*;  // pointers to the kWave lanes of a wave

// Performs a matrix instruction of one of two shapes. Each shape has its own layout of values over lanes. Each output
// adds its products in ascending k, in groups of the size that the matrix unit has.
template <int kSize, int kK>
void multiply(const Block& b, Wave lanes) {
  constexpr int kOutputs = kSize * kSize / kWave;
  thread_local std::uint16_t row[kK], column[kK];
  thread_local float d[kWave][kOutputs];
  for (int lane = 0; lane < kWave; ++lane) {
    for (int i = 0; i < kOutputs; ++i) {
      const int m = kSize == 32 ? 8 * (i / 4) + 4 * (lane / 32) + i % 4 : 4 * (lane / 16) + i, n = lane % kSize;
      for (int k = 0; k < kK; ++k) {
        row[k] = lanes[k / 4 * kSize + m]->a[k % 4];
        column[k] = lanes[k / 4 * kSize + n]->b[k % 4];
      }
      const DType t = lanes[0]->type;
      float sum = lanes[lane]->c[i];
      if (b.launch->unit == MmaUnit::kGfx942) {
        for (int k = 0; k < kK; k += 8) sum = gfx942_mma_group(sum, row + k, column + k, t);
      } else {
        sum = abs_of(sum) < 0x1p-126f ? 0.0f : sum;
        for (int k = 0; k < kK; k += 4) sum = gfx90a_mma_group(sum, row + k, column + k, t);
      }
      d[lane][i] = sum;
    }
  }
  for (int lane = 0; lane < kWave; ++lane) std::copy_n(d[lane], kOutputs, lanes[lane]->c);
}

// Performs an operation of a wave, after all lanes of the wave have reached the same operation.
void perform(const Block& b, Wave lanes) {
  std::int32_t value[kWave];
  std::uint64_t votes = 0;
  for (int i = 0; i < kWave; ++i) {
    value[i] = lanes[i]->value;
    votes |= std::uint64_t{lanes[i]->value != 0} << i;
  }
  switch (lanes[0]->meeting) {
    case Meeting::kShuffle:
      for (int i = 0; i < kWave; ++i) lanes[i]->value = value[(i ^ lanes[i]->mask) % kWave];
      break;
    case Meeting::kBallot:
      for (int i = 0; i < kWave; ++i) lanes[i]->votes = votes;
      break;
    case Meeting::kMfma32:
      multiply<32, 8>(b, lanes);
      break;
    case Meeting::kMfma16:
      multiply<16, 16>(b, lanes);
      break;
    default:
      break;
  }
}

std::vector<int> ordered(int count, Order order, std::mt19937& random) {
  std::vector<int> indices(count);
  std::iota(indices.begin(), indices.end(), 0);
  if (order == Order::kBackward) std::reverse(indices.begin(), indices.end());
  if (order == Order::kShuffled) std::shuffle(indices.begin(), indices.end(), random);
  return indices;
}

// Runs a wave until its lanes wait at a block barrier or have ended.
void run_wave(Block& b, Wave lanes, std::mt19937& random) {
  for (;;) {
    for (int i : ordered(kWave, b.launch->order, random)) enter_lane(b, *lanes[i]);
    for (int i = 1; i < kWave; ++i) {
      if (!same_place(*lanes[0], *lanes[i])) part_ways(b, *lanes[0], *lanes[i]);
    }
    if (lanes[0]->meeting == Meeting::kBlockBarrier || lanes[0]->meeting == Meeting::kEnd) return;
    perform(b, lanes);
  }
}

void run_block(Block& b, std::mt19937& random) {
  // Every word of LDS starts as a NaN. LDS has exactly the requested size, so that the address sanitizer finds accesses
  // beyond it.
  b.lds.reset(new unsigned char[b.launch->lds_bytes]);
  std::memset(b.lds.get(), 0xff, b.launch->lds_bytes);
  std::vector<Lane*> lanes;
  for (auto& lane : b.lanes) {
    begin_context(lane->context, lane->stack.get(), kStackBytes, run_lane);
    lanes.push_back(lane.get());
  }
  const int waves = b.launch->threads / kWave;
  do {
    for (int wave : ordered(waves, b.launch->order, random)) run_wave(b, lanes.data() + wave * kWave, random);
    for (Lane* lane : lanes) {
      if (!same_place(*lanes[0], *lane)) part_ways(b, *lanes[0], *lane);
    }
  } while (lanes[0]->meeting != Meeting::kEnd);
}

}  // namespace

int thread_id() { return block_->running->thread; }
int block_id_x() { return block_->x; }
int block_id_y() { return block_->y; }
unsigned char* lds() { return block_->lds.get(); }
void atomic_or(std::uint32_t* word, std::uint32_t bits) { *word |= bits; }  // a block's lanes share a host thread

std::int32_t shuffle_xor(std::int32_t value, int mask, SourceLocation here) {
  block_->running->value = value;
  block_->running->mask = mask;
  return meet(Meeting::kShuffle, here).value;
}
std::uint64_t ballot(bool value, SourceLocation here) {
  block_->running->value = value;
  return meet(Meeting::kBallot, here).votes;
}
void wave_barrier(SourceLocation here) { meet(Meeting::kWaveBarrier, here); }
void block_barrier(SourceLocation here) { meet(Meeting::kBlockBarrier, here); }

namespace {

template <class Operand, int kOutputs>
Accumulator<kOutputs> mfma(Meeting meeting, DType type, const Operand& a, const Operand& b,
                           const Accumulator<kOutputs>& c, SourceLocation here) {
  Lane& lane = *block_->running;
  lane.type = type;
  std::copy_n(a.v, 4, lane.a);
  std::copy_n(b.v, 4, lane.b);
  std::copy_n(c.v, kOutputs, lane.c);
  meet(meeting, here);
  Accumulator<kOutputs> d;
  std::copy_n(lane.c, kOutputs, d.v);
  return d;
}

}  // namespace

Accumulator<16> mfma_32x32x8(Fp16x4 a, Fp16x4 b, Accumulator<16> c, SourceLocation here) {
  return mfma(Meeting::kMfma32, DType::kFloat16, a, b, c, here);
}
Accumulator<16> mfma_32x32x8(Bf16x4 a, Bf16x4 b, Accumulator<16> c, SourceLocation here) {
  return mfma(Meeting::kMfma32, DType::kBFloat16, a, b, c, here);
}
Accumulator<4> mfma_16x16x16(Fp16x4 a, Fp16x4 b, Accumulator<4> c, SourceLocation here) {
  return mfma(Meeting::kMfma16, DType::kFloat16, a, b, c, here);
}
Accumulator<4> mfma_16x16x16(Bf16x4 a, Bf16x4 b, Accumulator<4> c, SourceLocation here) {
  return mfma(Meeting::kMfma16, DType::kBFloat16, a, b, c, here);
}

namespace emulation {

void launch(const Launch& how, const std::function<void()>& kernel) {
  if (how.threads <= 0 || how.threads % kWave != 0 || how.threads > 1024) {
    std::fprintf(stderr, "hip emulation: a block of %d threads; want whole waves, up to 1024\n", how.threads);
    std::abort();
  }
  static Pool pool;
  const std::int64_t blocks = std::int64_t{how.blocks_x} * how.blocks_y;
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    Block b;
    b.launch = &how;
    b.kernel = &kernel;
    for (int i = 0; i < how.threads; ++i) {
      b.lanes.push_back(pool.take());
      b.lanes.back()->thread = i;
    }
    block_ = &b;
    for (std::int64_t i; (i = next.fetch_add(1)) < blocks;) {
      b.x = static_cast<int>(i % how.blocks_x);
      b.y = static_cast<int>(i / how.blocks_x);
      std::mt19937 random(static_cast<unsigned>(i));
      run_block(b, random);
    }
    block_ = nullptr;
    for (auto& lane : b.lanes) pool.give(std::move(lane));
  };
  std::vector<std::thread> others;
  for (int i = 1; i < how.host_threads && i < blocks; ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
}

}  // namespace emulation
}  // namespace rlk::hip
