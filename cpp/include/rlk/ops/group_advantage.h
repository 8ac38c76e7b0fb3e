// THE CONTRACT of group_advantage: one advantage a sequence from its reward and those of its group. Rules are those of
// docs/numerics.md. Written formulas are fp32 with the roundings shown, in the order shown.
//
// A group's members are its sequences, ascending by index. A member counts, or, with exclude_nan and a NaN for its reward,
// is excluded: then it is a +0 in every sum, and n does not count it.
//   sum(f) : the perfect binary tree over the members in order (math/tree_sum.h), +0 for excluded ones
//   a      : 2^-k, of the least and the largest reward (math/moment_scale.h); 1 where no sum is needed
//   m      = fl(sum(fl(a s)) / n), no less than the least fl(a s) and no more than the largest;  mean = fl(m / a)
//   r      = fl(sqrt(fl(sum(fl(d * d)) / (n - 1)))), d = fl(fl(a s) - m): two passes;  std = fl(r / a)
//   A group is constant where n >= 2 and all rewards that count are equal: mean is that reward, -0 taken for +0, and std +0,
//   which the sums would miss by their rounding.
//   Alone (n = 1): by `alone` kScore: mean +0, std 1; or kZero: mean is the reward, std +0. n = 0: mean +0, std +0.
//   batch  : the same of all sequences as one group; n_b of them count
// A member that counts, with reward s, has
//   b = mean;  or kLengthMean: fl(l / a), l = fl(sum(fl(length * fl(a s))) / sum(length)), +0 where that sum is 0, s in a
//       constant group, mean of one that is alone;  or kGiven: baseline[sequence];  or kNone: +0
//   c = a of the group with scale kGroup, of the batch with kBatch, but 1 in place of more where b is kGiven; else 1
//   x = fl(fl(c s) - fl(c b)), with fl(m (c / a)) or fl(l (c / a)), a of the group, for fl(c b) where b is made of them
// kBatchMean, the mean of the batch and a group's deviation from it, has other formulas for b and x. With a, m and r of the
// batch, whose m is fl(a s) where one reward s counts:
//   b = fl(m / a);  d = fl(fl(a s) - m);  x = d of scale kBatch, e = fl(u d) of kGroup, fl(d / a) of kNone; +0 where it is 0
//   u          of a group with n >= 2: that of d of its least and its largest reward (math/moment_scale.h), else 1 / a
//   kGroup     : r = fl(sqrt(fl(sum(fl(e * e)) / (n - 1)))), std = fl(fl(r / u) / a), of a constant group too; alone r is by
//                `alone` as above, and kZero gives +0;  x = fl(x / fl(r + fl(fl(eps a) u))), alone fl(x / fl(r + eps))
//   kBatch     : x = fl(x / fl(r + fl(eps a)))
// All others go on:
//   leave_one_out, n >= 2 : x = fl(fl(n / (n - 1)) * x)
//   best_only             : x = fl(fl(c first largest reward) - fl(c second largest)) for the first member with the largest,
//                           else +0; -0 taken for +0
//   scale kGroup, kBatch  : x = fl(x / fl(fl(r (c / a)) + fl(c eps))), r and a of the group or of the batch
//   by_nonzero            : x = fl(fl(fl(n_b / max(number of rewards that are not 0, 1)) * x) / f_norm)
//   advantage = x; but +0 of an excluded member, and, where b is kMean or kLengthMean, in a constant group, in one that is alone
//   with kZero, and with best_only in one that is alone.
//
// mean of the outputs is b, std that of the group, or with scale kBatch of the batch; +Inf where it is too large for a float.
// Advantages that a float can hold are right for all finite rewards, whether or not their sums and squares are in range.
// A NaN that counts makes the advantages of its group NaN, and of the batch where that scales. NaN outputs are canonical.
// An advantage has the same bits wherever its group stands in the batch and on every backend, but for scale kBatch,
// kBatchMean and by_nonzero, which read the batch.
// Groups are given by offsets, by one size, or by ids: sequences of equal ids are a group, in any order. The CPU throws InvalidArgument for offsets out of order before it writes anything; a GPU
// clamps them (rlk/tokens.h).
// Neither allocates nor synchronises; enqueues on `stream`, which CPU backends ignore.
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
  std::int64_t group_size = 0;          // without offsets and ids: divides num_sequences
  const void* lengths = nullptr;        // [num_sequences], length_dtype; of kLengthMean; a negative one is NaN
  const float* baseline = nullptr;      // [num_sequences]; of kGiven
  float* advantage = nullptr;           // [num_sequences]
  float* mean = nullptr;                // [num_sequences], or null: not wanted
  float* std = nullptr;                 // [num_sequences], or null: not wanted
  std::int32_t* status = nullptr;       // [num_sequences], or null: not wanted
  std::int64_t reward_stride = 1, length_stride = 1, baseline_stride = 1;  // elements
  std::int64_t num_sequences = 0, num_groups = 0;                          // num_groups: of offsets
  DType index_dtype = DType::kInt64;                                       // kInt32, kInt64
  DType length_dtype = DType::kInt64;                                      // kInt32, kInt64, kFloat32
  GroupBaseline baseline_kind = GroupBaseline::kMean;
  GroupScale scale = GroupScale::kGroup;
  GroupAlone alone = GroupAlone::kScore;
  bool leave_one_out = false, best_only = false;  // not of kBatchMean
  bool by_nonzero = false, exclude_nan = false;
  float eps = 1e-6f;          // >= 0
  float f_norm = 1.0f;        // not 0
  void* workspace = nullptr;  // group_advantage_workspace_bytes(...), 8-byte aligned
};
std::int64_t group_advantage_workspace_bytes(const GroupAdvantageParams& p, Device device);
void group_advantage(const GroupAdvantageParams& p, Device device, Stream stream);

}  // namespace rlk
