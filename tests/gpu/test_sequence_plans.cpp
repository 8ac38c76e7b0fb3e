// Every kernel that can serve a call of pack, sequence_logprob, preference_loss or the labels has the CPU's bits. All plans
// run, as built for sm_90 and as PTX for sm_80.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/kernels.h"
#include "cuda/sequence_logprob/kernels.h"
#include "kernels/losses/preference_pair.h"
#include "kernels/packing/pack_copy.h"
#include "kernels/packing/pack_scan.h"
#include "kernels/tokens/labels.h"
#include "plan_memory.h"
#include "rlk/backends.h"
#include "rlk/ops/pack.h"
#include "rlk/ops/preference_loss.h"
#include "rlk/ops/sequence_logprob.h"
#include "rlk/ops/shift_labels_packed.h"

namespace rlk::cuda {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes random_bytes(std::int64_t size, std::mt19937* random) {
  Bytes bytes(static_cast<std::size_t>(size));
  for (auto& b : bytes) b = static_cast<unsigned char>((*random)());
  return bytes;
}
template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const unsigned char*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}
template <class T>
T* as(Bytes& bytes) {
  return reinterpret_cast<T*>(bytes.data());
}
template <class T>
T* as(const OnDevice& memory) {
  return static_cast<T*>(memory.data);
}

std::vector<std::int32_t> offsets_of(std::int64_t rows, std::int64_t columns, std::mt19937* random) {
  std::vector<std::int32_t> offsets = {0};
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto any = static_cast<std::int32_t>((*random)() % static_cast<unsigned>(columns + 1));
    offsets.push_back(offsets.back() + ((*random)() % 4 == 0 ? 0 : any));
  }
  return offsets;
}

// Lengths: one token; sizes around a thread's loads and a chunk; more chunks than one round of a block of a few warps,
// or of sixteen warps, takes.
void run_sums(std::mt19937* random) {
  for (const std::int64_t columns : {1, 64, 255, 256, 700, 1300, 2047, 2048, 2052, 9000, 140000, 600000}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const int mask_bytes : {0, 1, 2, 4, 8}) {
        if (columns > 500000 && mask_bytes != 1) continue;
        for (const bool packed : {false, true}) {
          const std::int64_t rows = columns > 100000 ? 3 : 17;
          const auto offsets = offsets_of(rows, columns, random);
          const std::int64_t total = packed ? offsets.back() + 3 : columns, of_rows = packed ? 1 : rows;
          const std::int64_t stride = total + (mask_bytes % 4 == 0 ? 0 : 4);
          const Bytes x = matrix(of_rows, total, stride, dtype, random, true);
          Bytes mask = random_bytes(of_rows * stride * std::max(mask_bytes, 1), random);
          for (std::size_t i = 0; mask_bytes > 0 && i < mask.size(); ++i) {
            const auto element = i / static_cast<std::size_t>(mask_bytes);
            if (element % 3 == 0) mask[i] = 0;
          }
          std::vector<float> dsum;
          for (std::int64_t i = 0; i < rows; ++i) dsum.push_back(0.5f * static_cast<float>(i) - 2);
          const Bytes gradient_clean(static_cast<std::size_t>(of_rows * total * size_of(dtype)), kCanary);
          Bytes sum(static_cast<std::size_t>(rows) * 4, kCanary), count(static_cast<std::size_t>(rows) * 8, kCanary),
              gradient = gradient_clean;
          const Bytes sum_clean = sum, count_clean = count;
          SequenceLogprobParams p;
          p.logprob = x.data();
          p.logprob_stride = stride;
          p.num_sequences = rows;
          p.num_tokens = total;
          p.dtype = dtype;
          if (mask_bytes > 0) p.mask = {mask.data(), stride, mask_bytes, mask_bytes == 2};
          if (packed) p.cu_seqlens = {offsets.data(), DType::kInt32};
          p.sum = as<float>(sum);
          p.count = as<std::int64_t>(count);
          cpu::sequence_logprob(p);
          SequenceLogprobBackwardParams q;
          q.dsum = dsum.data();
          q.mask = p.mask;
          q.cu_seqlens = p.cu_seqlens;
          q.d_logprob = gradient.data();
          q.num_sequences = rows;
          q.num_tokens = total;
          q.dtype = dtype;
          cpu::sequence_logprob_backward(q);
          const OnDevice x_gpu(x), mask_gpu(mask), offsets_gpu(bytes_of(offsets)), dsum_gpu(bytes_of(dsum));
          p.logprob = x_gpu.data;
          if (mask_bytes > 0) p.mask.data = q.mask.data = mask_gpu.data;
          if (packed) p.cu_seqlens.data = q.cu_seqlens.data = offsets_gpu.data;
          q.dsum = as<float>(dsum_gpu);
          const std::string what = std::string(short_name(dtype)) + " [" + std::to_string(rows) + ", " +
                                   std::to_string(columns) + "] mask " + std::to_string(mask_bytes) +
                                   (packed ? " packed" : "");
          for (const int arch : {90, 80}) {
            for (const SequencePlan& plan : kSequencePlans) {
              const OnDevice sum_gpu(sum_clean), count_gpu(count_clean);
              p.sum = as<float>(sum_gpu);
              p.count = as<std::int64_t>(count_gpu);
              arch == 90 ? sm90::sequence_logprob(p, plan, nullptr) : sm80::sequence_logprob(p, plan, nullptr);
              check(cudaDeviceSynchronize(), "sequence_logprob");
              const std::string of = what + ", warps " + std::to_string(plan.warps) + ", sm_" + std::to_string(arch);
              expect(sum_gpu.host(), sum, of + ", sum");
              expect(count_gpu.host(), count, of + ", count");
            }
            const OnDevice gradient_gpu(gradient_clean);
            q.d_logprob = gradient_gpu.data;
            arch == 90 ? sm90::sequence_logprob_backward(q, nullptr) : sm80::sequence_logprob_backward(q, nullptr);
            check(cudaDeviceSynchronize(), "sequence_logprob_backward");
            expect(gradient_gpu.host(), gradient, what + ", gradient, sm_" + std::to_string(arch));
          }
        }
      }
    }
  }
}

