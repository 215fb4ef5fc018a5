#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "resources.hpp"

namespace baton::fabric {

// One write, as the sender asks the receiver to carry it out.
struct alignas(64) RingEntry {
    uint64_t region;       // of the sender, announced on the socket
    uint64_t source;       // offset in it
    uint64_t key;          // of the receiver's region
    uint64_t destination;  // offset in it
    uint64_t length;
    uint32_t immediate;
};

// The memory that a sender shares with its receiver: writes that wait. One side puts in, the other takes out; whatever
// the other side stored is checked before it is used. Positions count from 0 and never wrap.
class Ring {
  public:
    static constexpr uint64_t kEntries = 256;
    // In `tail`: the sender has closed the ring, so nothing can be committed any more.
    static constexpr uint64_t kClosed = uint64_t{1} << 63;
    static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

    // Each on a cache line of its own, because each has another writer or another rhythm.
    struct Header {
        // Entries below are the receiver's. Stored by the sender.
        alignas(64) std::atomic<uint64_t> head;
        // Entries below are done: the bytes are in place and will be counted. Moved by the receiver with compare and
        // exchange, so that it and the sender's closing exclude each other.
        alignas(64) std::atomic<uint64_t> tail;
        // The receiver blocks: set by it, taken back by whoever is first.
        alignas(64) std::atomic<uint32_t> receiver_sleeps;
        // The sender blocks until the tail gets there; kNever if it does not.
        alignas(64) std::atomic<uint64_t> wake_sender_at;
    };

    // New memory, of a size that nobody can change. Throws Error.
    static Ring create();
    // That of another process. Throws Error unless it is such memory.
    static Ring open(UniqueFd fd);

    int fd() const { return fd_.get(); }
    Header &header() { return *static_cast<Header *>(memory_.address()); }
    RingEntry &entry(uint64_t position) {
        char *entries = static_cast<char *>(memory_.address()) + sizeof(Header);
        return reinterpret_cast<RingEntry *>(entries)[position % kEntries];
    }

  private:
    explicit Ring(UniqueFd fd);

    UniqueFd fd_;
    Mapping memory_;
};

static_assert(sizeof(RingEntry) == 64 && sizeof(Ring::Header) == 256);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace baton::fabric
