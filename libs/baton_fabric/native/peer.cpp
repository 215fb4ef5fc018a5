#include "peer.hpp"

#include "error.hpp"
#include "faults.hpp"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <limits>

namespace baton::fabric {
namespace {

// A refused write is tried again when a completion comes. Where none can come, because nothing is in flight yet (the
// connection is being made), by time, with growing pauses.
constexpr uint64_t kFirstRetryNs = 50'000;
constexpr uint64_t kLongestRetryNs = 2'000'000;

}  // namespace

Peer::Peer(uint64_t id, Domain &domain, const std::string &address, ContextBlock contexts, uint32_t window,
           Metrics &metrics)
    : id_(id),
      metrics_(metrics),
      ordered_(domain.capabilities().ordered),
      endpoint_(domain.connect(address, id)),
      window_(window),
      contexts_(std::move(contexts)) {
    const uint64_t usable = std::min<uint64_t>(window_, endpoint_->window());
    for (uint32_t i = 0; i < window_; ++i) {
        contexts_[i].peer = this;
        contexts_[i].transfer = nullptr;
        if (i >= usable) {
            continue;
        }
        contexts_[i].next_free = free_;
        free_ = &contexts_[i];
    }
}

void Peer::push_ready(Transfer &transfer, uint64_t now) {
    if (transfer.is_ready) {
        return;
    }
    if (!busy()) {
        last_progress_ns_ = now;
    }
    transfer.is_ready = true;
    transfer.next_ready = nullptr;
    (last_ != nullptr ? last_->next_ready : first_) = &transfer;
    last_ = &transfer;
}

void Peer::rotate() {
    if (first_ == last_) {
        return;
    }
    Transfer *moved = first_;
    first_ = moved->next_ready;
    moved->next_ready = nullptr;
    last_->next_ready = moved;
    last_ = moved;
}

void Peer::remove_ready(Transfer &transfer) {
    if (!transfer.is_ready) {
        return;
    }
    Transfer *before = nullptr;
    for (Transfer *each = first_; each != &transfer; each = each->next_ready) {
        before = each;
    }
    (before != nullptr ? before->next_ready : first_) = transfer.next_ready;
    if (last_ == &transfer) {
        last_ = before;
    }
    transfer.next_ready = nullptr;
    transfer.is_ready = false;
}

Peer::Post Peer::post(Transfer &transfer, uint64_t now, std::string &error, Faults *faults) {
    if (free_ == nullptr) {
        return Post::kNoRoom;
    }
    const Write &write = transfer.prepare();
    WriteContext &context = *free_;
    // Without an order between writes each must be confirmed by itself; with one, the last of the batch speaks for all.
    const bool delivery = !ordered_ || write.last_of_batch;
    // Taken before the call, which may carry the bytes itself.
    const uint64_t first_ns = transfer.stats.first_post_ns != 0 ? transfer.stats.first_post_ns : now_ns();
    const auto provider = [&] { return endpoint_->post(write, transfer.immediate(write), delivery, &context); };
    const ssize_t result =
        faults == nullptr ? provider() : faults->post(context, id_, transfer.id(), now, provider);
    if (result == -FI_EAGAIN) {
        metrics_.eagain.add();
        retry_delay_ns_ = std::clamp(2 * retry_delay_ns_, kFirstRetryNs, kLongestRetryNs);
        retry_ns_ = now + retry_delay_ns_;
        return Post::kRefused;
    }
    if (result != 0) {
        error = std::string("fi_writemsg: ") + fi_strerror(static_cast<int>(-result));
        return Post::kFailed;
    }
    free_ = context.next_free;
    context.transfer = &transfer;
    context.sequence = ++posted_sequence_;
    context.posted_ns = now;
    context.length = write.length;
    context.delivery = delivery;
    ++in_flight_;
    retry_ns_ = 0;
    retry_delay_ns_ = 0;

    metrics_.writes.add();
    metrics_.bytes.add(write.length);
    metrics_.extents.add(write.extents);
    metrics_.writes_in_flight.add();
    metrics_.bytes_in_flight.add(write.length);
    ++transfer.in_flight;
    transfer.last_sequence = context.sequence;
    transfer.stats.first_post_ns = first_ns;
    transfer.posted();
    return Post::kPosted;
}

void Peer::complete(WriteContext &context, uint64_t now) {
    metrics_.completions.add();
    metrics_.writes_in_flight.subtract();
    metrics_.bytes_in_flight.subtract(context.length);
    if (context.delivery) {
        metrics_.delivery_completions.add();
        delivered_sequence_ = std::max(delivered_sequence_, context.sequence);
    }
    --context.transfer->in_flight;
    context.transfer->stats.last_completion_ns = now;
    context.transfer = nullptr;
    context.next_free = free_;
    free_ = &context;
    --in_flight_;
    last_progress_ns_ = now;
    retry_ns_ = 0;
}

std::optional<uint64_t> Peer::retry_ns() const {
    return first_ != nullptr && in_flight_ == 0 && retry_ns_ != 0 ? std::optional(retry_ns_) : std::nullopt;
}

bool Peer::delivered(const Transfer &transfer) const {
    return ordered_ ? transfer.last_sequence <= delivered_sequence_ : transfer.in_flight == 0;
}

uint64_t Peer::oldest_post_ns() const {
    uint64_t oldest = std::numeric_limits<uint64_t>::max();
    for (uint32_t i = 0; in_flight_ != 0 && i < window_; ++i) {
        if (contexts_[i].transfer != nullptr) {
            oldest = std::min(oldest, contexts_[i].posted_ns);
        }
    }
    return oldest;
}

ContextBlock Peer::close() {
    endpoint_.reset();
    for (uint32_t i = 0; contexts_ && i < window_; ++i) {
        if (contexts_[i].transfer != nullptr) {
            metrics_.writes_in_flight.subtract();
            metrics_.bytes_in_flight.subtract(contexts_[i].length);
        }
        contexts_[i].transfer = nullptr;
        contexts_[i].peer = nullptr;
    }
    free_ = nullptr;
    in_flight_ = 0;
    return std::move(contexts_);
}

}  // namespace baton::fabric
