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

}  // namespace

LocalConnection::LocalConnection(LocalDomain &domain, UniqueFd socket) : domain_(domain), socket_(std::move(socket)) {
    domain_.watch(socket_.get(), *this);
}

void LocalConnection::end() {
    socket_ = UniqueFd();
    ring_.reset();
    sources_.clear();
    current_.reset();
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
    sources_.emplace(message.region, Mapping(received.fd.get(), message.length, Mapping::Access::kRead));
}

const Mapping *LocalConnection::source_of(uint64_t region) {
    auto found = sources_.find(region);
    if (found == sources_.end()) {
        readable();  // it was announced before the entry was made
        found = sources_.find(region);
    }
    return found == sources_.end() ? nullptr : &found->second;
}

// False if the connection has ended by it.
bool LocalConnection::copy_slice(uint64_t most) {
    const RingEntry &entry = current_->entry;
    const Mapping *source = source_of(entry.region);
    if (!ring_) {
        return false;
    }
    const LocalRegistration *destination = domain_.find(entry.key);
    const auto within = [&entry](uint64_t offset, uint64_t length) {
        return offset <= length && entry.length <= length - offset;
    };
    if (source == nullptr || destination == nullptr || entry.length == 0 ||
        !within(entry.source, source->length()) || !within(entry.destination, destination->length)) {
        refuse("a write of " + std::to_string(entry.length) + " bytes is not within " +
               (source == nullptr ? "any region of the sender" : destination == nullptr ? "any region here"
                                                                                        : "its regions"));
        return false;
    }
    const uint64_t done = current_->done;
    const uint64_t length = std::min(most, entry.length - done);
    std::memcpy(destination->address + entry.destination + done,
                static_cast<const char *>(source->address()) + entry.source + done, length);
    current_->done += length;
    return true;
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
        if (!current_) {
            current_ = Current{ring_->entry(taken_)};
        }
        const uint64_t before = current_->done;
        if (!copy_slice(left)) {
            return 1;
        }
        left -= current_->done - before;
        if (current_->done == current_->entry.length) {
            immediates_[taken_ % Ring::kEntries] = current_->entry.immediate;
            current_.reset();
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