void run_packs(std::mt19937* random) {
  constexpr std::int64_t kBytes[] = {1, 2, 4, 8, 16, 12, 96, 4096};
  for (const std::int64_t rows : {1, 5, 40, 3000}) {
    for (const std::int64_t columns : {1, 33, 300, 5000}) {
      if (rows * columns > 20000) continue;
      for (const bool by_mask : {false, true}) {
        for (const std::int64_t shift : {0, 4, 1}) {
          std::vector<std::int64_t> lengths;
          for (std::int64_t i = 0; i < rows; ++i) {
            lengths.push_back(static_cast<std::int64_t>((*random)() % static_cast<unsigned>(columns + 1)));
          }
          Bytes mask = random_bytes(rows * columns, random);
          for (auto& m : mask) m = m % 3 == 0 ? 0 : m;
          PackLayoutParams l;
          l.num_sequences = rows;
          l.num_tokens = columns;
          l.capacity = rows * columns;
          by_mask ? (void)(l.mask = {mask.data(), columns, 1, false}) : (void)(l.lengths = lengths.data());
          const Bytes offsets_clean(static_cast<std::size_t>(rows + 1) * 4, kCanary);
          const Bytes positions_clean(static_cast<std::size_t>(rows * columns) * 4, kCanary);
          Bytes offsets = offsets_clean, positions = positions_clean, status(4);
          l.cu_seqlens = as<std::int32_t>(offsets);
          l.positions = as<std::int32_t>(positions);
          l.status = as<std::int32_t>(status);
          cpu::pack_layout(l);
          std::vector<Bytes> padded, packed, back;
          PackParams p;
          p.cu_seqlens = {offsets.data(), DType::kInt32};
          p.positions = by_mask ? l.positions : nullptr;
          p.num_sequences = rows;
          p.num_tokens = columns;
          p.capacity = l.capacity;
          p.num_arrays = kPackArrays;
          for (const std::int64_t bytes : kBytes) {
            padded.push_back(random_bytes(rows * columns * bytes + shift, random));
            packed.emplace_back(static_cast<std::size_t>(p.capacity * bytes + shift), kCanary);
            back.emplace_back(padded.back().size(), kCanary);
          }
          const std::vector<Bytes> packed_clean = packed, back_clean = back;
          const auto point = [&](const auto& of_padded, const auto& of_packed) {
            for (int k = 0; k < kPackArrays; ++k) {
              const std::int64_t b = kBytes[k];
              p.arrays[k] = {of_padded(k) + shift, columns * b, b, of_packed(k) + shift, b, b, 0x0101010101010101};
            }
          };
          const auto host = [](auto& of) { return [&of](int k) { return of[static_cast<std::size_t>(k)].data(); }; };
          point(host(padded), host(packed));
          cpu::pack(p);
          p.unpacks = true;
          point(host(back), host(packed));
          cpu::pack(p);
          const std::string what = "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]" +
                                   (by_mask ? " by mask" : "") + " shift " + std::to_string(shift);
          const OnDevice mask_gpu(mask), lengths_gpu(bytes_of(lengths));
          for (const int arch : {90, 80}) {
            const std::string of = what + ", sm_" + std::to_string(arch);
            const OnDevice offsets_gpu(offsets_clean), positions_gpu(positions_clean), status_gpu(Bytes(4, kCanary));
            PackLayoutParams m = l;
            by_mask ? (void)(m.mask.data = mask_gpu.data) : (void)(m.lengths = lengths_gpu.data);
            m.cu_seqlens = as<std::int32_t>(offsets_gpu);
            m.positions = as<std::int32_t>(positions_gpu);
            m.status = as<std::int32_t>(status_gpu);
            arch == 90 ? sm90::pack_layout(m, nullptr) : sm80::pack_layout(m, nullptr);
            check(cudaDeviceSynchronize(), "pack_layout");
            expect(offsets_gpu.host(), offsets, of + ", cu_seqlens");
            expect(positions_gpu.host(), positions, of + ", positions");
            expect(status_gpu.host(), status, of + ", status");
            std::vector<OnDevice*> padded_gpu, packed_gpu, back_gpu;
            for (int k = 0; k < kPackArrays; ++k) {
              const auto i = static_cast<std::size_t>(k);
              padded_gpu.push_back(new OnDevice(padded[i]));
              packed_gpu.push_back(new OnDevice(packed_clean[i]));
              back_gpu.push_back(new OnDevice(back_clean[i]));
            }
            const auto gpu = [](auto& of_gpu) {
              return [&of_gpu](int k) { return as<unsigned char>(*of_gpu[static_cast<std::size_t>(k)]); };
            };
            p.cu_seqlens.data = offsets_gpu.data;
            p.positions = by_mask ? m.positions : nullptr;
            const auto launch = [&] {
              for_each_pack_launch(
                  p, [&](const PackGrid& g) { arch == 90 ? sm90::pack(p, g, nullptr) : sm80::pack(p, g, nullptr); });
              check(cudaDeviceSynchronize(), "pack");
            };
            for (const bool covered : {true, false}) {
              p.unpacks = false;
              p.covered = covered;
              point(gpu(padded_gpu), gpu(packed_gpu));
              launch();
              for (std::size_t k = 0; k < kPackArrays; ++k) expect(packed_gpu[k]->host(), packed[k], of + ", packed");
            }
            p.unpacks = true;
            point(gpu(back_gpu), gpu(packed_gpu));
            launch();
            for (std::size_t k = 0; k < kPackArrays; ++k) expect(back_gpu[k]->host(), back[k], of + ", unpacked");
            for (const auto& all : {padded_gpu, packed_gpu, back_gpu}) {
              for (const OnDevice* memory : all) delete memory;
            }
          }
        }
      }
    }
  }
}

