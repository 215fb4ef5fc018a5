// The ranks' collectives over shared memory, for Python: addresses in, a failure and its culprit out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "group.hpp"

namespace nb = nanobind;
using baton::Element;
using baton::Failure;
using baton::Group;
using baton::Outcome;

namespace {

using Answer = std::pair<const char*, std::size_t>;

Answer answer(const Outcome& outcome) {
  const char* name = "";
  switch (outcome.failure) {
    case Failure::none: break;
    case Failure::aborted: name = "aborted"; break;
    case Failure::dead: name = "dead"; break;
    case Failure::late: name = "late"; break;
    case Failure::differs: name = "differs"; break;
  }
  return {name, outcome.culprit};
}

std::byte* at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

NB_MODULE(_collectives, m) {
  m.attr("MAX_RANKS") = baton::kMaxRanks;
  m.attr("PIECE_BYTES") = baton::kPiece;
  m.def("memory_bytes", &baton::memory_bytes, nb::arg("ranks"));
  nb::enum_<Element>(m, "Element").value("FLOAT32", Element::float32).value("BFLOAT16", Element::bfloat16);
  nb::class_<Group>(m, "Group")
      .def(
          "__init__",
          [](Group* self, std::uintptr_t memory, std::size_t ranks, std::size_t rank, std::int64_t patience_us,
             std::int64_t spin_us) { new (self) Group(at(memory), ranks, rank, patience_us, spin_us); },
          nb::arg("memory"), nb::arg("ranks"), nb::arg("rank"), nb::arg("patience_us"), nb::arg("spin_us"))
      .def("begin", &Group::begin, nb::arg("epoch"))
      .def("abort", &Group::abort)
      .def("meet",
           [](Group& self) {
             const nb::gil_scoped_release release;
             return answer(self.meet());
           })
      .def(
          "all_reduce",
          [](Group& self, std::uintptr_t address, std::size_t count, Element element) {
            const nb::gil_scoped_release release;
            return answer(self.all_reduce(at(address), count, element));
          },
          nb::arg("address"), nb::arg("count"), nb::arg("element"))
      .def(
          "all_gather",
          [](Group& self, std::uintptr_t address, std::size_t rows, std::size_t row_bytes, const nb::callable& allocate) {
            const nb::gil_scoped_release release;
            return answer(self.all_gather(at(address), rows, row_bytes, [&](std::size_t bytes) {
              const nb::gil_scoped_acquire acquire;
              return at(nb::cast<std::uintptr_t>(allocate(bytes)));
            }));
          },
          nb::arg("address"), nb::arg("rows"), nb::arg("row_bytes"), nb::arg("allocate"));
}
