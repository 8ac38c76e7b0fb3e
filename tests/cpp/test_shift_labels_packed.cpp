// Tests shift_labels_packed, loss_mask_from_spans and tool_mask byte for byte against a second implementation, written
// from the contract. The backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rlk/backends.h"
#include "rlk/ops/shift_labels_packed.h"
#include "sequence_cases.h"

namespace sequence_test {
namespace {

using linear_test::for_each_backend;
using rlk::DType;
using rlk::ShiftLabelsParams;
using rlk::SpanMaskParams;
using rlk::ToolMaskParams;

#if RLK_TEST_HIP
constexpr bool kThrows = false;
void run(const ShiftLabelsParams& p) { rlk::hip::shift_labels_packed(p, 0, 0); }
void run(const SpanMaskParams& p) { rlk::hip::loss_mask_from_spans(p, 0, 0); }
void run(const ToolMaskParams& p) { rlk::hip::tool_mask(p, 0, 0); }
#else
constexpr bool kThrows = true;
void run(const ShiftLabelsParams& p) { rlk::cpu::shift_labels_packed(p); }
void run(const SpanMaskParams& p) { rlk::cpu::loss_mask_from_spans(p); }
void run(const ToolMaskParams& p) { rlk::cpu::tool_mask(p); }
#endif

std::vector<std::int32_t> scaled_offsets(std::int64_t rows, std::int64_t columns, int unit, unsigned seed) {
  auto lengths = random_lengths(rows, columns, seed);
  for (auto& length : lengths) length *= unit;
  return offsets_of(lengths);
}

class Labels : public linear_test::Linear {};

TEST_F(Labels, EveryRankHasItsOwn) {
  for (const int cp : {1, 2, 4}) {
    const auto offsets = scaled_offsets(12, 30, 2 * cp, static_cast<unsigned>(cp));
    const std::int64_t total = offsets.back() + 3 * cp;
    std::vector<std::int64_t> ids, labels;
    std::vector<std::uint8_t> mask;
    std::mt19937 random(5);
    for (std::int64_t t = 0; t < total; ++t) {
      ids.push_back(static_cast<std::int64_t>(random()));
      mask.push_back(random() % 4 != 0);
    }
    for (std::int64_t t = 0; t < total; ++t) {
      const bool last = std::count(offsets.begin(), offsets.end(), t + 1) > 0 || t >= offsets.back();
      labels.push_back(last || !mask[static_cast<std::size_t>(t + 1)] ? -7 : ids[static_cast<std::size_t>(t + 1)]);
    }
    for (int rank = 0; rank < cp; ++rank) {
      for (const bool zigzag : {false, true}) {
        std::vector<std::int64_t> want;
        const auto take = [&](std::int64_t begin, std::int64_t end) {
          want.insert(want.end(), labels.begin() + begin, labels.begin() + end);
        };
        if (!zigzag || cp == 1) {
          take(rank * total / cp, (rank + 1) * total / cp);
        } else {
          for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
            const std::int64_t chunk = (offsets[i + 1] - offsets[i]) / (2 * cp);
            take(offsets[i] + rank * chunk, offsets[i] + (rank + 1) * chunk);
            take(offsets[i] + (2 * cp - 1 - rank) * chunk, offsets[i] + (2 * cp - rank) * chunk);
          }
          want.resize(static_cast<std::size_t>(total / cp), -7);
        }
        for_each_backend([&](const std::string& backend) {
          Bytes out(total / cp * 8);
          ShiftLabelsParams p;
          p.ids = ids.data();
          p.mask = {mask.data(), 0, 1, false};
          p.cu_seqlens = {offsets.data(), DType::kInt32};
          p.labels = out.data();
          p.num_sequences = 12;
          p.num_tokens = total;
          p.ignore_index = -7;
          p.cp_rank = rank;
          p.cp_size = cp;
          p.zigzag = zigzag;
          run(p);
          out.expect(bytes_of(want), "cp " + std::to_string(cp) + (zigzag ? " zigzag, " : ", ") + backend);
        });
      }
    }
  }
}

TEST_F(Labels, SpansOfEverySequence) {
  for (const bool packed : {false, true}) {
    const auto lengths = random_lengths(9, 300, 3);
    const auto offsets = offsets_of(lengths);
    const std::int64_t total = packed ? offsets.back() + 2 : 300;
    std::mt19937 random(4);
    std::vector<std::int32_t> spans, span_offsets = {0};
    std::vector<std::uint8_t> want(static_cast<std::size_t>(packed ? total : 9 * total));
    for (std::size_t i = 0; i < 9; ++i) {
      const std::int64_t length = packed ? lengths[i] : total;
      for (unsigned s = 0; s < random() % 4; ++s) {
        std::int64_t a = random() % static_cast<unsigned>(length + 1), b = random() % static_cast<unsigned>(length + 1);
        if (a > b) std::swap(a, b);
        spans.push_back(static_cast<std::int32_t>(a));
        spans.push_back(static_cast<std::int32_t>(b));
        const std::int64_t first = packed ? offsets[i] : static_cast<std::int64_t>(i) * total;
        std::fill(want.begin() + first + a, want.begin() + first + b, 1);
      }
      span_offsets.push_back(static_cast<std::int32_t>(spans.size() / 2));
    }
    for_each_backend([&](const std::string& backend) {
      Bytes out(static_cast<std::int64_t>(want.size()));
      SpanMaskParams p;
      p.spans = spans.data();
      p.span_offsets = {span_offsets.data(), DType::kInt32};
      if (packed) p.cu_seqlens = {offsets.data(), DType::kInt32};
      p.mask = out.data();
      p.num_sequences = 9;
      p.num_tokens = total;
      p.num_spans = span_offsets.back();
      p.dtype = DType::kInt32;
      run(p);
      out.expect(want, packed ? "packed, " + backend : "padded, " + backend);
    });
  }
}

TEST_F(Labels, TurnsBetweenMarkers) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> markers = {
      {{2, 3}, {1}}, {{2}, {3, 1}}, {{2, 3, 2}, {3}}, {{1}, {1}}};
  for (const auto& [begin, end] : markers) {
    for (const bool packed : {false, true}) {
      const std::int64_t rows = 7, columns = 600;  // more than two tiles of 256
      const auto lengths = random_lengths(rows, columns, 8);
      const auto offsets = offsets_of(lengths);
      const std::int64_t total = packed ? offsets.back() + 5 : columns, stride = columns + 3;
      std::mt19937 random(9);
      std::vector<std::int32_t> ids(static_cast<std::size_t>(packed ? total : rows * stride));
      for (auto& id : ids) id = static_cast<std::int32_t>(random() % 4);
      for (const bool include_end : {true, false}) {
        std::vector<std::uint8_t> want(static_cast<std::size_t>(packed ? total : rows * columns));
        for (std::int64_t i = 0; i < rows; ++i) {
          const std::int64_t length = packed ? lengths[static_cast<std::size_t>(i)] : columns;
          const std::int64_t first = packed ? offsets[static_cast<std::size_t>(i)] : i * stride;
          const std::int64_t out = packed ? first : i * columns;
          const auto ends = [&](const std::vector<std::int64_t>& marker, std::int64_t at) {
            const auto size = static_cast<std::int64_t>(marker.size());
            if (at + 1 < size) return false;
            return std::equal(marker.begin(), marker.end(), ids.begin() + first + at + 1 - size);
          };
          bool open = false;
          for (std::int64_t at = 0; at < length; ++at) {
            want[static_cast<std::size_t>(out + at)] = open;
            open = ends(begin, at) || (open && !ends(end, at));
          }
          for (std::int64_t at = 0; at < length && !include_end; ++at) {
            if (!ends(end, at)) continue;
            for (std::int64_t k = 0; k < static_cast<std::int64_t>(end.size()); ++k)
              want[static_cast<std::size_t>(out + at - k)] = 0;
          }
        }
        for_each_backend([&](const std::string& backend) {
          Bytes out(static_cast<std::int64_t>(want.size()));
          ToolMaskParams p;
          p.ids = ids.data();
          p.ids_stride = stride;
          if (packed) p.cu_seqlens = {offsets.data(), DType::kInt32};
          p.mask = out.data();
          p.num_sequences = rows;
          p.num_tokens = total;
          std::copy(begin.begin(), begin.end(), p.begin.ids);
          std::copy(end.begin(), end.end(), p.end.ids);
          p.begin.length = static_cast<std::int32_t>(begin.size());
          p.end.length = static_cast<std::int32_t>(end.size());
          p.dtype = DType::kInt32;
          p.include_end = include_end;
          run(p);
          out.expect(want, (packed ? "packed, " : "padded, ") + backend);
        });
      }
    }
  }
}

