// The operators `process_logits` and `sample` in one call, on every device. On CUDA, columns of float32 logits that
// have no penalty and no bias are not copied.
#include "cpp/ops/workspace.h"
#include "rlk/backends.h"
#include "rlk/ops/sample.h"
#include "rlk/plan_note.h"

namespace rlk {
namespace {

struct ProcessedPieces {
  float* z;
  std::int32_t* status;
  std::uint32_t* edited = nullptr;
  void* of_sample;
  std::int64_t bytes;
  ProcessedPieces(const ProcessedSampleParams& p, Device device) {
    const std::int64_t rows = p.draw.num_rows, columns = p.draw.vocab_size;
    Pieces pieces(p.workspace);
    z = pieces.take<float>(rows * columns * 4);
    status = pieces.take<std::int32_t>(rows * 4);
    if (sample_takes_edits(p.draw, device)) {
      edited = pieces.take<std::uint32_t>(rows * edit_words(columns) * 4);
    }
    of_sample = pieces.take(sample_workspace_bytes(p.draw, device));
    bytes = pieces.used();
  }
};

}  // namespace

std::int64_t processed_sample_workspace_bytes(const ProcessedSampleParams& p, Device device) {
  return ProcessedPieces(p, device).bytes;
}

void sample_processed(const ProcessedSampleParams& p, Device device, Stream stream) {
  require_backend("sample", device);
  const ProcessLogitsParams& of = p.process;
  RLK_CHECK(of.num_rows == p.draw.num_rows && of.vocab_start == 0 && of.num_columns == p.draw.vocab_size &&
                of.vocab_size == p.draw.vocab_size && of.dtype == p.draw.dtype,
            "sample: both parts are of the same rows");
  RLK_CHECK(of.num_rows == 0 || p.workspace != nullptr, "sample: a workspace is given");
  const ProcessedPieces pieces(p, device);
  ProcessLogitsParams process = of;
  process.out = pieces.z;
  process.status = pieces.status;
  process.edited = pieces.edited;
  const bool by_finish = sample_edits_rows(p.draw, process, device);
  note_plan([&] {
    return std::string(pieces.edited == nullptr ? "processed copy" : by_finish ? "edited rows" : "edited columns");
  });
  if (!by_finish) process_logits(process, device, stream);
  SampleParams draw = p.draw;
  draw.workspace = pieces.of_sample;
  draw.raw_logits = of.logits;
  draw.raw_stride = of.logits_stride;
  draw.raw_dtype = of.dtype;
  if (pieces.edited == nullptr) {
    draw.logits = pieces.z;
    draw.logits_stride = of.vocab_size;
    draw.dtype = DType::kFloat32;
  } else {
    draw.logits = of.logits;
    draw.logits_stride = of.logits_stride;
  }
  if (by_finish) {
    draw.process = &process;
  } else {
    draw.row_status = pieces.status;
    if (pieces.edited != nullptr) {
      draw.edited = pieces.edited;
      draw.edits = pieces.z;
    }
  }
  sample(draw, device, stream);
}

}  // namespace rlk
