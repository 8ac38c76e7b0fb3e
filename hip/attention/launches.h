// Constants and arguments of attention that host and kernels share.
#pragma once

#include "kernels/attention/backward.h"
#include "kernels/attention/forward.h"
#include "kernels/attention/merge.h"

namespace rlk::hip {

// Tiles have 16 rows. 64 KiB of LDS hold at most 16 rows, together with the rows' weights for 128 keys and one stage of
// the other operand.
using NarrowTile = AttentionTile<1, 128, 16>;
using WideTile = AttentionTile<1, 256, 16>;
static_assert(NarrowTile::kRows == WideTile::kRows);

constexpr int kAttentionCallLds = 768;  // bytes for the params and the grid
template <class Tile>
constexpr int kAttentionForwardLds = kAttentionCallLds + AttentionForwardShared<Tile>::kBytes;
template <class Tile>
constexpr int kAttentionBackwardLds = kAttentionCallLds + AttentionBackwardShared<Tile>::kBytes;
static_assert(kAttentionForwardLds<WideTile> <= 65536 && kAttentionBackwardLds<WideTile> <= 65536);

}  // namespace rlk::hip
