// The command line of a benchmark, by getopt_long. Each long option is declared once, for reading and for the usage
// text.
#pragma once

#include <getopt.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace rlk::bench {

class CommandLine {
 public:
  // Takes an option's text. Returns false if the text is no valid value.
  using Take = std::function<bool(const char*)>;

  CommandLine& flag(std::string name, bool* given) {
    return add(std::move(name), "", [given](const char*) { return *given = true; });
  }
  // value: what usage calls it.
  CommandLine& value(std::string name, std::string value, Take take) {
    return add(std::move(name), std::move(value), std::move(take));
  }
  CommandLine& value(std::string name, std::string value, std::string* text) {
    return add(std::move(name), std::move(value), [text](const char* given) {
      *text = given;
      return true;
    });
  }
  CommandLine& value(std::string name, std::string value, std::int64_t* number, std::int64_t least = 0) {
    return add(std::move(name), std::move(value), [number, least](const char* given) {
      char* end = nullptr;
      *number = std::strtoll(given, &end, 10);
      return end != given && *end == '\0' && *number >= least;
    });
  }

  // Returns false, after printing the usage, if an argument was not understood.
  bool read(int argc, char** argv) const {
    std::vector<option> known;
    for (const Option& o : options_) {
      known.push_back(
          {o.name.c_str(), o.value.empty() ? no_argument : required_argument, nullptr, kFirst + size(known)});
    }
    known.push_back({});
    bool good = true;
    for (int found = 0; good && (found = getopt_long(argc, argv, "", known.data(), nullptr)) != -1;) {
      good = found >= kFirst && options_[static_cast<std::size_t>(found - kFirst)].take(optarg);
    }
    if (good && optind == argc) return true;
    std::fprintf(stderr, "usage: %s", argv[0]);
    for (const Option& o : options_) {
      std::fprintf(stderr, o.value.empty() ? " [--%s%s]" : " [--%s %s]", o.name.c_str(), o.value.c_str());
    }
    std::fprintf(stderr, "\n");
    return false;
  }

 private:
  struct Option {
    std::string name, value;
    Take take;
  };
  static constexpr int kFirst = 256;  // past every character that getopt_long may give

  static int size(const std::vector<option>& options) { return static_cast<int>(options.size()); }
  CommandLine& add(std::string name, std::string value, Take take) {
    options_.push_back({std::move(name), std::move(value), std::move(take)});
    return *this;
  }

  std::vector<Option> options_;
};

}  // namespace rlk::bench
