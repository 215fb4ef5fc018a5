#include "sender.hpp"

#include "error.hpp"
#include "faults.hpp"

#include <algorithm>
#include <limits>

namespace baton::fabric {
namespace {

// Neighbours are joined up to here: over tcp 1 MiB moves at 5.6 GB/s, 256 KiB at 4 to 6, 4 MiB at 4.4.
constexpr uint64_t kCoalescedBytes = 1 << 20;
// A transfer posts at most this much, or one write, before the next has its turn; a peer four times as much.
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

Sender::Sender(Domain &domain, EventQueue &events, Metrics &metrics, uint64_t post_timeout_ns)
    : domain_(domain), events_(events), metrics_(metrics), post_timeout_ns_(post_timeout_ns) {
    const auto &capabilities = domain.capabilities();
    window_ = static_cast<uint32_t>(std::clamp<uint64_t>(capabilities.tx_size, 1, capabilities.useful_window));
    limits_ = {capabilities.max_msg_size, std::min(capabilities.max_msg_size, kCoalescedBytes)};
}

Sender::~Sender() = default;

Peer &Sender::connect(const std::string &address) {
    auto contexts = take_contexts();
    peers_.push_back(std::make_unique<Peer>(next_peer_, domain_, address, std::move(contexts), window_, metrics_));
    ++next_peer_;
    metrics_.peers.add();
    return *peers_.back();
}

ContextBlock Sender::take_contexts() {
    if (free_contexts_.empty()) {
        return std::make_unique<WriteContext[]>(window_);
    }
    ContextBlock block = std::move(free_contexts_.front());
    free_contexts_.pop_front();
    return block;
}

void Sender::retire(ContextBlock contexts) {
    if (contexts) {
        retired_contexts_.push_back(std::move(contexts));
    }
}

void Sender::queue_empty() {
    for (auto &contexts : retired_contexts_) {
        free_contexts_.push_back(std::move(contexts));
    }
    retired_contexts_.clear();
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
    auto transfer = std::make_unique<Transfer>(std::move(plan), counter, peer, limits_);
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
    finish(transfer);
}

void Sender::counter_moved(LayerCounter &counter, uint64_t now) {
    for (Transfer *transfer : counter.waiting) {
        transfer->observe(now);
        enqueue(*transfer, now);
    }
}

void Sender::enqueue(Transfer &transfer, uint64_t now) {
    if (transfer.batch_begun() || (transfer.batch_ready() && !transfer.cancelled)) {
        transfer.peer().push_ready(transfer, now);
    }
}

void Sender::stop_waiting(Transfer &transfer) {
    if (transfer.is_waiting) {
        std::erase(transfer.counter().waiting, &transfer);
        transfer.is_waiting = false;
    }
}

// A batch that has begun is always posted whole: only its last write proves that all of them were delivered.
void Sender::finish(Transfer &transfer) {
    if (transfer.batch_begun()) {
        return;
    }
    if (transfer.cancelled) {
        transfer.peer().remove_ready(transfer);
        stop_waiting(transfer);
    }
    if (transfer.in_flight != 0) {
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
    transfer.peer().remove_ready(transfer);
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
    Transfer *transfer = context.transfer;
    if (transfer == nullptr) {
        return;  // of a peer that was closed meanwhile
    }
    context.peer->complete(context, now);
    finish(*transfer);
}

void Sender::write_failed(WriteContext &context, const std::string &detail) {
    if (context.transfer == nullptr) {
        return;
    }
    metrics_.write_errors.add();
    fail(*context.peer, "WRITE_FAILED", detail);
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
            ended.emplace_back(transfer.get(), peer.delivered(*transfer));
        }
    }
    if (faults_ != nullptr) {
        faults_->forget(peer);
    }
    retire(peer.close());
    for (const auto &[transfer, quiesced] : ended) {
        metrics_.transfers_failed.add();
        end(*transfer, TransferFailed{transfer->id(), reason, quiesced, transfer->stats});
    }
}

uint64_t Sender::patience(const Peer &peer) const {
    return peer.cut_off() ? std::min(post_timeout_ns_, kReconnectNs) : post_timeout_ns_;
}

void Sender::check_deadlines(uint64_t now) {
    // Looks at a whole window.
    const bool oldest_too = now >= next_oldest_check_ns_;
    if (oldest_too) {
        next_oldest_check_ns_ = now + post_timeout_ns_ / 16;
    }
    for (auto &peer : peers_) {
        if (peer->failed() || !peer->busy()) {
            continue;
        }
        if (now - std::min(now, peer->last_progress_ns()) >= patience(*peer)) {
            const bool posted = peer->in_flight() != 0;
            fail(*peer, posted ? "WRITE_TIMEOUT" : "POST_TIMEOUT",
                 posted ? "nothing was completed in time" : "nothing was accepted in time");
        } else if (const auto oldest = oldest_too ? peer->oldest_post_ns() : now;
                   oldest < now && now - oldest >= kOldestWriteTimeouts * post_timeout_ns_) {
            fail(*peer, "WRITE_TIMEOUT", "a write was never completed");
        }
    }
}

void Sender::forgive(uint64_t now) {
    for (auto &peer : peers_) {
        peer->forgive(now);
    }
}

uint64_t Sender::next_time_ns() const {
    uint64_t next = kNever;
    for (const auto &peer : peers_) {
        if (peer->failed() || !peer->busy()) {
            continue;
        }
        next = std::min(next, peer->last_progress_ns() + patience(*peer));
        if (const auto retry = peer->retry_ns()) {
            next = std::min(next, *retry);
        }
    }
    return next;
}

bool Sender::post(uint64_t now) {
    bool more = false;
    for (size_t i = 0; i < peers_.size(); ++i) {
        Peer &peer = *peers_[(turn_ + i) % peers_.size()];
        if (!peer.failed() && peer.may_post(now)) {
            post_turn(peer, now);
            more = more || (!peer.failed() && peer.may_post(now));
        }
    }
    ++turn_;
    return more;
}

void Sender::post_turn(Peer &peer, uint64_t now) {
    uint64_t peer_bytes = 0;
    uint64_t transfer_bytes = 0;
    for (uint32_t writes = 0; writes < kPeerTurnWrites && peer_bytes < kPeerTurnBytes; ++writes) {
        Transfer *transfer = peer.front();
        if (transfer == nullptr) {
            return;
        }
        const uint64_t before = transfer->stats.bytes;
        std::string error;
        const auto result = peer.post(*transfer, now, error, faults_);
        if (result == Peer::Post::kFailed) {
            fail(peer, "WRITE_FAILED", error);
            return;
        }
        if (result != Peer::Post::kPosted) {
            break;
        }
        const uint64_t bytes = transfer->stats.bytes - before;
        peer_bytes += bytes;
        transfer_bytes += bytes;
        if (!transfer->batch_begun()) {
            if (!transfer->has_batch()) {
                stop_waiting(*transfer);
            }
            if (transfer->cancelled || !transfer->batch_ready()) {
                peer.remove_ready(*transfer);
                transfer_bytes = 0;
                continue;  // its last write is in flight, so it has not ended
            }
        }
        if (transfer_bytes >= kTransferTurnBytes) {
            peer.rotate();
            transfer_bytes = 0;
        }
    }
    // However short the turn was, the next one is another transfer's.
    if (transfer_bytes != 0) {
        peer.rotate();
    }
}

}  // namespace baton::fabric
