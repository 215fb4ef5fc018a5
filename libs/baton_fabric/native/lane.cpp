#include "lane.hpp"

#include "faults.hpp"
#include "peer.hpp"
#include "transfer.hpp"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <limits>

namespace baton::fabric {
namespace {

// A refused write is tried again when a completion comes. Where none can come, because nothing is in flight yet (the
// connection is being made), by time, with growing pauses.
constexpr uint64_t kFirstRetryNs = 50'000;
constexpr uint64_t kLongestRetryNs = 2'000'000;
// No write is begun beyond this, which a cancelled transfer must wait for: 8 to 17 ms over tcp. Room for a whole window
// of 64 writes of 384 KiB, the pages of the default model in runs of 32.
constexpr uint64_t kMostBytes = 32 << 20;

}  // namespace

Lane::Lane(Peer &peer, uint32_t number, uint32_t remote, Domain &domain, const std::string &address,
           ContextBlock contexts, uint32_t window, Metrics &metrics, DomainMetrics &domain_metrics)
    : peer_(peer),
      number_(number),
      remote_(remote),
      metrics_(metrics),
      domain_metrics_(domain_metrics),
      ordered_(domain.capabilities().ordered),
      endpoint_(domain.connect(address, peer.id())),
      window_(window),
      contexts_(std::move(contexts)) {
    const uint64_t usable = std::min<uint64_t>(window_, endpoint_->window());
    for (uint32_t i = 0; i < window_; ++i) {
        contexts_[i].lane = this;
        contexts_[i].strand = nullptr;
        if (i >= usable) {
            continue;
        }
        contexts_[i].next_free = free_;
        free_ = &contexts_[i];
    }
}

void Lane::push_ready(Strand &strand, uint64_t now) {
    if (strand.is_ready) {
        return;
    }
    if (!busy()) {
        last_progress_ns_ = now;
    }
    strand.is_ready = true;
    strand.next_ready = nullptr;
    (last_ != nullptr ? last_->next_ready : first_) = &strand;
    last_ = &strand;
}

void Lane::rotate() {
    if (first_ == last_) {
        return;
    }
    Strand *moved = first_;
    first_ = moved->next_ready;
    moved->next_ready = nullptr;
    last_->next_ready = moved;
    last_ = moved;
}

void Lane::remove_ready(Strand &strand) {
    if (!strand.is_ready) {
        return;
    }
    Strand *before = nullptr;
    for (Strand *each = first_; each != &strand; each = each->next_ready) {
        before = each;
    }
    (before != nullptr ? before->next_ready : first_) = strand.next_ready;
    if (last_ == &strand) {
        last_ = before;
    }
    strand.next_ready = nullptr;
    strand.is_ready = false;
}

bool Lane::has_room() const { return free_ != nullptr && bytes_in_flight_ < kMostBytes; }

Lane::Post Lane::post(Strand &strand, uint64_t now, std::string &error, Faults *faults) {
    if (!has_room()) {
        return Post::kNoRoom;
    }
    Transfer &transfer = strand.transfer();
    const Write &write = strand.prepare();
    WriteContext &context = *free_;
    // Without an order between writes each must be confirmed by itself; with one, the last of the batch speaks for all
    // that went this way.
    const bool delivery = !ordered_ || write.last_of_batch;
    // Taken before the call, which may carry the bytes itself.
    const uint64_t first_ns = transfer.stats.first_post_ns != 0 ? transfer.stats.first_post_ns : now_ns();
    const auto provider = [&] { return endpoint_->post(write, transfer.immediate(write), delivery, &context); };
    const ssize_t result = faults == nullptr ? provider() : faults->post(context, *this, transfer.id(), now, provider);
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
    context.strand = &strand;
    context.sequence = ++posted_sequence_;
    context.posted_ns = now;
    context.length = write.length;
    context.delivery = delivery;
    ++in_flight_;
    bytes_in_flight_ += write.length;
    retry_ns_ = 0;
    retry_delay_ns_ = 0;

    metrics_.writes.add();
    metrics_.bytes.add(write.length);
    metrics_.extents.add(write.extents);
    metrics_.writes_in_flight.add();
    metrics_.bytes_in_flight.add(write.length);
    domain_metrics_.writes.add();
    domain_metrics_.bytes.add(write.length);
    ++transfer.in_flight;
    ++strand.in_flight;
    strand.last_sequence = context.sequence;
    transfer.stats.first_post_ns = first_ns;
    strand.posted();
    return Post::kPosted;
}

void Lane::complete(WriteContext &context, uint64_t now) {
    metrics_.completions.add();
    metrics_.writes_in_flight.subtract();
    metrics_.bytes_in_flight.subtract(context.length);
    if (context.delivery) {
        metrics_.delivery_completions.add();
        delivered_sequence_ = std::max(delivered_sequence_, context.sequence);
    }
    Transfer &transfer = context.strand->transfer();
    --transfer.in_flight;
    --context.strand->in_flight;
    transfer.stats.last_completion_ns = now;
    context.strand = nullptr;
    context.next_free = free_;
    free_ = &context;
    --in_flight_;
    bytes_in_flight_ -= context.length;
    last_progress_ns_ = now;
    retry_ns_ = 0;
}

std::optional<uint64_t> Lane::retry_ns() const {
    return first_ != nullptr && in_flight_ == 0 && retry_ns_ != 0 ? std::optional(retry_ns_) : std::nullopt;
}

bool Lane::delivered(const Strand &strand) const {
    return ordered_ ? strand.last_sequence <= delivered_sequence_ : strand.in_flight == 0;
}

uint64_t Lane::oldest_post_ns() const {
    uint64_t oldest = std::numeric_limits<uint64_t>::max();
    for (uint32_t i = 0; in_flight_ != 0 && i < window_; ++i) {
        if (contexts_[i].strand != nullptr) {
            oldest = std::min(oldest, contexts_[i].posted_ns);
        }
    }
    return oldest;
}

ContextBlock Lane::close() {
    endpoint_.reset();
    for (uint32_t i = 0; contexts_ && i < window_; ++i) {
        if (contexts_[i].strand != nullptr) {
            metrics_.writes_in_flight.subtract();
            metrics_.bytes_in_flight.subtract(contexts_[i].length);
        }
        contexts_[i].strand = nullptr;
        contexts_[i].lane = nullptr;
    }
    free_ = nullptr;
    in_flight_ = 0;
    bytes_in_flight_ = 0;
    return std::move(contexts_);
}

}  // namespace baton::fabric
