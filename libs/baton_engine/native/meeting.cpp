#include "meeting.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <new>

namespace baton {
namespace {

// While a rank waits it looks this often whether those it waits for still live.
constexpr std::int64_t kLookUs = 20'000;
constexpr int kUnknown = -1, kNone = -2;

std::int64_t now_us() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1'000;
}

// Not private futexes: the ranks are processes.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t us) {
  const timespec limit{.tv_sec = us / 1'000'000, .tv_nsec = us % 1'000'000 * 1'000};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::size_t hall_bytes() { return (sizeof(Hall) + 4095) / 4096 * 4096; }

}  // namespace

std::size_t memory_bytes(std::size_t ranks) { return hall_bytes() + ranks * 2 * kPiece; }

Meeting::Meeting(void* memory, std::size_t ranks, std::size_t rank, std::int64_t patience_us, std::int64_t spin_us)
    : hall_(*std::launder(static_cast<Hall*>(memory))),
      pieces_(static_cast<std::byte*>(memory) + hall_bytes()),
      ranks_(ranks),
      rank_(rank),
      patience_us_(patience_us),
      spin_us_(spin_us),
      pidfds_(ranks, kUnknown) {
  hall_.seats[rank].pid.store(static_cast<std::int32_t>(getpid()), std::memory_order_release);
}

Meeting::~Meeting() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void Meeting::begin(std::uint64_t epoch) {
  epoch_ = epoch;
  calls_ = 0;
}

void Meeting::abort() { fail(rank_); }

void Meeting::fail(std::size_t culprit) {
  culprit_ = culprit;
  std::uint64_t broken = hall_.broken.load();
  while (broken <= epoch_) {
    hall_.culprit.store(static_cast<std::uint32_t>(culprit));
    if (hall_.broken.compare_exchange_weak(broken, epoch_ + 1)) break;
  }
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    Seat& seat = hall_.seats[rank];
    seat.bell.fetch_add(1);
    if (seat.sleepers.load() != 0) wake(seat.bell);
  }
}

std::byte* Meeting::own_piece() { return pieces_ + (rank_ * 2 + calls_ % 2) * kPiece; }

// `meet` has counted the call already.
const std::byte* Meeting::piece(std::size_t rank) const { return pieces_ + (rank * 2 + (calls_ - 1) % 2) * kPiece; }

std::uint64_t Meeting::call_of(std::size_t rank) const {
  return hall_.seats[rank].call[(calls_ - 1) % 2].load(std::memory_order_relaxed);
}

Failure Meeting::meet(std::uint64_t call, bool patient) {
  Seat& own = hall_.seats[rank_];
  own.call[calls_ % 2].store(call, std::memory_order_relaxed);
  ++calls_;
  // Sequentially consistent with the load of `sleepers`, as a sleeper's two are: one of the two sees the other.
  own.arrived.store(epoch_ << 32 | calls_);
  own.bell.fetch_add(1);
  if (own.sleepers.load() != 0) wake(own.bell);
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    const Failure failure = await(rank, patient);
    if (failure != Failure::none) return failure;
  }
  // Also if all had come: who is late must not go on alone.
  return is_broken() ? Failure::aborted : Failure::none;
}

bool Meeting::is_broken() {
  if (hall_.broken.load() <= epoch_) return false;
  culprit_ = hall_.culprit.load();
  return true;
}

Failure Meeting::await(std::size_t rank, bool patient) {
  Seat& seat = hall_.seats[rank];
  const std::uint64_t wanted = epoch_ << 32 | calls_;
  const auto here = [&] { return seat.arrived.load(std::memory_order_acquire) >= wanted; };
  if (here()) return Failure::none;
  const std::int64_t began = now_us();
  if (spin_us_ > 0) {
    do {
      for (int i = 0; i < 32; ++i) {
        if (here()) return Failure::none;
        relax();
      }
    } while (now_us() - began < spin_us_);
  }
  seat.sleepers.fetch_add(1);
  Failure failure = Failure::none;
  while (true) {
    const std::uint32_t seen = seat.bell.load();
    if (here()) break;
    if (is_broken()) {
      failure = Failure::aborted;
      break;
    }
    sleep_on(seat.bell, seen, kLookUs);
    // Looked at after the sleep, so that its last act counts.
    if (seat.bell.load() != seen) continue;
    if (is_dead(rank) && !here()) {
      failure = Failure::dead;
    } else if (!patient && now_us() - began > patience_us_) {
      failure = Failure::late;
    }
    if (failure != Failure::none) {
      // Told to the others, who may be waiting for somebody else.
      fail(rank);
      break;
    }
  }
  seat.sleepers.fetch_sub(1);
  return failure;
}

bool Meeting::is_dead(std::size_t rank) {
  int& fd = pidfds_[rank];
  if (fd == kUnknown) {
    const std::int32_t pid = hall_.seats[rank].pid.load(std::memory_order_acquire);
    // It has not come yet; or it is a thread of this process.
    if (pid == 0) return false;
    fd = pid == getpid() ? kNone : static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    // ESRCH: it is gone and reaped. Anything else: this kernel can't say, and whoever started the ranks has to.
    if (fd == -1) {
      fd = kNone;
      return errno == ESRCH;
    }
  }
  if (fd == kNone) return false;
  pollfd poll_fd{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&poll_fd, 1, 0) == 1;
}

}  // namespace baton
