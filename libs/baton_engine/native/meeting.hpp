// Where the ranks of a group meet: shared memory with a place for each of them to write what the others read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace baton {

// Bytes that a rank shows the others at a time. Larger tensors go in pieces: 256 KiB of each of four ranks are in the
// cache of one core while they are added up.
inline constexpr std::size_t kPiece = std::size_t{256} << 10;
inline constexpr std::size_t kMaxRanks = 64;

enum class Failure { none, aborted, dead, late, differs };

// A rank's place. What others wait for and what they wait on are in a cache line of their own.
struct alignas(64) Seat {
  // Calls that this rank has made, in its epoch: epoch << 32 | calls. Stored after its piece was written.
  std::atomic<std::uint64_t> arrived;
  // What the call is about: ranks that call something else must not add up what they find. One for each place.
  std::atomic<std::uint64_t> call[2];
  // Changes when `arrived` or the group's end does; sleepers wait on it.
  std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::int32_t> pid;
};

struct Hall {
  // Highest epoch that is over before its end, plus one; and who ended it.
  alignas(64) std::atomic<std::uint64_t> broken;
  std::atomic<std::uint32_t> culprit;
  Seat seats[kMaxRanks];
};

// Bytes of memory that a group of so many ranks needs.
std::size_t memory_bytes(std::size_t ranks);

// One rank's view. Each rank's memory is zero before the first of them comes.
//
// Every rank shows a piece, then waits until all have shown theirs, then reads. There are two places for pieces, used in
// turn: who shows piece n + 2 knows that all have shown n + 1, so have read n.
class Meeting {
 public:
  // `patience_us`: a rank that comes this much later than this one is stuck. `spin_us`: waits this long awake.
  Meeting(void* memory, std::size_t ranks, std::size_t rank, std::int64_t patience_us, std::int64_t spin_us);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // A new epoch, higher than the last: all ranks begin it, and none before all have left the former.
  void begin(std::uint64_t epoch);
  // No rank gets through a call of this epoch any more.
  void abort();

  std::byte* own_piece();
  // What rank `rank` has shown in the present call.
  const std::byte* piece(std::size_t rank) const;
  // Shows the piece, and waits until all ranks have shown theirs; with `patient` for as long as they live.
  Failure meet(std::uint64_t call, bool patient = false);
  std::uint64_t call_of(std::size_t rank) const;

  // The rank that the last failure was about.
  std::size_t culprit() const { return culprit_; }
  std::size_t ranks() const { return ranks_; }
  std::size_t rank() const { return rank_; }

 private:
  Failure await(std::size_t rank, bool patient);
  bool is_broken();
  bool is_dead(std::size_t rank);
  void fail(std::size_t culprit);

  Hall& hall_;
  std::byte* pieces_;
  std::size_t ranks_, rank_, culprit_ = 0;
  std::int64_t patience_us_, spin_us_;
  std::uint64_t epoch_ = 0, calls_ = 0;
  std::vector<int> pidfds_;
};

}  // namespace baton
