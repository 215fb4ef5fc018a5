#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "events.hpp"
#include "immediate.hpp"
#include "metrics.hpp"
#include "regions.hpp"

namespace baton::fabric {

// Counts what arrives, by slot.
class InboxTable {
  public:
    InboxTable(RegionTable &regions, EventQueue &events, Metrics &metrics)
        : regions_(regions), events_(events), metrics_(metrics), slots_(Immediate::kSlots) {}

    // `generation` may be larger than the 8 bits that travel. `regions`: those that may be written through the inbox.
    void open(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected, std::vector<uint64_t> regions,
              uint64_t now);
    // Whether it was full; false too where there is none.
    bool close(uint64_t slot, uint64_t generation);
    // Closes those of an endpoint; returns (slot, generation) of each that was not full.
    std::vector<std::pair<uint32_t, uint32_t>> close_all(uint64_t endpoint);

    void arrived(uint32_t immediate, uint64_t now);

    // How many inboxes have a sender that may still be writing.
    uint32_t active() const { return active_; }

  private:
    struct Inbox {
        enum class State { kClosed, kWaiting, kFull, kViolated };
        bool active() const { return state == State::kWaiting || state == State::kViolated; }

        State state = State::kClosed;
        uint32_t generation = 0;
        uint64_t endpoint = 0;
        uint64_t expected = 0;
        uint64_t extents = 0;
        uint64_t first_ns = 0;
        std::vector<uint64_t> regions;
    };

    void settle(Inbox &inbox, Inbox::State state);
    bool close(Inbox &inbox);

    RegionTable &regions_;
    EventQueue &events_;
    Metrics &metrics_;
    std::vector<Inbox> slots_;
    uint32_t active_ = 0;
};

}  // namespace baton::fabric
