// Memory and ragged batches for the tests of operators over sequences.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "linear_backend.h"
#include "rlk/tokens.h"

namespace sequence_test {

constexpr unsigned char kCanary = 0x5a;

// Bytes with canaries around them, `shift` bytes off any alignment.
class Bytes {
 public:
  explicit Bytes(std::int64_t size, std::size_t shift = 0)
      : size_(static_cast<std::size_t>(size)), begin_(64 + shift), memory_(begin_ + size_ + 64, kCanary) {}
  Bytes& random(unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < size_; ++i) data()[i] = static_cast<unsigned char>(random());
    return *this;
  }
  unsigned char* data() { return memory_.data() + begin_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  std::vector<unsigned char> bytes() { return {data(), data() + size_}; }
  void expect(const std::vector<unsigned char>& want, const std::string& where) {
    std::vector<unsigned char> whole(memory_.size(), kCanary);
    std::copy(want.begin(), want.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin_));
    ASSERT_EQ(want.size(), size_) << where;
    std::size_t i = 0;
    while (i < whole.size() && whole[i] == memory_[i]) ++i;
    ASSERT_EQ(i, whole.size()) << where << ": byte " << static_cast<std::int64_t>(i) - static_cast<std::int64_t>(begin_)
                               << " of " << size_ << " differs";
  }

 private:
  std::size_t size_, begin_;
  std::vector<unsigned char> memory_;
};

template <class T>
std::vector<unsigned char> bytes_of(const std::vector<T>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Lengths of sequences: zero, short, full, and mixed.
inline std::vector<std::int64_t> random_lengths(std::int64_t rows, std::int64_t columns, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t any = static_cast<std::int64_t>(random() % static_cast<unsigned>(columns + 1));
    lengths.push_back(random() % 4 == 0 ? 0 : random() % 4 == 0 ? columns : any);
  }
  return lengths;
}
inline std::vector<std::int32_t> offsets_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> offsets = {0};
  for (std::int64_t length : lengths) offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
  return offsets;
}

}  // namespace sequence_test
