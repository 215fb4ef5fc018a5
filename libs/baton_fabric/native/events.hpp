#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "resources.hpp"

namespace baton::fabric {

// Events and their fields are described in _native.pyi.
struct TransferStats {
    uint64_t bytes = 0;
    uint64_t pages = 0;
    uint64_t extents = 0;
    uint64_t writes = 0;
    uint64_t first_ready_ns = 0;
    uint64_t first_post_ns = 0;
    uint64_t last_completion_ns = 0;
    uint64_t final_layer_ns = 0;

    uint64_t duration_us() const;
    uint64_t overlapped_us() const;
    uint64_t exposed_us() const;
    uint64_t first_post_us() const;
};

struct InboxFull {
    uint32_t slot;
    uint32_t generation;
    uint64_t extents;
    uint64_t first_ns;
    uint64_t full_ns;
};
struct InboxViolation {
    uint32_t slot;
    uint32_t generation;
    uint64_t expected;
    uint64_t extents;
};
struct TransferDone {
    uint64_t transfer;
    TransferStats stats;
};
struct TransferFailed {
    uint64_t transfer;
    std::string reason;
    bool quiesced;
    TransferStats stats;
};
struct TransferCancelled {
    uint64_t transfer;
    bool quiesced;
    TransferStats stats;
};
struct PeerFailed {
    uint64_t peer;
    std::string reason;
    std::string detail;
};
struct EngineFailed {
    std::string detail;
};

using Event =
    std::variant<InboxFull, InboxViolation, TransferDone, TransferFailed, TransferCancelled, PeerFailed, EngineFailed>;

// From the progress thread to whoever waits on fd().
class EventQueue {
  public:
    EventQueue();
    void push(Event event);
    std::vector<Event> take();
    int fd() const { return fd_.get(); }

  private:
    UniqueFd fd_;
    std::mutex mutex_;
    std::vector<Event> events_;
};

}  // namespace baton::fabric
