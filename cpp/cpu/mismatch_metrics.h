// The CPU backend of mismatch_metrics, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/mismatch_metrics.h"

namespace rlk::cpu {

void mismatch_metrics(const MismatchMetricsParams& p);

}  // namespace rlk::cpu