void run_losses(std::mt19937* random) {
  for (int kind = 0; kind <= static_cast<int>(Preference::kKto) + 2; ++kind) {
    for (const std::int64_t num : {1, 300, 5000}) {
      PreferenceLossParams p;
      p.kind = static_cast<Preference>(std::min(kind, static_cast<int>(Preference::kKto)));
      if (kind > static_cast<int>(Preference::kKto)) {
        p.kind = Preference::kSigmoid;
        p.sort = kind % 2 ? PreferenceSort::kAot : PreferenceSort::kAotUnpaired;
      }
      const auto column = [&] { return matrix(1, num, num, DType::kFloat32, random, true); };
      Bytes pw = column(), pl = column(), fw = column(), fl = column();
      std::vector<std::int64_t> counts;
      for (std::int64_t i = 0; i < num; ++i) counts.push_back(i % 9);
      p.chosen.num = p.rejected.num = num;
      p.label_smoothing = 0.1f;
      p.half = 5.0f;
      p.log_keep = -0.105f;
      p.log_flip = -2.3f;
      p.unflipped = 0.8f;
      p.alpha = 0.5f;
      p.score = static_cast<PreferenceScore>(p.sort == PreferenceSort::kNone ? (kind + num) % 5 : 0);
      p.average = static_cast<PreferenceAverage>(p.sort == PreferenceSort::kNone ? num % 3 : 0);
      const std::int64_t losses = p.kind == Preference::kKto ? 2 * num : num;
      const auto size = [](std::int64_t n) { return static_cast<std::size_t>(4 * n); };
      const std::vector<Bytes> clean = {Bytes(size(losses)),  Bytes(size(num)),    Bytes(size(num)),
                                        Bytes(size(num)),     Bytes(size(num)),    Bytes(20),
                                        Bytes(size(2 * num)), Bytes(size(2 * num))};
      std::vector<Bytes> want = clean;
      const auto point = [&](const auto& in, const auto& out) {
        p.chosen.policy = static_cast<const float*>(in(0));
        p.rejected.policy = static_cast<const float*>(in(1));
        p.chosen.reference = static_cast<const float*>(in(2));
        p.rejected.reference = static_cast<const float*>(in(3));
        p.chosen.count = p.rejected.count = static_cast<const std::int64_t*>(in(4));
        p.losses = static_cast<float*>(out(0));
        p.chosen.reward = static_cast<float*>(out(1));
        p.rejected.reward = static_cast<float*>(out(2));
        p.chosen.d_policy = static_cast<float*>(out(3));
        p.rejected.d_policy = static_cast<float*>(out(4));
        p.metrics = static_cast<float*>(out(5));
        p.ranks = static_cast<std::int32_t*>(out(6));
        p.order = static_cast<std::int32_t*>(out(7));
      };
      Bytes of_counts = bytes_of(counts);
      Bytes* const inputs[] = {&pw, &pl, &fw, &fl, &of_counts};
      point([&](int i) -> void* { return inputs[i]->data(); },
            [&](int i) -> void* { return want[static_cast<std::size_t>(i)].data(); });
      cpu::preference_loss(p);
      const OnDevice a(pw), b(pl), c(fw), d(fl), e(of_counts);
      const OnDevice* const gpu[] = {&a, &b, &c, &d, &e};
      for (const int arch : {90, 80}) {
        std::vector<OnDevice*> got;
        for (const Bytes& bytes : clean) got.push_back(new OnDevice(bytes));
        point([&](int i) { return gpu[i]->data; }, [&](int i) { return got[static_cast<std::size_t>(i)]->data; });
        arch == 90 ? sm90::preference_loss(p, nullptr) : sm80::preference_loss(p, nullptr);
        check(cudaDeviceSynchronize(), "preference_loss");
        for (std::size_t i = 0; i < 7; ++i) {
          expect(got[i]->host(), want[i],
                 "kind " + std::to_string(kind) + ", num " + std::to_string(num) + ", output " + std::to_string(i) +
                     ", sm_" + std::to_string(arch));
        }
        for (const OnDevice* memory : got) delete memory;
      }
    }
  }
}

