#include "sender.hpp"

#include "error.hpp"
#include "faults.hpp"
#include "spread.hpp"

#include <algorithm>
#include <limits>

namespace baton::fabric {
namespace {

// Neighbours are joined up to here: over tcp 1 MiB moves at 5.6 GB/s, 256 KiB at 4 to 6, 4 MiB at 4.4.
constexpr uint64_t kCoalescedBytes = 1 << 20;
// A transfer posts at most this much, or one write, before the next has its turn; a peer four times as much at each
// domain.
constexpr uint64_t kTransferTurnBytes = 256 << 10;
constexpr uint64_t kPeerTurnBytes = 4 * kTransferTurnBytes;
constexpr uint32_t kPeerTurnWrites = 64;
// One write may be overtaken by others for this many timeouts.
constexpr uint64_t kOldestWriteTimeouts = 4;
// A connection that is lost between two writes is shown by nothing but refusals, for ever; one takes milliseconds to
// make. Only a killed peer of which no write was in flight is noticed by this.
constexpr uint64_t kReconnectNs = 500'000'000;

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

}  // namespace

Sender::Sender(const DomainList &domains, EventQueue &events, Metrics &metrics, uint64_t post_timeout_ns)
    : domains_(domains), events_(events), metrics_(metrics), post_timeout_ns_(post_timeout_ns) {
    uint64_t window = std::numeric_limits<uint32_t>::max();
    uint64_t largest = std::numeric_limits<uint64_t>::max();
    for (const auto &domain : domains) {
        const auto &capabilities = domain->capabilities();
        window = std::min(window, std::clamp<uint64_t>(capabilities.tx_size, 1, capabilities.useful_window));
        largest = std::min(largest, capabilities.max_msg_size);
    }
    window_ = static_cast<uint32_t>(window);
    limits_ = {largest, std::min(largest, kCoalescedBytes)};
}

Sender::~Sender() = default;

Peer &Sender::connect(std::vector<std::string> addresses, const std::vector<uint32_t> &domains) {
    if (addresses.empty()) {
        throw invalid("BAD_ADDRESS", "a peer has at least one address");
    }
    auto peer = std::make_unique<Peer>(next_peer_, std::move(addresses));
    for (const auto &meeting : meet(static_cast<uint32_t>(domains.size()), static_cast<uint32_t>(peer->addresses().size()))) {
        lane(*peer, domains[meeting.source], meeting.destination);
    }
    ++next_peer_;
    metrics_.peers.add();
    return *peers_.emplace_back(std::move(peer));
}

Lane &Sender::lane(Peer &peer, uint32_t domain, uint32_t endpoint) {
    if (Lane *found = peer.find(domain, endpoint)) {
        return *found;
    }
    Lane &opened = peer.add(std::make_unique<Lane>(peer, domain, endpoint, *domains_[domain],
                                                   peer.addresses()[endpoint], take_contexts(), window_, metrics_,
                                                   metrics_.domains[domain]));
    if (on_lane_) {
        on_lane_(opened);
    }
    return opened;
}

ContextBlock Sender::take_contexts() {
    if (free_contexts_.empty()) {
        return std::make_unique<WriteContext[]>(window_);
    }
    ContextBlock block = std::move(free_contexts_.front());
    free_contexts_.pop_front();
    return block;
}

void Sender::queue_empty(uint32_t domain) {
    for (auto &[of, contexts] : retired_contexts_) {
        if (of == domain) {
            free_contexts_.push_back(std::move(contexts));
        }
    }
    std::erase_if(retired_contexts_, [](const auto &retired) { return retired.second == nullptr; });
}

void Sender::disconnect(uint64_t id) {
    const auto found = std::find_if(peers_.begin(), peers_.end(), [id](const auto &peer) { return peer->id() == id; });
    if (found == peers_.end()) {
        return;
    }
    Peer &peer = **found;
    fail_transfers(peer, "DISCONNECTED");
    peers_.erase(found);
    metrics_.peers.subtract();
}

void Sender::close(const char *reason) {
    for (auto &peer : peers_) {
        fail_transfers(*peer, reason);
    }
    metrics_.peers.subtract(peers_.size());
    peers_.clear();
}

void Sender::open(uint64_t peer_id, LayerCounter &counter, TransferPlan plan, uint64_t now) {
    const auto found =
        std::find_if(peers_.begin(), peers_.end(), [peer_id](const auto &peer) { return peer->id() == peer_id; });
    if (found == peers_.end()) {
        throw unknown("peer", "UNKNOWN_PEER", peer_id);
    }
    Peer &peer = **found;
    if (peer.failed()) {
        throw Error("peer " + std::to_string(peer_id) + " failed earlier; connect again", "UNAVAILABLE", "PEER_FAILED",
                    {{"peer", std::to_string(peer_id)}});
    }
    if (transfers_.contains(plan.id)) {
        throw Error("transfer " + std::to_string(plan.id) + " is open already", "ALREADY_EXISTS", "TRANSFER_EXISTS",
                    {{"transfer", std::to_string(plan.id)}});
    }
    plan.check(limits_, peer.addresses().size());
    auto transfer = std::make_unique<Transfer>(
        std::move(plan), counter, peer, limits_,
        [this, &peer](uint32_t domain, uint32_t endpoint) -> Lane & { return lane(peer, domain, endpoint); });
    Transfer &opened = *transfer;
    for (const auto &stream : opened.streams()) {
        ++stream.region->transfers;
    }
    ++counter.transfers;
    transfers_.emplace(opened.id(), std::move(transfer));
    metrics_.transfers.add();
    if (opened.empty()) {
        opened.stats.final_layer_ns = now;
        metrics_.transfers_done.add();
        end(opened, TransferDone{opened.id(), opened.stats});
    }
}

void Sender::submit(const std::vector<std::pair<uint64_t, Chunk>> &chunks, uint64_t now) {
    const auto live = [this](uint64_t id) -> Transfer * {
        const auto found = transfers_.find(id);
        return found == transfers_.end() || found->second->cancelled ? nullptr : found->second.get();
    };
    std::unordered_map<uint64_t, Planned> planned;
    for (const auto &[id, chunk] : chunks) {
        if (const Transfer *transfer = live(id)) {
            Planned &sofar = planned.try_emplace(id, transfer->planned()).first->second;
            sofar = sofar.after(id, chunk, transfer->layers(), transfer->pages());
        }
    }
    for (const auto &[id, chunk] : chunks) {
        Transfer *transfer = live(id);
        if (transfer == nullptr) {
            metrics_.late_chunks.add();
            continue;
        }
        transfer->plan(chunk);
        transfer->observe(now);
        if (transfer->has_batch() && !transfer->is_waiting) {
            transfer->is_waiting = true;
            transfer->counter().waiting.push_back(transfer);
        }
        enqueue(*transfer, now);
        finish(*transfer);
    }
}

void Sender::cancel(uint64_t id) {
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) {
        return;
    }
    Transfer &transfer = *found->second;
    transfer.cancelled = true;
    transfer.end_early();
    finish(transfer);
}

