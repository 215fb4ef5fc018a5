#include "group.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace baton {
namespace {

// Tells calls of different kinds and sizes apart; sizes are below 2^56.
constexpr std::uint64_t kMeet = 1, kReduce = 2, kGather = 3;
constexpr std::uint64_t call_of(std::uint64_t kind, std::uint64_t detail) { return kind << 56 | detail; }
constexpr std::uint64_t kind_of(std::uint64_t call) { return call >> 56; }
constexpr std::uint64_t detail_of(std::uint64_t call) { return call & ((std::uint64_t{1} << 56) - 1); }

std::size_t checked(std::size_t rank, std::size_t ranks) {
  if (ranks < 1 || ranks > kMaxRanks || rank >= ranks) throw std::invalid_argument("no such rank");
  return rank;
}

// Puts bytes [done, done + a piece) of a rank's rows, which lie side by side with those of others, where they belong.
void place(const std::byte* source, std::byte* result, std::size_t width, std::size_t stride, std::size_t done,
           std::size_t bytes) {
  const std::size_t end = std::min(done + kPiece, bytes);
  while (done < end) {
    const std::size_t row = done / width, at = done % width, part = std::min(width - at, end - done);
    std::memcpy(result + row * stride + at, source, part);
    source += part;
    done += part;
  }
}

}  // namespace

Group::Group(void* memory, std::size_t ranks, std::size_t rank, std::int64_t patience_us, std::int64_t spin_us)
    : meeting_(memory, ranks, checked(rank, ranks), patience_us, spin_us) {}

Outcome Group::meet() { return same(call_of(kMeet, 0), true); }

Outcome Group::all_reduce(std::byte* data, std::size_t count, Element element) {
  const std::size_t bytes = count * element_bytes(element);
  const std::uint64_t call = call_of(kReduce, bytes << 1 | (element == Element::bfloat16));
  std::vector<const std::byte*> pieces(meeting_.ranks());
  for (std::size_t done = 0; done < bytes; done += kPiece) {
    const std::size_t part = std::min(kPiece, bytes - done);
    std::memcpy(meeting_.own_piece(), data + done, part);
    if (const Outcome outcome = same(call, false); outcome.failure != Failure::none) return outcome;
    for (std::size_t rank = 0; rank < pieces.size(); ++rank) pieces[rank] = meeting_.piece(rank);
    add_up(element, pieces, data + done, part / element_bytes(element));
  }
  return {};
}

Outcome Group::all_gather(const std::byte* data, std::size_t rows, std::size_t row_bytes,
                          const std::function<std::byte*(std::size_t)>& allocate) {
  const std::size_t bytes = rows * row_bytes;
  std::vector<std::size_t> widths(meeting_.ranks());
  std::size_t longest = bytes, result_row = 0;
  std::byte* result = nullptr;
  for (std::size_t done = 0; done == 0 || done < longest; done += kPiece) {
    if (done < bytes) std::memcpy(meeting_.own_piece(), data + done, std::min(kPiece, bytes - done));
    if (const Failure failure = meeting_.meet(call_of(kGather, row_bytes)); failure != Failure::none) {
      return {failure, meeting_.culprit()};
    }
    if (done == 0) {
      for (std::size_t rank = 0; rank < widths.size(); ++rank) {
        const std::uint64_t call = meeting_.call_of(rank);
        if (kind_of(call) != kGather) return differs(rank);
        widths[rank] = detail_of(call);
        longest = std::max(longest, rows * widths[rank]);
        result_row += widths[rank];
      }
      result = allocate(result_row);
    }
    std::size_t column = 0;
    for (std::size_t rank = 0; rank < widths.size(); ++rank) {
      place(meeting_.piece(rank), result + column, widths[rank], result_row, done, rows * widths[rank]);
      column += widths[rank];
    }
  }
  return {};
}

Outcome Group::same(std::uint64_t call, bool patient) {
  if (const Failure failure = meeting_.meet(call, patient); failure != Failure::none) {
    return {failure, meeting_.culprit()};
  }
  for (std::size_t rank = 0; rank < meeting_.ranks(); ++rank) {
    if (meeting_.call_of(rank) != call) return differs(rank);
  }
  return {};
}

Outcome Group::differs(std::size_t rank) {
  meeting_.abort();
  return {Failure::differs, rank};
}

}  // namespace baton
