#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "counters.hpp"
#include "endpoint.hpp"
#include "events.hpp"
#include "plan.hpp"
#include "strand.hpp"

namespace baton::fabric {

class Lane;
class Peer;

// One transfer at its sender: its plan, and a strand for each lane that it uses. The strands go on each at its lane's
// pace.
class Transfer {
  public:
    // Which lane leads from a domain of ours to an endpoint of the peer.
    using Lanes = std::function<Lane &(uint32_t domain, uint32_t endpoint)>;

    // Throws Error if anything would lie outside the regions described.
    Transfer(TransferPlan plan, LayerCounter &counter, Peer &peer, const WriteLimits &limits, const Lanes &lanes);
    Transfer(const Transfer &) = delete;
    Transfer &operator=(const Transfer &) = delete;

    uint64_t id() const { return plan_.id; }
    LayerCounter &counter() const { return counter_; }
    Peer &peer() const { return peer_; }
    const std::vector<Stream> &streams() const { return plan_.streams; }
    uint64_t layers() const { return plan_.layers; }
    uint64_t pages() const { return plan_.source_pages.size(); }
    uint32_t source_page(uint64_t position) const { return plan_.source_pages[position]; }
    uint32_t destination_page(uint64_t position) const { return plan_.destination_pages[position]; }
    std::deque<Strand> &strands() { return strands_; }
    const Planned &planned() const { return planned_; }
    uint32_t immediate(const Write &write) const;

    // Takes a chunk that Planned::after has accepted.
    void plan(const Chunk &chunk);
    // Notes what the counter says now, for the statistics.
    void observe(uint64_t now);
    // A write of one of its strands was posted.
    void count(const Write &write);

    // Nothing will ever have to be sent: no pages, or none of their bytes.
    bool empty() const { return plan_.streams.empty() || pages() == 0; }
    // Of any strand.
    bool has_batch() const;
    bool batch_begun() const;
    bool all_posted() const;
    // See Strand.
    void end_early();
    // No write of it can still touch remote memory.
    bool delivered() const;

    TransferStats stats;
    bool cancelled = false;
    bool is_waiting = false;  // in its counter's list
    uint32_t in_flight = 0;

  private:
    Strand &strand_of(Lane &lane, uint64_t coalesced);
    void spread(const Stream &stream, uint64_t number, const WriteLimits &limits, const Lanes &lanes);

    TransferPlan plan_;
    LayerCounter &counter_;
    Peer &peer_;
    std::deque<Strand> strands_;  // few, and they stay where they are
    Planned planned_;
    uint64_t final_value_ = 0;  // of the counter, when the last planned chunk has its last layer
};

}  // namespace baton::fabric
