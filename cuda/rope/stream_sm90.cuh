// rope for many tokens, on SM90. TMA copies a token's queries, keys and angles to a ring in shared memory, and copies
// the results back. A block is persistent. One warp loads and stores tokens, and the other warps rotate them in place,
// in shared memory. A token in the ring occupies no registers, so many tokens can be in flight. Columns that are not
// rotated are copied without a change.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../common/mbarrier_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "rotate.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// The shape of a launch: the fields of RopeStages, and how the rotating threads share the heads. A thread rotates two
// vec8s in every `lanes`-th head.
struct RopeStream {
  std::int32_t q_bytes, k_bytes, row_bytes, bytes, stages;
  std::int32_t units, lanes, warps;  // pairs of vec8s per head; heads rotated at a time; rotating warps

  explicit RopeStream(const RopeParams& p) {
    const RopeStages s(p);
    q_bytes = static_cast<std::int32_t>(s.q_bytes);
    k_bytes = static_cast<std::int32_t>(s.k_bytes);
    row_bytes = static_cast<std::int32_t>(s.row_bytes);
    bytes = static_cast<std::int32_t>(s.bytes);
    stages = static_cast<std::int32_t>(s.stages);
    units = static_cast<std::int32_t>(p.rotary_dim / (2 * kRopeVec8));
    const std::int32_t heads = static_cast<std::int32_t>(p.q.num_heads + p.k.num_heads), fit = kStreamThreads / units;
    const std::int32_t turns = (heads + fit - 1) / fit;
    lanes = (heads + turns - 1) / turns;
    warps = (lanes * units + 31) / 32;
  }
  int shared_bytes() const { return 128 + stages * (bytes + kControlBytes); }

  // A stage has two barriers, "loaded" and "rotated", and bits that say which rows of angles exist.
  static constexpr int kControlBytes = 24;
};

// The angles of a token, from a stage in shared memory.
struct StageAngles {
  const RopeParams& p;
  const unsigned char* memory;  // a row of cos for each section, then rows of sin
  int exist;                    // bit s: whether section s has angles for the token's position

  __device__ __forceinline__ const void* cos() const { return memory; }
  __device__ __forceinline__ const void* sin() const {
    return memory + p.num_sections * p.width * (p.angle_dtype == DType::kFloat32 ? 4 : 2);
  }
  __device__ __forceinline__ RopeRows rows_of_pair(int pair) const {
    const int section = rope_section(p, pair);
    RopeRows rows;
    rows.exist = exist >> section & 1;
    rows.cos = rows.sin = section * p.width;
    return rows;
  }
};

class StreamMemory {
 public:
  __device__ __forceinline__ StreamMemory(unsigned char* memory, const RopeStream& s)
      : memory_(memory), control_(shared_address(memory) + s.stages * s.bytes), s_(s) {}
  __device__ __forceinline__ unsigned char* stage(int i) const { return memory_ + i * s_.bytes; }
  __device__ __forceinline__ std::uint32_t loaded(int i) const { return control_ + i * 8; }
  __device__ __forceinline__ std::uint32_t rotated(int i) const { return loaded(s_.stages + i); }
  __device__ __forceinline__ int* exist(int i) const {
    return reinterpret_cast<int*>(memory_ + s_.stages * (s_.bytes + 16)) + i;
  }

 private:
  unsigned char* memory_;
  std::uint32_t control_;
  const RopeStream& s_;
};

// The loads and stores of tokens. One lane of the first warp executes them.
template <class T>
class StreamCopies {
 public:
  __device__ __forceinline__ StreamCopies(const RopeParams& p, const RopeStream& s, const StreamMemory& memory)
      : p_(p), s_(s), memory_(memory), passes_(tma_policy(false)) {}

  __device__ __forceinline__ void run() {
    const unsigned tokens = static_cast<unsigned>(p_.num_tokens), step = gridDim.x;
    const unsigned ahead = (s_.stages - RopeStages::kWrites) * step;
    read_ids(blockIdx.x);
    unsigned next = blockIdx.x;
    for (int i = 0; i < s_.stages - RopeStages::kWrites && next < tokens; ++i, next += step) load(next);
    RingPosition done;
    for (unsigned token = blockIdx.x; token < tokens; token += step) {
      mbarrier_wait_block(memory_.rotated(done.stage), done.phase);
      store(token, done.stage);
      done.advance(s_.stages);
      if (token + ahead < tokens) {
        wait_for_stored_boxes<RopeStages::kWrites>();  // the stage that load() fills has been read by its store
        load(token + ahead);
      }
    }
    wait_for_stored_boxes<0>();
  }

