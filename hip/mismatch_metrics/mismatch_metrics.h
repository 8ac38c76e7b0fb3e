// The HIP backend of mismatch_metrics, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/mismatch_metrics.h"

namespace rlk::hip {

std::int64_t mismatch_metrics_workspace_bytes(const MismatchMetricsParams& p);
void mismatch_metrics(const MismatchMetricsParams& p, int device, Stream stream);

}  // namespace rlk::hip