TEST_F(Labels, OffsetsThatAreNoneThrowOrGiveNoLabels) {
  const std::vector<std::int64_t> ids(16, 5);
  for (const std::vector<std::int64_t>& offsets :
       {std::vector<std::int64_t>{0, 6, 4, 16}, {0, 99, 4, 16}, {-4, 4, 8, 16}, {0, 3, 4, 16}}) {
    Bytes out(8 * 8), flags(16);
    ShiftLabelsParams p;
    p.ids = ids.data();
    p.cu_seqlens = {offsets.data(), DType::kInt64};
    p.labels = out.data();
    p.num_sequences = 3;
    p.num_tokens = 16;
    p.cp_size = 2;
    ToolMaskParams q;
    q.ids = ids.data();
    q.cu_seqlens = p.cu_seqlens;
    q.mask = flags.data();
    q.num_sequences = 3;
    q.num_tokens = 16;
    q.begin.length = q.end.length = 1;
    if (kThrows) {
      EXPECT_THROW(run(p), rlk::InvalidArgument);
      if (offsets[1] != 3) {
        EXPECT_THROW(run(q), rlk::InvalidArgument);
      }
      continue;
    }
    run(p);
    run(q);
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(out.as<std::int64_t>()[i] == 5 || out.as<std::int64_t>()[i] == -100);
    ASSERT_NO_FATAL_FAILURE(out.expect(out.bytes(), "labels"));
    ASSERT_NO_FATAL_FAILURE(flags.expect(flags.bytes(), "mask"));
  }
}

}  // namespace
}  // namespace sequence_test
