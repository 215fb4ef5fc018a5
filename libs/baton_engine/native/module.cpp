// The ranks' collectives over shared memory, for Python: addresses in, a failure and its culprit out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "meeting.hpp"
#include "sums.hpp"

namespace nb = nanobind;
using baton::Element;
using baton::Failure;
using baton::kPiece;

namespace {

// Tells calls of different kinds and sizes apart; sizes are below 2^56.
constexpr std::uint64_t kMeet = 1, kReduce = 2, kGather = 3;
std::uint64_t call_id(std::uint64_t kind, std::uint64_t detail) { return kind << 56 | detail; }

const char* name_of(Failure failure) {
  switch (failure) {
    case Failure::none: return "";
    case Failure::aborted: return "aborted";
    case Failure::dead: return "dead";
    case Failure::late: return "late";
    case Failure::differs: return "differs";
  }
  return "";
}

class Group {
 public:
  using Answer = std::pair<const char*, std::size_t>;

  Group(std::uintptr_t memory, std::size_t ranks, std::size_t rank, std::int64_t patience_us, std::int64_t spin_us)
      : meeting_(reinterpret_cast<void*>(memory), ranks, rank, patience_us, spin_us) {
    if (ranks < 1 || ranks > baton::kMaxRanks || rank >= ranks) throw std::invalid_argument("no such rank");
  }

  void begin(std::uint64_t epoch) { meeting_.begin(epoch); }
  void abort() { meeting_.abort(); }

  Answer meet() {
    const nb::gil_scoped_release release;
    return answer(same(call_id(kMeet, 0), true));
  }

  Answer all_reduce(std::uintptr_t address, std::size_t count, Element element) {
    const nb::gil_scoped_release release;
    auto* data = reinterpret_cast<std::byte*>(address);
    const std::size_t bytes = count * baton::element_bytes(element);
    const std::uint64_t call = call_id(kReduce, bytes << 1 | (element == Element::bfloat16));
    std::vector<const std::byte*> pieces(meeting_.ranks());
    for (std::size_t done = 0; done < bytes; done += kPiece) {
      const std::size_t part = std::min(kPiece, bytes - done);
      std::memcpy(meeting_.own_piece(), data + done, part);
      if (const Failure failure = same(call, false); failure != Failure::none) return answer(failure);
      for (std::size_t rank = 0; rank < pieces.size(); ++rank) pieces[rank] = meeting_.piece(rank);
      baton::add_up(element, pieces, data + done, part / baton::element_bytes(element));
    }
    return answer(Failure::none);
  }

  // `allocate(bytes of a row of the result)` gives the address of the result.
  Answer all_gather(std::uintptr_t address, std::size_t rows, std::size_t row_bytes, nb::callable allocate) {
    const auto* data = reinterpret_cast<const std::byte*>(address);
    const std::size_t bytes = rows * row_bytes, own = meeting_.rank();
    std::vector<std::size_t> widths(meeting_.ranks());
    std::size_t longest = bytes, result_row = 0;
    std::byte* result = nullptr;
    for (std::size_t done = 0; done == 0 || done < longest; done += kPiece) {
      if (done < bytes) {
        std::memcpy(meeting_.own_piece(), data + done, std::min(kPiece, bytes - done));
      }
      Failure failure;
      {
        const nb::gil_scoped_release release;
        failure = meeting_.meet(call_id(kGather, row_bytes));
      }
      if (failure != Failure::none) return answer(failure);
      if (done == 0) {
        for (std::size_t rank = 0; rank < widths.size(); ++rank) {
          const std::uint64_t call = meeting_.call_of(rank);
          if (call >> 56 != kGather) return differs(rank);
          widths[rank] = call & ((std::uint64_t{1} << 56) - 1);
          longest = std::max(longest, rows * widths[rank]);
          result_row += widths[rank];
        }
        result = reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(allocate(result_row)));
      }
      const nb::gil_scoped_release release;
      std::size_t column = 0;
      for (std::size_t rank = 0; rank < widths.size(); ++rank) {
        const std::byte* source = rank == own ? data + done : meeting_.piece(rank);
        place(source, result + column, widths[rank], result_row, done, rows * widths[rank]);
        column += widths[rank];
      }
    }
    return answer(Failure::none);
  }

 private:
  // Bytes [done, done + piece) of a rank's rows, which lie side by side in the result with those of others.
  static void place(const std::byte* source, std::byte* result, std::size_t width, std::size_t stride,
                    std::size_t done, std::size_t bytes) {
    const std::size_t end = std::min(done + kPiece, bytes);
    while (done < end) {
      const std::size_t row = done / width, at = done % width, part = std::min(width - at, end - done);
      std::memcpy(result + row * stride + at, source, part);
      source += part;
      done += part;
    }
  }

  // Meets, and makes sure that all ranks made the same call.
  Failure same(std::uint64_t call, bool patient) {
    const Failure failure = meeting_.meet(call, patient);
    if (failure != Failure::none) return failure;
    for (std::size_t rank = 0; rank < meeting_.ranks(); ++rank) {
      if (meeting_.call_of(rank) != call) {
        meeting_.abort();
        different_ = rank;
        return Failure::differs;
      }
    }
    return Failure::none;
  }

  Answer differs(std::size_t rank) {
    meeting_.abort();
    different_ = rank;
    return answer(Failure::differs);
  }

  Answer answer(Failure failure) const {
    return {name_of(failure), failure == Failure::differs ? different_ : meeting_.culprit()};
  }

  baton::Meeting meeting_;
  std::size_t different_ = 0;
};

}  // namespace

NB_MODULE(_collectives, m) {
  m.attr("MAX_RANKS") = baton::kMaxRanks;
  m.attr("PIECE_BYTES") = kPiece;
  m.def("memory_bytes", &baton::memory_bytes, nb::arg("ranks"));
  nb::enum_<Element>(m, "Element").value("FLOAT32", Element::float32).value("BFLOAT16", Element::bfloat16);
  nb::class_<Group>(m, "Group")
      .def(nb::init<std::uintptr_t, std::size_t, std::size_t, std::int64_t, std::int64_t>(), nb::arg("memory"),
           nb::arg("ranks"), nb::arg("rank"), nb::arg("patience_us"), nb::arg("spin_us"))
      .def("begin", &Group::begin, nb::arg("epoch"))
      .def("abort", &Group::abort)
      .def("meet", &Group::meet)
      .def("all_reduce", &Group::all_reduce, nb::arg("address"), nb::arg("count"), nb::arg("element"))
      .def("all_gather", &Group::all_gather, nb::arg("address"), nb::arg("rows"), nb::arg("row_bytes"),
           nb::arg("allocate"));
}
