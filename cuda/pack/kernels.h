// Host entry points of the pack kernels, one per architecture. Arguments were checked in pack.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/pack_copy.h"
#include "rlk/kernels/pack_scan.h"

namespace rlk::cuda {

void pack_layout_sm80(const PackLayoutParams& p, cudaStream_t stream);
void pack_layout_sm90(const PackLayoutParams& p, cudaStream_t stream);
void pack_sm80(const PackParams& p, const PackGrid& g, cudaStream_t stream);
void pack_sm90(const PackParams& p, const PackGrid& g, cudaStream_t stream);

}  // namespace rlk::cuda
