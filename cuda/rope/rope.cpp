// CUDA backend of rope: checks of memory safety, the choice of a plan, and the launch for the device's architecture.
#include "rlk/ops/rope.h"

#include <array>
#include <initializer_list>

#include "kernels.h"
#include "kernels/rows/rope_check.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kThreadsWanted = 2048;  // plans with several heads per thread need this many threads per
                                               // multiprocessor
constexpr std::int64_t kTokensWanted = 8;      // streams are faster from this many tokens per multiprocessor on

// Whether the plan "streams" can serve a call. A token's heads must be contiguous in memory, and TMA must be able to
// copy a row of angles. Enough tokens must fit into shared memory.
bool can_stream(const RopeParams& p) {
  const auto is_one_piece = [&](const RopeHeads& h) {
    return h.num_heads <= 1 || (h.x_head_stride == p.head_dim && h.y_head_stride == p.head_dim);
  };
  const RopeStages stages(p);
  return rope_has_vec8s(p) && p.rotary_dim > 0 && is_one_piece(p.q) && is_one_piece(p.k) &&
         stages.row_bytes % 16 == 0 && stages.stages > RopeStages::kWrites && p.num_tokens < std::int64_t{1} << 31 &&
         p.rotary_dim / (2 * kRopeVec8) <= kStreamThreads;
}

// Whether the plan "lanes" can serve a call. The number of vec8s in a head must be a power of two up to 32, and so must
// the number in its rotated columns. Offsets must fit into 30 bits, in units of 16 bytes.
bool fills_lanes(const RopeParams& p) {
  const auto is_power_of_2 = [](std::int64_t n) { return n > 0 && (n & (n - 1)) == 0; };
  const std::int64_t inner = std::min(p.inner_tokens, p.num_tokens), outer = (p.num_tokens + inner - 1) / inner;
  const auto is_small = [](std::initializer_list<std::array<std::int64_t, 2>> dimensions, DType t) {
    std::int64_t bytes = 0;
    for (const auto& [size, stride] : dimensions) {
      if (size > 1 && (stride < 0 || stride > (std::int64_t{1} << 35) / (size - 1))) return false;
      if (size > 1) bytes += (size - 1) * stride * size_of(t);
    }
    return bytes < std::int64_t{1} << 34;
  };
  const auto are_small = [&](const RopeHeads& h) {
    return is_small({{outer, h.x_tokens.outer}, {inner, h.x_tokens.inner}, {h.num_heads, h.x_head_stride}}, p.dtype) &&
           is_small({{outer, h.y_tokens.outer}, {inner, h.y_tokens.inner}, {h.num_heads, h.y_head_stride}}, p.dtype);
  };
  const auto rows_small = [&](const RopeAngles& a) {
    if (p.position_ids != nullptr) return is_small({{p.max_position, a.tokens.inner}}, p.angle_dtype);
    return is_small({{outer, a.tokens.outer}, {inner, a.tokens.inner}}, p.angle_dtype);
  };
  return rope_has_vec8s(p) && p.dtype != DType::kFloat32 && is_power_of_2(p.head_dim) && p.head_dim <= 32 * kRopeVec8 &&
         is_power_of_2(p.rotary_dim) && p.num_sections == 1 && p.num_tokens < std::int64_t{1} << 31 && are_small(p.q) &&
         are_small(p.k) && rows_small(p.cos) && rows_small(p.sin);
}

}  // namespace

bool serves(const RopePlan& plan, const RopeParams& p, int capability) {
  if (plan.streams) return capability == 90 && can_stream(p);
  if (plan.lanes) return capability == 90 && fills_lanes(p);
  if (plan.heads == 0) return true;
  return rope_has_vec8s(p) && (plan.heads < 4 || p.dtype != DType::kFloat32);
}

RopePlan choose_plan(const RopeParams& p, int capability, int multiprocessors) {
  for (const RopePlan& plan : kRopePlans) {
    if (!serves(plan, p, capability)) continue;
    if (plan.streams) {
      // If `wide` is false, streams are not faster: with one angle per pair, other plans have registers for more loads.
      const bool wide = p.interleaved || p.width == p.rotary_dim;
      if (wide && p.dtype != DType::kFloat32 && p.num_tokens >= kTokensWanted * multiprocessors) return plan;
      continue;
    }
    if (plan.heads <= 1) return plan;
    RopeGrid g;
    rope_grid(p, true, plan.heads, kRopeThreads, 0, &g);
    const std::int64_t threads = std::int64_t{g.slots} * (plan.lanes ? p.head_dim / kRopeVec8 : g.units);
    if (plan.heads <= p.q.num_heads + p.k.num_heads && threads >= kThreadsWanted * multiprocessors) return plan;
  }
  return {};
}

void rope(const RopeParams& p, int device, Stream stream) {
  check_rope(p);
  if (p.num_tokens == 0 || p.head_dim == 0 || p.q.num_heads + p.k.num_heads == 0) return;
  const DeviceGuard guard(device);
  const RopePlan plan = choose_plan(p, compute_capability(device), multiprocessors(device));
  note_plan([&] {
    if (plan.streams) return std::string("streams");
    if (plan.heads == 0) return std::string("pairs");
    return std::to_string(plan.heads) + (plan.lanes ? " heads by lanes" : " heads");
  });
  RLK_CUDA_IN_USE("rope", device, rope)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