 private:
  // Starts to read the position ids of a token. The ids arrive while earlier tokens are copied.
  __device__ __forceinline__ void read_ids(unsigned token) {
    if (token >= p_.num_tokens) return;
    const RopeToken at(p_, token);
#pragma unroll
    for (int section = 0; section < 3; ++section) {
      if (section < p_.num_sections) ids_[section] = position_of(p_, at, section);
    }
  }
  __device__ __forceinline__ void load(unsigned token) {
    const RopeToken at(p_, token);
    const std::uint32_t barrier = memory_.loaded(to_.stage);
    std::uint32_t to = shared_address(memory_.stage(to_.stage));
    const auto* cos = static_cast<const unsigned char*>(p_.cos.data);
    const auto* sin = static_cast<const unsigned char*>(p_.sin.data);
    const int angle_bytes = p_.angle_dtype == DType::kFloat32 ? 4 : 2;
    RopeRows rows[3];
    int exist = 0;
#pragma unroll
    for (int section = 0; section < 3; ++section) {
      if (section >= p_.num_sections) break;
      rows[section] = RopeRows(p_, at, section, ids_[section]);
      exist |= rows[section].exist << section;
    }
    *memory_.exist(to_.stage) = exist;
    mbarrier_arrive_expect(barrier, s_.q_bytes + s_.k_bytes + 2 * __popc(exist) * s_.row_bytes);
    copy_in(p_.q, at, s_.q_bytes, &to, barrier);
    copy_in(p_.k, at, s_.k_bytes, &to, barrier);
#pragma unroll
    for (int section = 0; section < 3; ++section) {
      if (section >= p_.num_sections) break;
      const std::uint32_t row = to + section * s_.row_bytes;
      if (!rows[section].exist) continue;
      load_bytes(row, cos + rows[section].cos * angle_bytes, s_.row_bytes, barrier);
      load_bytes(row + p_.num_sections * s_.row_bytes, sin + rows[section].sin * angle_bytes, s_.row_bytes, barrier);
    }
    to_.advance(s_.stages);
    read_ids(token + gridDim.x);
  }
  __device__ __forceinline__ void copy_in(const RopeHeads& heads, const RopeToken& at, int bytes, std::uint32_t* to,
                                          std::uint32_t barrier) const {
    if (bytes == 0) return;
    load_bytes(*to, static_cast<const typename T::Storage*>(heads.x) + at.offset(heads.x_tokens), bytes, barrier,
               passes_);
    *to += bytes;
  }
  __device__ __forceinline__ void store(unsigned token, int stage) const {
    const RopeToken at(p_, token);
    std::uint32_t from = shared_address(memory_.stage(stage));
    const auto copy_out = [&](const RopeHeads& heads, int bytes) {
      if (bytes == 0) return;
      copy_bytes(static_cast<typename T::Storage*>(heads.y) + at.offset(heads.y_tokens), from, bytes, passes_);
      from += bytes;
    };
    copy_out(p_.q, s_.q_bytes);
    copy_out(p_.k, s_.k_bytes);
    commit_copies();
  }

  const RopeParams& p_;
  const RopeStream& s_;
  const StreamMemory& memory_;
  const std::uint64_t passes_;
  std::int64_t ids_[3];
  RingPosition to_;
};

template <class T, class Angles>
__global__ void __launch_bounds__(kStreamThreads + 32, RopeStages::kBlocks)
    rope_stream_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeStream s) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* const base = unaligned + (128 - shared_address(unaligned) % 128) % 128;
  const StreamMemory memory(base, s);
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.stages; ++i) {
      mbarrier_init(memory.loaded(i), 1);
      mbarrier_init(memory.rotated(i), s.warps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == s.warps) {
    if (threadIdx.x % 32 == 0) StreamCopies<T>(p, s, memory).run();
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) / s.units, unit = static_cast<int>(threadIdx.x) - lane * s.units;
  const int heads = static_cast<int>(p.q.num_heads + p.k.num_heads), head_dim = static_cast<int>(p.head_dim);
  const int column_a = unit * kVec8, column_b = column_a + static_cast<int>(p.rotary_dim) / 2;
  constexpr int kTurns = T::kPacked ? 2 : 1;  // heads at once: two heads of float32 would spill
  RingPosition at;
  for (unsigned token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    mbarrier_wait_block(memory.loaded(at.stage), at.phase);
    unsigned char* const stage = memory.stage(at.stage);
    if (lane < s.lanes) {
      Angles angles;
      angles.load(p, StageAngles{p, stage + s.q_bytes + s.k_bytes, *memory.exist(at.stage)}, column_a, column_b);
      auto* const data = reinterpret_cast<typename T::Storage*>(stage);
#pragma unroll kTurns
      for (int head = lane; head < heads; head += s.lanes) {
        typename T::Storage* const x = data + head * head_dim;
        Vec8<T> a = load_vec8<T>(x + column_a), b = load_vec8<T>(x + column_b);
        rotate_vec8s<T>(p, angles, &a, &b);
        put_vec8<T>(x + column_a, a);
        put_vec8<T>(x + column_b, b);
      }
    }
    fence_for_tma();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.rotated(at.stage));
    at.advance(s.stages);
  }
}

inline void stream_rope(const RopeParams& p, cudaStream_t stream) {
  const RopeStream s(p);
  const std::int64_t blocks =
      std::min<std::int64_t>(p.num_tokens, RopeStages::kBlocks * multiprocessors(current_device()));
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    with_angles<T>(p, [&](auto angles) {
      constexpr auto kKernel = rope_stream_kernel<T, decltype(angles)>;
      allow_shared_memory<kKernel>();
      launch_dependent<true>(kKernel, static_cast<int>(blocks), (s.warps + 1) * 32, s.shared_bytes(), stream, p, s);
    });
  });
}

}  // namespace
}  // namespace rlk::cuda
