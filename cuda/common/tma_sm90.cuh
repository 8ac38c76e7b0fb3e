// TMA, the tensor memory accelerator of compute capability 9.0. TMA copies boxes of a tensor to the shared memory of
// one or several blocks of a cluster, and back.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rlk::cuda {

// Returns true in one lane of a converged warp. The compiler recognises this choice of a lane. In any other divergent
// branch, the compiler would move every operand of a copy to uniform registers in a loop over lanes.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}

// Returns x, which must be the same in all lanes. The compiler can then keep x in a uniform register.
__device__ __forceinline__ int same_in_warp(int x) { return __shfl_sync(0xffffffff, x, 0); }

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at column x and row y to address `shared`. The bytes that arrive are counted at `barrier`.
__device__ __forceinline__ void load_box(std::uint32_t shared, const CUtensorMap* map, std::int32_t x, std::int32_t y,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// Loads like load_box(), from a tensor of four dimensions: the box begins at column x, `head`, `token` and `sequence`.
__device__ __forceinline__ void load_head_box(std::uint32_t shared, const CUtensorMap* map, std::int32_t x,
                                              std::int32_t head, std::int32_t token, std::int32_t sequence,
                                              std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(x), "r"(head), "r"(token), "r"(sequence), "r"(barrier)
      : "memory");
}
// Loads like load_box(), but L2 evicts the lines first. This suits data whose last read follows soon. The policy is
// created at each call, since a stored policy would take two of a loading thread's registers.
__device__ __forceinline__ void load_passing_box(std::uint32_t shared, const CUtensorMap* map, std::int32_t x,
                                                 std::int32_t y, std::uint32_t barrier) {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
// Loads like load_passing_box(), from a tensor of four dimensions.
__device__ __forceinline__ void load_passing_head_box(std::uint32_t shared, const CUtensorMap* map, std::int32_t x,
                                                      std::int32_t head, std::int32_t token, std::int32_t sequence,
                                                      std::uint32_t barrier) {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(map), "r"(x), "r"(head), "r"(token), "r"(sequence), "r"(barrier), "l"(policy)
      : "memory");
}
// Prefetches a box into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, std::int32_t x, std::int32_t y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
// Loads a box to the same shared address in every block of the cluster whose bit is set in `ranks`. The bytes are
// counted at each of these blocks' barriers.
__device__ __forceinline__ void load_box_multicast(std::uint32_t shared, const CUtensorMap* map, std::int32_t x,
                                                   std::int32_t y, std::uint32_t barrier, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ranks)
      : "memory");
}

// store_box() copies the box at address `shared` to column x and row y of the tensor. Before store_box(), every thread
// that wrote the box must call fence_for_tma(), and a barrier must follow. The box in shared memory may be overwritten
// after wait_for_stored_boxes().
__device__ __forceinline__ void fence_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t shared, std::int32_t x,
                                          std::int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all of this thread's boxes, except the latest kPending, have been read from shared memory.
template <int kPending>
__device__ __forceinline__ void wait_for_stored_boxes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Loads `bytes` bytes to address `shared`. The bytes that arrive are counted at `barrier`. `bytes` and both addresses
// are multiples of 16.
__device__ __forceinline__ void load_bytes(std::uint32_t shared, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void load_bytes(std::uint32_t shared, const void* from, int bytes, std::uint32_t barrier,
                                           std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// Returns the L2 policy for bytes that TMA copies or adds. If `keeps`, more accesses follow, as in an unfinished sum,
// and the policy is evict-last. If not, the policy is evict-first. The function l2_policy() in vec8.cuh is different:
// it chooses between evict-first and normal.
__device__ __forceinline__ std::uint64_t tma_policy(bool keeps) {
  std::uint64_t kept, passing;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(kept));
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(passing));
  return keeps ? kept : passing;
}
// copy_bytes() copies bytes from shared to global memory. commit_copies() ends a group of copies;
// wait_for_stored_boxes() counts such a group as one box.
__device__ __forceinline__ void copy_bytes(void* to, std::uint32_t shared, int bytes, std::uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(shared),
               "r"(bytes), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// store_bytes() copies bytes from shared to global memory. add_floats() adds fp32 numbers in shared memory to those in
// global memory. The additions are IEEE fp32 additions: rounded to nearest even, with subnormals. A NaN result is
// 0x7fffffff.
__device__ __forceinline__ void store_bytes(void* to, std::uint32_t shared, int bytes, std::uint64_t policy) {
  copy_bytes(to, shared, bytes, policy);
  commit_copies();
}
__device__ __forceinline__ void add_floats(void* to, std::uint32_t shared, int bytes, std::uint64_t policy) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(to),
      "r"(shared), "r"(bytes), "l"(policy)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_for_writes() {  // waits for all of this thread's stores and additions
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Functions for blocks of threads that add to a sum in memory one after another. A counter holds the number of finished
// additions. wait_for_turn() waits until `turn` additions are finished and visible to the caller. end_turn() counts one
// more addition.
__device__ __forceinline__ void wait_for_turn(const std::uint32_t* counter, std::uint32_t turn) {
  std::uint32_t done;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
  } while (done < turn);
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void end_turn(std::uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace rlk::cuda