void Sender::counter_moved(LayerCounter &counter, uint64_t now) {
    for (Transfer *transfer : counter.waiting) {
        transfer->observe(now);
        enqueue(*transfer, now);
    }
}

void Sender::enqueue(Strand &strand, uint64_t now) {
    if (strand.batch_begun() || (strand.batch_ready() && !strand.transfer().cancelled)) {
        strand.lane().push_ready(strand, now);
    }
}

void Sender::enqueue(Transfer &transfer, uint64_t now) {
    for (auto &strand : transfer.strands()) {
        enqueue(strand, now);
    }
}

void Sender::stop_waiting(Transfer &transfer) {
    if (transfer.is_waiting) {
        std::erase(transfer.counter().waiting, &transfer);
        transfer.is_waiting = false;
    }
}

void Sender::finish(Transfer &transfer) {
    if (transfer.cancelled) {
        for (auto &strand : transfer.strands()) {
            if (!strand.batch_begun()) {
                strand.lane().remove_ready(strand);
            }
        }
        stop_waiting(transfer);
    }
    if (transfer.in_flight != 0 || transfer.batch_begun()) {
        return;
    }
    if (transfer.all_posted()) {
        metrics_.transfers_done.add();
        end(transfer, TransferDone{transfer.id(), transfer.stats});
    } else if (transfer.cancelled) {
        metrics_.transfers_cancelled.add();
        end(transfer, TransferCancelled{transfer.id(), true, transfer.stats});
    }
}

void Sender::end(Transfer &transfer, Event event) {
    for (auto &strand : transfer.strands()) {
        strand.lane().remove_ready(strand);
    }
    stop_waiting(transfer);
    for (const auto &stream : transfer.streams()) {
        --stream.region->transfers;
    }
    --transfer.counter().transfers;
    transfers_.erase(transfer.id());
    metrics_.transfers.subtract();
    events_.push(std::move(event));
}

void Sender::completed(WriteContext &context, uint64_t now) {
    if (context.strand == nullptr) {
        return;  // of a lane that was closed meanwhile
    }
    Transfer &transfer = context.strand->transfer();
    context.lane->complete(context, now);
    finish(transfer);
}

void Sender::write_failed(WriteContext &context, const std::string &detail) {
    if (context.strand == nullptr) {
        return;
    }
    metrics_.write_errors.add();
    fail(context.lane->peer(), "WRITE_FAILED", detail);
}

void Sender::peer_lost(uint64_t id, const std::string &detail) {
    for (auto &peer : peers_) {
        if (peer->id() == id && !peer->failed()) {
            fail(*peer, "PEER_EXITED", detail);
        }
    }
}

void Sender::fail(Peer &peer, const char *reason, const std::string &detail) {
    metrics_.peers_failed.add();
    events_.push(PeerFailed{peer.id(), reason, detail});
    fail_transfers(peer, reason);
}

