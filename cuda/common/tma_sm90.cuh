// TMA, the tensor memory accelerator of compute capability 9.0. TMA copies boxes of a tensor to the shared memory of
// one or several blocks of a cluster, and back.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rlk::cuda {

// Elects one lane of a converged warp, in a way that the compiler recognises. With any other divergent branch the
// compiler would move every operand of a copy to uniform registers in a loop over lanes.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}

// Tells the compiler that x is the same in all lanes, so that it stays in uniform registers.
__device__ __forceinline__ int same_in_warp(int x) { return __shfl_sync(0xffffffff, x, 0); }

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at column x, row y to `shared`, and counts its bytes at `barrier`.
__device__ __forceinline__ void load_box(std::uint32_t shared, const CUtensorMap* map, std::int32_t x, std::int32_t y,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// Loads the box at column x, head, token and sequence of a tensor of four dimensions.
__device__ __forceinline__ void load_head_box(std::uint32_t shared, const CUtensorMap* map, std::int32_t x,
                                              std::int32_t head, std::int32_t token, std::int32_t sequence,
                                              std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(x), "r"(head), "r"(token), "r"(sequence), "r"(barrier)
      : "memory");
}
// The same as load_box, with evict-first lines, for data whose last read is near. The policy is created at each call,
// since a kept policy would take two of a loader's registers.
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
// The same for a tensor of four dimensions.
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
// Loads a box to the same offset of every block whose bit is set in `ranks`, and counts it at each block's barrier.
__device__ __forceinline__ void load_box_multicast(std::uint32_t shared, const CUtensorMap* map, std::int32_t x,
                                                   std::int32_t y, std::uint32_t barrier, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ranks)
      : "memory");
}

// store_box copies the box in `shared` to column x, row y. Before store_box, every thread that wrote the box calls the
// fence, and a barrier follows. The box may be overwritten once the storing thread has waited.
__device__ __forceinline__ void fence_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t shared, std::int32_t x,
                                          std::int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
// Waits until all but kPending of this thread's boxes have been read.
__device__ __forceinline__ void wait_for_stored_boxes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Loads `bytes` to `shared`, and counts them at `barrier`. `bytes` and both addresses are multiples of 16.
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
// L2's policy for bytes that TMA copies or adds: evict-last where more accesses follow, as in a sum that grows, else
// evict-first. vec8.cuh has l2_policy, which never keeps lines.
__device__ __forceinline__ std::uint64_t tma_policy(bool keeps) {
  std::uint64_t kept, passing;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(kept));
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(passing));
  return keeps ? kept : passing;
}
// copy_bytes copies bytes back to memory; commit_copies ends a group of copies, as wait_for_stored_boxes counts them.
__device__ __forceinline__ void copy_bytes(void* to, std::uint32_t shared, int bytes, std::uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(shared),
               "r"(bytes), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// store_bytes copies bytes back to memory; add_floats adds them there. The additions are IEEE fp32: nearest even,
// subnormals kept, NaN 0x7fffffff.
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
__device__ __forceinline__ void wait_for_writes() {  // until all of this thread's stores and additions are done
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Blocks take turns to add to a sum in memory. A counter holds the number of finished additions; a block that reads the
// raised counter also sees these additions.
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
