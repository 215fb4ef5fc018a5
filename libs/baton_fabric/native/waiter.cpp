#include "waiter.hpp"

#include "error.hpp"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

namespace baton::fabric {
namespace {

constexpr int kSourceShift = 56;

}  // namespace

Waiter::Waiter() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_) {
        throw system_call_failed("epoll_create1");
    }
}

void Waiter::add(int fd, Source source, uint64_t id, bool edge) {
    epoll_event event{};
    event.events = EPOLLIN | (edge ? EPOLLET : 0U);
    event.data.u64 = (static_cast<uint64_t>(source) << kSourceShift) | id;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw system_call_failed("epoll_ctl");
    }
}

// Needed before a descriptor is closed that another process holds too: the kernel goes on reporting those.
void Waiter::remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Waiter::wait(uint64_t now, uint64_t wake_ns, const std::function<void(Source, uint64_t)> &ready) {
    constexpr int kEvents = 64;
    epoll_event events[kEvents];
    const uint64_t left = wake_ns == kForever ? kForever : wake_ns - std::min(now, wake_ns);
    int count = -1;
    if (precise_) {
        timespec timeout{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
        count = static_cast<int>(syscall(SYS_epoll_pwait2, epoll_.get(), events, kEvents,
                                         left == kForever ? nullptr : &timeout, nullptr, size_t{0}));
        // Before Linux 5.11 there is no such call, and some sandboxes forbid it.
        precise_ = count >= 0 || (errno != ENOSYS && errno != EPERM);
    }
    if (!precise_) {
        const uint64_t milliseconds = std::min<uint64_t>((left + 999'999) / 1'000'000, 3'600'000);
        count = epoll_wait(epoll_.get(), events, kEvents, left == kForever ? -1 : static_cast<int>(milliseconds));
    }
    if (count < 0 && errno != EINTR) {
        throw system_call_failed("epoll_wait");
    }
    for (int i = 0; i < count; ++i) {
        const uint64_t data = events[i].data.u64;
        ready(static_cast<Source>(data >> kSourceShift), data & ((uint64_t{1} << kSourceShift) - 1));
    }
}

}  // namespace baton::fabric
