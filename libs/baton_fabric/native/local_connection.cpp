#include "local_connection.hpp"

#include "error.hpp"

#include <algorithm>
#include <cstring>

namespace baton::fabric {
namespace {

// What a connection copies before the next has its turn, and before what arrived is counted: some 40 us. A look whether
// the sender still lives belongs to each, which is a system call of half a microsecond.
constexpr uint64_t kTurnBytes = 256 << 10;
constexpr size_t kMostRegions = 256;
constexpr size_t kLine = 64;
constexpr size_t kPrefetchLines = 8;

}  // namespace

LocalConnection::LocalConnection(LocalDomain &domain, UniqueFd socket) : domain_(domain), socket_(std::move(socket)) {
    domain_.watch(socket_.get(), *this);
}

void LocalConnection::end() {
    socket_ = UniqueFd();
    ring_.reset();
    source_ = {};
    sources_.clear();
}

void LocalConnection::refuse(std::string detail) {
    refusal_ = std::move(detail);
    end();
}

void LocalConnection::readable() {
    ReceivedMessage received;
    while (socket_) {
        switch (receive_message(socket_.get(), received)) {
        case Received::kMessage:
            take(received);
            break;
        case Received::kNothing:
            return;
        case Received::kEnd:
            // What it asked for and is not copied yet is not copied any more: its memory may be in use again.
            end();
        }
    }
}

void LocalConnection::take(ReceivedMessage &received) {
    const auto &message = received.message;
    try {
        if (message.kind == LocalMessage::kHello && !ring_) {
            ring_ = Ring::open(std::move(received.fd));
        } else if (message.kind == LocalMessage::kRegion && ring_) {
            open_region(received);
        } else if (message.kind == LocalMessage::kForget && ring_) {
            source_ = {};
            sources_.erase(message.region);
        } else if (message.kind != LocalMessage::kWake || !ring_) {
            refuse("a message of kind " + std::to_string(message.kind) + " at the wrong time");
        }
    } catch (const Error &error) {
        refuse(error.what());
    }
}

void LocalConnection::open_region(const ReceivedMessage &received) {
    const auto &message = received.message;
    if (sources_.size() >= kMostRegions || sources_.contains(message.region)) {
        throw invalid("BAD_REGION", "region " + std::to_string(message.region) + " is one too many");
    }
    check_sealed(received.fd.get(), message.length);
    source_ = {};
    sources_.emplace(message.region, Mapping(received.fd.get(), message.length, Mapping::Access::kRead));
}

const Mapping *LocalConnection::source_of(uint64_t region) {
    if (source_.second != nullptr && source_.first == region) {
        return source_.second;
    }
    auto found = sources_.find(region);
    if (found == sources_.end()) {
        readable();  // it was announced before the entry was made
        found = sources_.find(region);
    }
    source_ = {region, found == sources_.end() ? nullptr : &found->second};
    return source_.second;
}

// The first lines of the entry that comes next, while this one is copied: pages lie anywhere, so the hardware can't
// know. Worth 7 % at 64 KiB, 12 % at 16 KiB and 20 % at 4 KiB; it pays for the ring's own costs.
void LocalConnection::prefetch(const RingEntry &next) const {
    const RingEntry entry = next;
    const auto *destination = domain_.find(entry.key);
    if (source_.second == nullptr || source_.first != entry.region || entry.source >= source_.second->length() ||
        destination == nullptr || entry.destination >= destination->length) {
        return;
    }
    const char *from = static_cast<const char *>(source_.second->address()) + entry.source;
    const char *to = destination->address + entry.destination;
    for (size_t line = 0; line < kPrefetchLines * kLine; line += kLine) {
        __builtin_prefetch(from + line);
        __builtin_prefetch(to + line, 1);
    }
}

uint64_t LocalConnection::copy_slice(const RingEntry &entry, uint64_t most) {
    const Mapping *source = source_of(entry.region);
    if (!ring_) {
        return 0;
    }
    const LocalRegistration *destination = domain_.find(entry.key);
    const auto within = [&entry](uint64_t offset, uint64_t length) {
        return offset <= length && entry.length <= length - offset;
    };
    if (source == nullptr || destination == nullptr || entry.length == 0 || !within(entry.source, source->length()) ||
        !within(entry.destination, destination->length)) {
        refuse("a write of " + std::to_string(entry.length) + " bytes is not within " +
               (source == nullptr        ? "any region of the sender"
                : destination == nullptr ? "any region here"
                                         : "its regions"));
        return 0;
    }
    const uint64_t length = std::min(most, entry.length - done_);
    std::memcpy(destination->address + entry.destination + done_,
                static_cast<const char *>(source->address()) + entry.source + done_, length);
    return length;
}

size_t LocalConnection::serve(Completions &completions, uint64_t &bytes) {
    if (refusal_) {
        completions.failed({nullptr, *std::exchange(refusal_, std::nullopt)});
    }
    if (!ring_) {
        return 0;
    }
    if (asleep_) {
        asleep_ = false;
        ring_->header().receiver_sleeps.store(0, std::memory_order_relaxed);
    }
    if (ring_->header().tail.load(std::memory_order_relaxed) != committed_) {
        end();  // closed by the sender
        return 1;
    }
    const uint64_t head = ring_->header().head.load(std::memory_order_acquire);
    if (head - taken_ > Ring::kEntries || head - committed_ > Ring::kEntries) {
        refuse("the sender has more writes in its ring than fit");
        return 1;
    }
    const uint64_t budget = std::min(kTurnBytes, bytes);
    uint64_t left = budget;
    while (taken_ != head && left != 0) {
        if (done_ == 0) {
            current_ = ring_->entry(taken_);
            if (taken_ + 1 != head) {
                prefetch(ring_->entry(taken_ + 1));
            }
        }
        const uint64_t length = copy_slice(current_, left);
        if (length == 0) {
            return 1;
        }
        left -= length;
        done_ += length;
        if (done_ == current_.length) {
            immediates_[taken_ % Ring::kEntries] = current_.immediate;
            done_ = 0;
            ++taken_;
        }
    }
    bytes -= budget - left;
    if (taken_ != committed_) {
        commit(completions);
    }
    return budget != left ? 1 : 0;
}

// A sender that has closed the ring, or ended, does not keep its memory as it was: what was copied meanwhile may be
// anything. It is never counted.
void LocalConnection::commit(Completions &completions) {
    auto &header = ring_->header();
    uint64_t expected = committed_;
    if (has_ended(socket_.get()) || !header.tail.compare_exchange_strong(expected, taken_)) {
        end();
        return;
    }
    for (; committed_ != taken_; ++committed_) {
        completions.arrived(immediates_[committed_ % Ring::kEntries]);
    }
    if (header.wake_sender_at.load(std::memory_order_seq_cst) <= taken_ &&
        header.wake_sender_at.exchange(Ring::kNever, std::memory_order_seq_cst) != Ring::kNever) {
        send_message(socket_.get(), {.kind = LocalMessage::kWake});
    }
}

bool LocalConnection::prepare_to_sleep() {
    if (!ring_) {
        return !refusal_;
    }
    auto &header = ring_->header();
    asleep_ = true;
    header.receiver_sleeps.store(1, std::memory_order_seq_cst);
    return header.head.load(std::memory_order_seq_cst) == taken_;
}

}  // namespace baton::fabric
