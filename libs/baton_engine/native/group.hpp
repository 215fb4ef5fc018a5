// The collectives of one rank over a meeting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "meeting.hpp"
#include "sums.hpp"

namespace baton {

// What became of a call: `culprit` is the rank that a failure is about.
struct Outcome {
  Failure failure = Failure::none;
  std::size_t culprit = 0;
};

class Group {
 public:
  Group(void* memory, std::size_t ranks, std::size_t rank, std::int64_t patience_us, std::int64_t spin_us);

  void begin(std::uint64_t epoch) { meeting_.begin(epoch); }
  void abort() { meeting_.abort(); }
  // Waits for the others as long as they live.
  Outcome meet();
  // Replaces `count` elements by their sums over the ranks.
  Outcome all_reduce(std::byte* data, std::size_t count, Element element);
  // `rows` rows of `row_bytes` bytes, which may be others' on other ranks, side by side in order of rank.
  // `allocate(bytes of a row of the result)` gives room for all rows of it.
  Outcome all_gather(const std::byte* data, std::size_t rows, std::size_t row_bytes,
                     const std::function<std::byte*(std::size_t)>& allocate);

 private:
  // Meets, and makes sure that all ranks made the same call.
  Outcome same(std::uint64_t call, bool patient);
  Outcome differs(std::size_t rank);

  Meeting meeting_;
};

}  // namespace baton