void run_labels(std::mt19937* random) {
  for (const int cp : {1, 4}) {
    auto offsets = offsets_of(50, 700, random);
    for (auto& offset : offsets) offset *= 2 * cp;
    const std::int64_t total = offsets.back() + 8 * cp;
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < total; ++i) ids.push_back((*random)() % 4);
    const OnDevice ids_gpu(bytes_of(ids)), offsets_gpu(bytes_of(offsets));
    const Bytes labels_clean(static_cast<std::size_t>(total / cp * 8), kCanary),
        mask_clean(static_cast<std::size_t>(total), kCanary);
    for (int rank = 0; rank < cp; ++rank) {
      Bytes labels = labels_clean, mask = mask_clean;
      ShiftLabelsParams p;
      p.ids = ids.data();
      p.cu_seqlens = {offsets.data(), DType::kInt32};
      p.labels = labels.data();
      p.num_sequences = 50;
      p.num_tokens = total;
      p.cp_rank = rank;
      p.cp_size = cp;
      cpu::shift_labels_packed(p);
      ToolMaskParams q;
      q.ids = ids.data();
      q.cu_seqlens = p.cu_seqlens;
      q.mask = mask.data();
      q.num_sequences = 50;
      q.num_tokens = total;
      q.begin.length = q.end.length = 2;
      q.begin.ids[0] = 1;
      q.begin.ids[1] = 2;
      q.end.ids[0] = 3;
      q.include_end = rank % 2 == 0;
      cpu::tool_mask(q);
      p.ids = q.ids = ids_gpu.data;
      p.cu_seqlens.data = q.cu_seqlens.data = offsets_gpu.data;
      for (const int arch : {90, 80}) {
        const OnDevice got(labels_clean), flags(mask_clean);
        p.labels = got.data;
        q.mask = as<std::uint8_t>(flags);
        arch == 90 ? sm90::shift_labels_packed(p, nullptr) : sm80::shift_labels_packed(p, nullptr);
        arch == 90 ? sm90::tool_mask(q, nullptr) : sm80::tool_mask(q, nullptr);
        check(cudaDeviceSynchronize(), "labels");
        expect(got.host(), labels, "labels of rank " + std::to_string(rank) + " of " + std::to_string(cp));
        expect(flags.host(), mask, "mask of turns");
      }
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::printf("skipped: no device of compute capability 9.0\n");
    return cuda::kSkipped;
  }
  std::mt19937 random(1);
  cuda::run_sums(&random);
  cuda::run_packs(&random);
  cuda::run_losses(&random);
  cuda::run_labels(&random);
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
