#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <rdma/fabric.h>

#include "domain.hpp"
#include "metrics.hpp"
#include "strand.hpp"

namespace baton::fabric {

class Faults;
class Lane;
class Peer;

// What the provider keeps of a write until it completes.
struct WriteContext {
    fi_context2 reserved;  // the provider's own
    Lane *lane = nullptr;
    Strand *strand = nullptr;  // null while not in flight
    uint64_t sequence = 0;
    uint64_t posted_ns = 0;
    uint64_t length = 0;
    bool delivery = false;
    WriteContext *next_free = nullptr;
};

// As many contexts as a lane may have writes in flight. Outlives its lane: completions that were under way when the
// endpoint was closed still name it.
using ContextBlock = std::unique_ptr<WriteContext[]>;

// From one domain of ours to one endpoint of a peer, over an endpoint of its own: its window, its order of transfers,
// and what is proven delivered.
class Lane {
  public:
    enum class Post { kPosted, kNoRoom, kRefused, kFailed };

    // `number` is the domain's, `remote` the endpoint's among the peer's.
    Lane(Peer &peer, uint32_t number, uint32_t remote, Domain &domain, const std::string &address,
         ContextBlock contexts, uint32_t window, Metrics &metrics, DomainMetrics &domain_metrics);

    Peer &peer() const { return peer_; }
    uint32_t domain() const { return number_; }
    uint32_t remote() const { return remote_; }
    // See SendingEndpoint.
    int process_fd() const { return endpoint_->process_fd(); }

    // Strands with a batch to send, in turn.
    void push_ready(Strand &strand, uint64_t now);
    Strand *front() const { return first_; }
    void rotate();
    void remove_ready(Strand &strand);

    // Posts the next write of a strand. kFailed: `error` has the provider's words.
    // `faults`: null unless the provider is to look worse than it is.
    Post post(Strand &strand, uint64_t now, std::string &error, Faults *faults);
    // A completion that was not an error; the context is free afterwards.
    void complete(WriteContext &context, uint64_t now);

    uint32_t in_flight() const { return in_flight_; }
    bool busy() const { return in_flight_ != 0 || first_ != nullptr; }
    // May posting be tried: something to send, room, and not refused just now.
    bool may_post(uint64_t now) const { return first_ != nullptr && has_room() && now >= retry_ns_; }
    // When to try again what was refused; nothing if completions will tell.
    std::optional<uint64_t> retry_ns() const;

    // No write of the strand can still touch remote memory.
    bool delivered(const Strand &strand) const;
    // It took writes before, has none in flight, and refuses the next: the connection is gone and must be made again.
    bool cut_off() const { return posted_sequence_ != 0 && in_flight_ == 0 && retry_ns_ != 0; }
    uint64_t last_progress_ns() const { return last_progress_ns_; }
    void forgive(uint64_t now) { last_progress_ns_ = now; }
    // When the oldest write in flight was posted; the maximum if there is none.
    uint64_t oldest_post_ns() const;

    // Closes the endpoint: local memory is not read any more. The contexts still belong to the provider until the
    // domain's completion queue has been found empty.
    ContextBlock close();

  private:
    bool has_room() const;

    Peer &peer_;
    uint32_t number_;
    uint32_t remote_;
    Metrics &metrics_;
    DomainMetrics &domain_metrics_;
    bool ordered_;
    std::unique_ptr<SendingEndpoint> endpoint_;
    uint32_t window_;
    ContextBlock contexts_;
    WriteContext *free_ = nullptr;
    Strand *first_ = nullptr;
    Strand *last_ = nullptr;
    uint32_t in_flight_ = 0;
    uint64_t bytes_in_flight_ = 0;
    uint64_t posted_sequence_ = 0;
    uint64_t delivered_sequence_ = 0;
    uint64_t last_progress_ns_ = 0;
    uint64_t retry_ns_ = 0;
    uint64_t retry_delay_ns_ = 0;
};

}  // namespace baton::fabric