void Sender::fail_transfers(Peer &peer, const char *reason) {
    std::vector<std::pair<Transfer *, bool>> ended;
    for (auto &[id, transfer] : transfers_) {
        if (&transfer->peer() == &peer) {
            ended.emplace_back(transfer.get(), transfer->delivered());
        }
    }
    if (faults_ != nullptr) {
        for (const auto &lane : peer.lanes()) {
            faults_->forget(*lane);
        }
    }
    for (auto &[domain, contexts] : peer.fail()) {
        if (contexts) {
            retired_contexts_.emplace_back(domain, std::move(contexts));
        }
    }
    for (const auto &[transfer, quiesced] : ended) {
        metrics_.transfers_failed.add();
        end(*transfer, TransferFailed{transfer->id(), reason, quiesced, transfer->stats});
    }
}

uint64_t Sender::patience(const Lane &lane) const {
    return lane.cut_off() ? std::min(post_timeout_ns_, kReconnectNs) : post_timeout_ns_;
}

void Sender::check_deadlines(uint64_t now) {
    // Looks at a whole window.
    const bool oldest_too = now >= next_oldest_check_ns_;
    if (oldest_too) {
        next_oldest_check_ns_ = now + post_timeout_ns_ / 16;
    }
    for (auto &peer : peers_) {
        if (!peer->failed()) {
            check_deadlines(*peer, now, oldest_too);
        }
    }
}

void Sender::check_deadlines(Peer &peer, uint64_t now, bool oldest_too) {
    for (const auto &lane : peer.lanes()) {
        if (!lane->busy()) {
            continue;
        }
        if (now - std::min(now, lane->last_progress_ns()) >= patience(*lane)) {
            const bool posted = lane->in_flight() != 0;
            fail(peer, posted ? "WRITE_TIMEOUT" : "POST_TIMEOUT",
                 posted ? "nothing was completed in time" : "nothing was accepted in time");
            return;
        }
        const auto oldest = oldest_too ? lane->oldest_post_ns() : now;
        if (oldest < now && now - oldest >= kOldestWriteTimeouts * post_timeout_ns_) {
            fail(peer, "WRITE_TIMEOUT", "a write was never completed");
            return;
        }
    }
}

void Sender::forgive(uint64_t now) {
    for (auto &peer : peers_) {
        for (const auto &lane : peer->lanes()) {
            lane->forgive(now);
        }
    }
}

uint64_t Sender::next_time_ns() const {
    uint64_t next = kNever;
    for (const auto &peer : peers_) {
        if (peer->failed()) {
            continue;
        }
        for (const auto &lane : peer->lanes()) {
            if (!lane->busy()) {
                continue;
            }
            next = std::min(next, lane->last_progress_ns() + patience(*lane));
            if (const auto retry = lane->retry_ns()) {
                next = std::min(next, *retry);
            }
        }
    }
    return next;
}

bool Sender::post(uint64_t now) {
    bool more = false;
    for (size_t i = 0; i < peers_.size(); ++i) {
        Peer &peer = *peers_[(turn_ + i) % peers_.size()];
        for (size_t each = 0; !peer.failed() && each < peer.lanes().size(); ++each) {
            Lane &lane = *peer.lanes()[(turn_ + each) % peer.lanes().size()];
            if (lane.may_post(now)) {
                post_turn(lane, now);
                more = more || (!peer.failed() && lane.may_post(now));
            }
        }
    }
    ++turn_;
    return more;
}

void Sender::post_turn(Lane &lane, uint64_t now) {
    // A peer has one turn at each domain, however many of its endpoints are written to from there.
    const uint32_t share = lane.peer().lanes_of(lane.domain());
    const uint64_t most_bytes = kPeerTurnBytes / share;
    const uint32_t most_writes = std::max(kPeerTurnWrites / share, 1U);
    uint64_t lane_bytes = 0;
    uint64_t strand_bytes = 0;
    for (uint32_t writes = 0; writes < most_writes && lane_bytes < most_bytes; ++writes) {
        Strand *strand = lane.front();
        if (strand == nullptr) {
            return;
        }
        Transfer &transfer = strand->transfer();
        const uint64_t before = transfer.stats.bytes;
        std::string error;
        const auto result = lane.post(*strand, now, error, faults_);
        if (result == Lane::Post::kFailed) {
            fail(lane.peer(), "WRITE_FAILED", error);
            return;
        }
        if (result != Lane::Post::kPosted) {
            break;
        }
        const uint64_t bytes = transfer.stats.bytes - before;
        lane_bytes += bytes;
        strand_bytes += bytes;
        if (!strand->batch_begun()) {
            if (!transfer.has_batch()) {
                stop_waiting(transfer);
            }
            if (transfer.cancelled || !strand->batch_ready()) {
                lane.remove_ready(*strand);
                strand_bytes = 0;
                continue;  // its last write is in flight, so it has not ended
            }
        }
        if (strand_bytes >= kTransferTurnBytes) {
            lane.rotate();
            strand_bytes = 0;
        }
    }
    // However short the turn was, the next one is another transfer's.
    if (strand_bytes != 0) {
        lane.rotate();
    }
}

}  // namespace baton::fabric
