#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "counters.hpp"
#include "domain.hpp"
#include "events.hpp"
#include "metrics.hpp"
#include "peer.hpp"
#include "regions.hpp"
#include "transfer.hpp"

namespace baton::fabric {

// The sending side of an engine: peers, transfers, and the life of each to its one terminal event.
class Sender {
  public:
    Sender(const DomainList &domains, EventQueue &events, Metrics &metrics, uint64_t post_timeout_ns);
    ~Sender();

    // Commands; see _native.pyi.
    // Opens the lanes between these domains and all addresses; further lanes are opened when a transfer
    // first needs them.
    Peer &connect(std::vector<std::string> addresses, const std::vector<uint32_t> &domains);
    void disconnect(uint64_t peer);
    void open(uint64_t peer, LayerCounter &counter, TransferPlan plan, uint64_t now);
    void submit(const std::vector<std::pair<uint64_t, Chunk>> &chunks, uint64_t now);
    void cancel(uint64_t transfer);
    // Fails every transfer and closes every peer.
    void close(const char *reason);

    // What happens.
    void counter_moved(LayerCounter &counter, uint64_t now);
    void completed(WriteContext &context, uint64_t now);
    void write_failed(WriteContext &context, const std::string &detail);
    void peer_lost(uint64_t peer, const std::string &detail);
    // The completion queue of a domain was found empty: nothing names the contexts of its closed lanes any more.
    void queue_empty(uint32_t domain);
    void check_deadlines(uint64_t now);
    // The thread itself did not run for a while: that is no peer's fault.
    void forgive(uint64_t now);

    // Posts what is ready, a bounded amount; true if there is more that could be posted now.
    bool post(uint64_t now);
    // The earliest time at which check_deadlines or post has something to do; the maximum if there is none.
    uint64_t next_time_ns() const;
    bool writes_in_flight() const { return metrics_.writes_in_flight.get() != 0; }
    uint32_t window() const { return window_; }
    // Hears of each lane that is opened.
    void set_on_lane(std::function<void(const Lane &)> on_lane) { on_lane_ = std::move(on_lane); }
    // For tests; null for none. Must outlive the sender's use of it.
    void set_faults(Faults *faults) { faults_ = faults; }

  private:
    Lane &lane(Peer &peer, uint32_t domain, uint32_t endpoint);
    void post_turn(Lane &lane, uint64_t now);
    void enqueue(Strand &strand, uint64_t now);
    void enqueue(Transfer &transfer, uint64_t now);
    void stop_waiting(Transfer &transfer);
    // Ends the transfer if nothing is left to do for it.
    void finish(Transfer &transfer);
    void end(Transfer &transfer, Event event);
    void fail(Peer &peer, const char *reason, const std::string &detail);
    void fail_transfers(Peer &peer, const char *reason);
    // How long a lane may make no progress.
    uint64_t patience(const Lane &lane) const;
    ContextBlock take_contexts();
    void check_deadlines(Peer &peer, uint64_t now, bool oldest_too);

    const DomainList &domains_;
    EventQueue &events_;
    Metrics &metrics_;
    uint64_t post_timeout_ns_;
    uint64_t next_oldest_check_ns_ = 0;
    uint32_t window_;
    WriteLimits limits_;
    uint64_t next_peer_ = 1;
    size_t turn_ = 0;
    Faults *faults_ = nullptr;
    std::function<void(const Lane &)> on_lane_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::unordered_map<uint64_t, std::unique_ptr<Transfer>> transfers_;
    std::deque<ContextBlock> free_contexts_;
    std::vector<std::pair<uint32_t, ContextBlock>> retired_contexts_;  // by domain
};

}  // namespace baton::fabric
