#include "local_sender.hpp"

#include "error.hpp"

#include <rdma/fi_errno.h>

#include <algorithm>

namespace baton::fabric {
namespace {

// A sleeping sender is woken when half of its writes are done, or this much: early enough to post more before the ring
// runs empty.
constexpr uint64_t kWakeBytes = 8 << 20;

}  // namespace

LocalSendingEndpoint::LocalSendingEndpoint(LocalDomain &domain, UniqueFd socket, uint64_t peer)
    : domain_(domain), peer_(peer), ring_(Ring::create()), socket_(std::move(socket)) {
    if (!socket_) {
        lose("nobody listens at the address");
    } else if (send_message(socket_.get(), {.kind = LocalMessage::kHello}, ring_.fd()) != Sent::kYes) {
        lose("the receiver does not take the connection");
    } else {
        domain_.watch(socket_.get(), *this);
    }
    domain_.add(*this);
}

LocalSendingEndpoint::~LocalSendingEndpoint() {
    ring_.header().tail.fetch_or(Ring::kClosed, std::memory_order_seq_cst);
    domain_.remove(*this);
}

void LocalSendingEndpoint::lose(const char *detail) {
    if (!lost_) {
        lost_ = true;
        loss_ = detail;
        socket_ = UniqueFd();
    }
}

std::optional<std::string> LocalSendingEndpoint::take_loss() {
    auto loss = std::move(loss_);
    loss_.reset();
    return loss;
}

ssize_t LocalSendingEndpoint::post(const Write &write, uint32_t immediate, bool, void *context) {
    if (lost_) {
        return -FI_ENOTCONN;
    }
    const auto &region = *static_cast<const LocalRegistration *>(write.descriptor);
    if (head_ - tail_ == Ring::kEntries || !announce(region)) {
        return lost_ ? -FI_ENOTCONN : -FI_EAGAIN;
    }
    RingEntry &entry = ring_.entry(head_);
    entry.region = region.id;
    entry.source = static_cast<uint64_t>(static_cast<const char *>(write.source) - region.address);
    entry.key = write.remote_key;
    entry.destination = write.remote_address;
    entry.length = write.length;
    entry.immediate = immediate;
    posted_[head_ % Ring::kEntries] = {context, write.length};
    auto &header = ring_.header();
    header.head.store(++head_, std::memory_order_seq_cst);
    if (header.receiver_sleeps.load(std::memory_order_seq_cst) != 0 &&
        header.receiver_sleeps.exchange(0, std::memory_order_seq_cst) != 0) {
        // A full socket wakes the receiver, too.
        send_message(socket_.get(), {.kind = LocalMessage::kWake});
    }
    return 0;
}

// Before the first entry that names it, so that the receiver finds the announcement when it sees the entry.
bool LocalSendingEndpoint::announce(const LocalRegistration &region) {
    if (std::find(announced_.begin(), announced_.end(), region.id) != announced_.end()) {
        return true;
    }
    if (!flush_forgotten()) {
        return false;
    }
    const LocalMessage message{.kind = LocalMessage::kRegion, .region = region.id, .length = region.length};
    switch (send_message(socket_.get(), message, region.fd.get())) {
    case Sent::kYes:
        announced_.push_back(region.id);
        return true;
    case Sent::kFull:
        return false;
    case Sent::kLost:
        lose("the connection is closed");
        return false;
    }
    return false;
}

void LocalSendingEndpoint::forget(uint64_t region) {
    if (std::erase(announced_, region) != 0 && !lost_) {
        forgotten_.push_back(region);
        flush_forgotten();
    }
}

bool LocalSendingEndpoint::flush_forgotten() {
    while (!forgotten_.empty()) {
        if (send_message(socket_.get(), {.kind = LocalMessage::kForget, .region = forgotten_.back()}) != Sent::kYes) {
            return false;
        }
        forgotten_.pop_back();
    }
    return true;
}

size_t LocalSendingEndpoint::reap(Completions &completions) {
    auto &header = ring_.header();
    if (asleep_) {
        asleep_ = false;
        header.wake_sender_at.store(Ring::kNever, std::memory_order_relaxed);
    }
    const uint64_t tail = header.tail.load(std::memory_order_acquire);
    if (tail == tail_) {
        return 0;
    }
    if (tail < tail_ || tail > head_) {
        lose("the receiver says that it has done what it was not asked to");
        return 0;
    }
    const size_t count = tail - tail_;
    while (tail_ != tail) {
        completions.written(posted_[tail_++ % Ring::kEntries].context);
    }
    return count;
}

uint64_t LocalSendingEndpoint::wake_position() const {
    const uint64_t half = tail_ + (head_ - tail_ + 1) / 2;
    uint64_t bytes = 0;
    for (uint64_t position = tail_; position != half; ++position) {
        bytes += posted_[position % Ring::kEntries].length;
        if (bytes >= kWakeBytes) {
            return position + 1;
        }
    }
    return half;
}

bool LocalSendingEndpoint::prepare_to_sleep() {
    if (lost_) {
        return true;
    }
    flush_forgotten();
    if (head_ == tail_) {
        return true;
    }
    auto &header = ring_.header();
    asleep_ = true;
    header.wake_sender_at.store(wake_position(), std::memory_order_seq_cst);
    return header.tail.load(std::memory_order_seq_cst) == tail_;
}

void LocalSendingEndpoint::readable() {
    ReceivedMessage received;
    while (!lost_) {
        switch (receive_message(socket_.get(), received)) {
        case Received::kMessage:
            break;  // a wake-up: the ring says the rest
        case Received::kNothing:
            return;
        case Received::kEnd:
            lose("the receiver has ended, or closed the endpoint");
        }
    }
}

}  // namespace baton::fabric
