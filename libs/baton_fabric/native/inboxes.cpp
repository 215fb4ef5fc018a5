#include "inboxes.hpp"

#include "error.hpp"

#include <limits>
#include <string>

namespace baton::fabric {

void InboxTable::open(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected,
                      std::vector<uint64_t> regions, uint64_t now) {
    if (slot >= Immediate::kSlots || generation > std::numeric_limits<uint32_t>::max()) {
        throw invalid("BAD_ARGUMENT",
                      "slot " + std::to_string(slot) + ", generation " + std::to_string(generation) +
                          ": a slot is below " + std::to_string(Immediate::kSlots) + ", a generation below 2^32",
                      {{"slot", std::to_string(slot)}, {"generation", std::to_string(generation)}});
    }
    Inbox &inbox = slots_[slot];
    if (inbox.state != Inbox::State::kClosed) {
        throw Error(
            "inbox slot " + std::to_string(slot) + " is in use by generation " + std::to_string(inbox.generation),
            "ALREADY_EXISTS", "SLOT_IN_USE", {{"slot", std::to_string(slot)}});
    }
    for (const auto region : regions) {
        regions_.at(region);
    }
    for (const auto region : regions) {
        ++regions_.at(region).inboxes;
    }
    inbox =
        Inbox{Inbox::State::kWaiting, static_cast<uint32_t>(generation), endpoint, expected, 0, 0, std::move(regions)};
    ++active_;
    metrics_.inboxes.add();
    if (expected == 0) {
        settle(inbox, Inbox::State::kFull);
        metrics_.inboxes_full.add();
        events_.push(InboxFull{static_cast<uint32_t>(slot), inbox.generation, 0, now, now});
    }
}

void InboxTable::arrived(uint32_t bits, uint64_t now) {
    const auto immediate = Immediate::decode(bits);
    Inbox &inbox = slots_[immediate.slot];
    metrics_.immediates.add();
    if (inbox.state == Inbox::State::kClosed || immediate.generation != inbox.generation % Immediate::kGenerations) {
        metrics_.stale_immediates.add();
        return;
    }
    metrics_.extents_received.add(immediate.extents);
    inbox.extents += immediate.extents;
    if (inbox.first_ns == 0) {
        inbox.first_ns = now;
    }
    if (inbox.extents > inbox.expected) {
        if (inbox.state != Inbox::State::kViolated) {
            settle(inbox, Inbox::State::kViolated);
            metrics_.violations.add();
            events_.push(InboxViolation{immediate.slot, inbox.generation, inbox.expected, inbox.extents});
        }
    } else if (inbox.extents == inbox.expected && inbox.state == Inbox::State::kWaiting) {
        settle(inbox, Inbox::State::kFull);
        metrics_.inboxes_full.add();
        events_.push(InboxFull{immediate.slot, inbox.generation, inbox.extents, inbox.first_ns, now});
    }
}

void InboxTable::settle(Inbox &inbox, Inbox::State state) {
    active_ -= inbox.active() ? 1 : 0;
    // A violated inbox keeps its regions until it is closed: its sender writes what was not agreed.
    if (state != Inbox::State::kViolated) {
        for (const auto region : inbox.regions) {
            --regions_.at(region).inboxes;
        }
        inbox.regions.clear();
    }
    inbox.state = state;
    active_ += inbox.active() ? 1 : 0;
}

bool InboxTable::close(Inbox &inbox) {
    const bool was_full = inbox.state == Inbox::State::kFull;
    settle(inbox, Inbox::State::kClosed);
    metrics_.inboxes.subtract();
    return was_full;
}

bool InboxTable::close(uint64_t slot, uint64_t generation) {
    if (slot >= Immediate::kSlots) {
        return false;
    }
    Inbox &inbox = slots_[slot];
    return inbox.state != Inbox::State::kClosed && inbox.generation == generation && close(inbox);
}

std::vector<std::pair<uint32_t, uint32_t>> InboxTable::close_all(uint64_t endpoint) {
    std::vector<std::pair<uint32_t, uint32_t>> dropped;
    for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
        Inbox &inbox = slots_[slot];
        if (inbox.state != Inbox::State::kClosed && inbox.endpoint == endpoint && !close(inbox)) {
            dropped.emplace_back(slot, inbox.generation);
        }
    }
    return dropped;
}

}  // namespace baton::fabric
