// THE CONTRACT of `group_advantage`: computes one advantage per sequence, from the sequence's reward and the rewards of
// its group. Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they
// show.
//
// A group's members are its sequences, ascending by index. s is a member's reward, and n is the number of members that
// count. With exclude_nan, a member whose reward is NaN is excluded: it is +0 in every sum and does not count. Every
// other member counts.
//   sum(f) : the perfect binary tree over the members in order (math/tree_sum.h), +0 for excluded members
//   a      : 2^-k, from the least and the largest reward (math/moment_scale.h); 1 where no sum is needed
//   m      = fl(sum(fl(a s)) / n), limited to the range from the least to the largest fl(a s);  mean = fl(m / a)
//   r      = fl(sqrt(fl(sum(fl(d * d)) / (n - 1)))), d = fl(fl(a s) - m), in two passes;  std = fl(r / a)
//   A group is constant where n >= 2 and all rewards that count are equal. Then mean is this common reward, with -0
//   taken as +0, and std is +0. Neither is computed from sums, which would have rounding errors.
//   For a lone member (n = 1), `alone` decides. kScore: mean +0, std 1. kZero: mean is the member's reward, std +0. For
//   n = 0: mean +0, std +0.
//   batch  : the same quantities with all sequences as one group, in which n_b members count
// A member that counts has
//   b = mean for kMean, baseline[sequence] for kGiven, +0 for kNone. For kLengthMean b = fl(l / a),
//      l = fl(sum(fl(length * fl(a s))) / sum(length)); but b is +0 where sum(length) is 0, s in a constant group, and
//      mean for a lone member.
//   c = the group's a with scale kGroup, the batch's a with kBatch, else 1. For kGiven, c is limited to at most 1.
//   x = fl(fl(c s) - fl(c b)). Where b is computed from m, fl(m (c / a)) replaces fl(c b). Where b is computed from
//       l, fl(l (c / a)) replaces fl(c b). In both cases a is the group's.
// kBatchMean subtracts the mean of the batch. With scale kGroup it divides by the group's deviation from this mean. So
// b and x have other formulas, with a, m and r of the batch. If a single reward s counts in the batch, m is fl(a s):
//   b = fl(m / a);  d = fl(fl(a s) - m);  x = d for scale kBatch, e = fl(u d) for kGroup, fl(d / a) for kNone; +0 where
//       x is 0
//   u          2^-k from d of the least and d of the largest reward of a group with n >= 2 (math/moment_scale.h), else
//              1 / a
//   kGroup     : r = fl(sqrt(fl(sum(fl(e * e)) / (n - 1)))), std = fl(fl(r / u) / a), for a constant group,
//                too;  x = fl(x / fl(r + fl(fl(eps a) u))). For a lone member, r is the std that `alone` gives, and
//                x = fl(x / fl(r + eps)), or +0 with kZero
//   kBatch     : x = fl(x / fl(r + fl(eps a)))
// The following steps apply to every baseline except kBatchMean:
//   leave_one_out, n >= 2 : x = fl(fl(n / (n - 1)) * x)
//   best_only             : x = fl(fl(c s1) - fl(c s2)) for the first member with the largest reward s1, where s2 is
//                           the second largest reward; else x = +0. -0 becomes +0
//   scale kGroup, kBatch  : x = fl(x / fl(fl(r (c / a)) + fl(c eps))), r and a of the group for kGroup, of the batch
//                           for kBatch
//   by_nonzero            : x = fl(fl(fl(n_b / max(number of rewards that are not 0, 1)) * x) / f_norm)
//   advantage = x, but +0 for an excluded member. For kMean and kLengthMean the advantage is also +0 in a constant
//     group, for a lone member with kZero, and for a lone member with best_only.
//
// The output `mean` is b. The output `std` is the group's, or with scale kBatch the batch's. A std too large for a
// float is +Inf. For all finite rewards, each advantage that a float can hold is right, even where sums or squares of
// the rewards would overflow or underflow. A NaN reward that counts makes its own advantage NaN. It also makes each
// advantage NaN that is computed with this reward in a mean, in a deviation or by best_only. Every NaN output is the
// canonical NaN. An advantage has the same bits at any place of its group in the batch, and on every backend. Scale
// kBatch, kBatchMean and by_nonzero are exceptions, since they use the rewards of the whole batch. Groups are given by
// offsets, by one size for all groups, or by ids. Sequences with equal ids form a group, in any order. With offsets out
// of order the CPU throws InvalidArgument before it writes anything; a GPU clamps them (rlk/tokens.h). The call
// enqueues its work on `stream`, which CPU backends ignore; it neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

enum class GroupBaseline : std::uint8_t { kNone, kMean, kLengthMean, kGiven, kBatchMean };
enum class GroupScale : std::uint8_t { kNone, kGroup, kBatch };
enum class GroupAlone : std::uint8_t { kScore, kZero };

// Bits of status.
constexpr std::int32_t kGroupConstant = 1;
constexpr std::int32_t kGroupAlone = 2;
constexpr std::int32_t kSequenceExcluded = 4;
constexpr std::int32_t kAdvantageNotFinite = 8;

struct GroupAdvantageParams {
  const float* rewards = nullptr;       // [num_sequences]
  const void* group_offsets = nullptr;  // [num_groups + 1], index_dtype, or null
  const void* group_ids = nullptr;      // [num_sequences], index_dtype, or null
  std::int64_t group_size = 0;          // used without offsets and ids: divides num_sequences
  const void* lengths = nullptr;        // [num_sequences], length_dtype, for kLengthMean; a negative length gives NaN
  const float* baseline = nullptr;      // [num_sequences], for kGiven
  float* advantage = nullptr;           // [num_sequences]
  float* mean = nullptr;                // [num_sequences], or null: not wanted
  float* std = nullptr;                 // [num_sequences], or null: not wanted
  std::int32_t* status = nullptr;       // [num_sequences], or null: not wanted
  std::int64_t reward_stride = 1, length_stride = 1, baseline_stride = 1;  // in elements
  std::int64_t num_sequences = 0, num_groups = 0;                          // num_groups: with offsets
  DType index_dtype = DType::kInt64;                                       // kInt32, kInt64
  DType length_dtype = DType::kInt64;                                      // kInt32, kInt64, kFloat32
  GroupBaseline baseline_kind = GroupBaseline::kMean;
  GroupScale scale = GroupScale::kGroup;
  GroupAlone alone = GroupAlone::kScore;
  bool leave_one_out = false, best_only = false;  // not with kBatchMean
  bool by_nonzero = false, exclude_nan = false;
  float eps = 1e-6f;          // >= 0
  float f_norm = 1.0f;        // not 0
  void* workspace = nullptr;  // group_advantage_workspace_bytes(...), 8-byte aligned
};
std::int64_t group_advantage_workspace_bytes(const GroupAdvantageParams& p, Device device);
void group_advantage(const GroupAdvantageParams& p, Device device, Stream stream);

}  // namespace rlk
