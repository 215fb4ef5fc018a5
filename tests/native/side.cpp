#include "side.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace baton::tests {
namespace {

// Under a sanitizer, on a busy machine.
constexpr std::chrono::seconds kDeadline{60};

UniqueFd make_file(uint64_t length) {
    UniqueFd fd(memfd_create("baton-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    require(fd && ftruncate(fd.get(), static_cast<off_t>(length)) == 0 &&
                fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
            "a memfd");
    return fd;
}

}  // namespace

void require(bool condition, const std::string &what) {
    if (!condition) {
        std::fprintf(stderr, "FAILED: %s\n", what.c_str());
        std::_Exit(1);
    }
}

Memory::Memory(uint64_t length) : fd_(make_file(length)), mapping_(fd_.get(), length) {}

Counter::Counter() : cell_(sizeof(uint64_t)), doorbell_(UniqueFd::event()) {}

void Counter::advance(uint64_t value) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t *>(cell_.bytes())).store(value, std::memory_order_release);
    eventfd_write(doorbell_.get(), 1);
}

Side::Side(const Options &options) : engine_(options), stop_(UniqueFd::event()), listener_([this] { listen(); }) {}

Side::~Side() {
    eventfd_write(stop_.get(), 1);
    listener_.join();
}

Ended Side::await_end(uint64_t transfer) {
    std::unique_lock lock(mutex_);
    require(came_.wait_for(lock, kDeadline, [&] { return ended_.contains(transfer); }),
            "transfer " + std::to_string(transfer) + " ends");
    return ended_.extract(transfer).mapped();
}

bool Side::await_full(uint32_t slot, uint32_t generation) {
    std::unique_lock lock(mutex_);
    require(came_.wait_for(lock, kDeadline, [&] { return closed_ || full_.contains({slot, generation}); }),
            "inbox " + std::to_string(slot) + " is full");
    return full_.erase({slot, generation}) != 0;
}

void Side::close() {
    engine_.close();
    const std::lock_guard lock(mutex_);
    closed_ = true;
    came_.notify_all();
}

void Side::listen() {
    pollfd entries[] = {{engine_.event_fd(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    while ((entries[1].revents & POLLIN) == 0) {
        ::poll(entries, 2, -1);
        const auto events = engine_.events();
        const std::lock_guard lock(mutex_);
        for (const auto &event : events) {
            take(event);
        }
        came_.notify_all();
    }
}

void Side::take(const Event &event) {
    const auto end = [this](uint64_t transfer, Ended ended) {
        require(ended_.emplace(transfer, std::move(ended)).second, "a transfer ends once");
    };
    if (const auto *done = std::get_if<TransferDone>(&event)) {
        end(done->transfer, {Ended::How::kDone, true, ""});
    } else if (const auto *cancelled = std::get_if<TransferCancelled>(&event)) {
        end(cancelled->transfer, {Ended::How::kCancelled, cancelled->quiesced, ""});
    } else if (const auto *failed = std::get_if<TransferFailed>(&event)) {
        end(failed->transfer, {Ended::How::kFailed, failed->quiesced, failed->reason});
    } else if (const auto *full = std::get_if<InboxFull>(&event)) {
        full_[{full->slot, full->generation}] = true;
    } else if (const auto *broken = std::get_if<EngineFailed>(&event)) {
        require(false, "the engine failed: " + broken->detail);
    } else {
        require(!std::holds_alternative<InboxViolation>(event), "no more extents arrive than were expected");
    }
}

}  // namespace baton::tests
