// Ranks as threads, for the sanitizers: sums and rows of every size, and steps that one of them gives up.
//
//   group_stress SECONDS
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "group.hpp"

using namespace baton;

namespace {

constexpr std::size_t kCallsAStep = 8;

[[noreturn]] void fail(const char* what, std::size_t rank) {
  std::fprintf(stderr, "rank %zu: %s\n", rank, what);
  std::exit(1);
}

// False if the step is over.
bool reduce(Group& group, std::size_t rank, std::size_t ranks, std::size_t count) {
  std::vector<float> data(count, static_cast<float>(rank + 1));
  const Outcome outcome = group.all_reduce(reinterpret_cast<std::byte*>(data.data()), count, Element::float32);
  if (outcome.failure != Failure::none) return false;
  for (const float value : data) {
    if (value != static_cast<float>(ranks * (ranks + 1) / 2)) fail("a wrong sum", rank);
  }
  return true;
}

bool gather(Group& group, std::size_t rank, std::size_t ranks, std::size_t rows, std::size_t width) {
  const std::vector<std::byte> data(rows * (width + rank), static_cast<std::byte>(rank + 1));
  std::vector<std::byte> result;
  const Outcome outcome = group.all_gather(data.data(), rows, width + rank, [&](std::size_t bytes) {
    result.resize(rows * bytes);
    return result.data();
  });
  if (outcome.failure != Failure::none) return false;
  const std::byte* at = result.data();
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t other = 0; other < ranks; ++other) {
      for (std::size_t i = 0; i < width + other; ++i) {
        if (*at++ != static_cast<std::byte>(other + 1)) fail("a wrong row", rank);
      }
    }
  }
  return true;
}

// All ranks draw the same numbers, so that they make the same calls.
void step(Group& group, std::size_t rank, std::size_t ranks, std::uint64_t number) {
  std::mt19937_64 draw(number);
  group.begin(number + 1);
  const bool is_given_up = draw() % 3 == 0;
  const std::size_t who = draw() % ranks, when = draw() % kCallsAStep;
  for (std::size_t call = 0; call < kCallsAStep; ++call) {
    if (is_given_up && rank == who && call == when) return group.abort();
    // Mostly small, sometimes of several pieces.
    const std::size_t size = draw() % (draw() % 8 == 0 ? 3 * kPiece / 4 : 600);
    const bool is_sum = draw() % 2 == 0;
    if (!(is_sum ? reduce(group, rank, ranks, size) : gather(group, rank, ranks, 1 + draw() % 3, 1 + size))) {
      if (!is_given_up) fail("a call failed for no reason", rank);
      return;
    }
  }
}

void run(std::size_t ranks, double seconds) {
  const std::size_t bytes = memory_bytes(ranks);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no memory", 0);
  std::vector<Group*> groups;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    groups.push_back(new Group(memory, ranks, rank, 60'000'000, rank % 2 == 0 ? 0 : 5));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t number = 0;
  for (; std::chrono::steady_clock::now() < end; ++number) {
    // No rank begins a step before all have left the former: whoever drives an engine sees to that.
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] { step(*groups[rank], rank, ranks, number); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (const Group* group : groups) delete group;
  munmap(memory, bytes);
  std::printf("%zu ranks: %llu steps\n", ranks, static_cast<unsigned long long>(number));
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 3;
  for (const std::size_t ranks : {2, 3, 4}) run(ranks, seconds / 3);
  return 0;
}
