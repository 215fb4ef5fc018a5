#include "events.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

namespace baton::fabric {
namespace {

uint64_t between_us(uint64_t from_ns, uint64_t to_ns) {
    return from_ns != 0 && to_ns > from_ns ? (to_ns - from_ns) / 1000 : 0;
}

}  // namespace

uint64_t TransferStats::duration_us() const { return between_us(first_post_ns, last_completion_ns); }

uint64_t TransferStats::overlapped_us() const {
    return final_layer_ns == 0 ? duration_us()
                               : between_us(first_post_ns, std::min(final_layer_ns, last_completion_ns));
}

uint64_t TransferStats::exposed_us() const { return between_us(final_layer_ns, last_completion_ns); }

uint64_t TransferStats::first_post_us() const { return between_us(first_ready_ns, first_post_ns); }

EventQueue::EventQueue() : fd_(UniqueFd::event()) {}

void EventQueue::push(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (events_.size() == 1) {
        eventfd_write(fd_.get(), 1);
    }
}

std::vector<Event> EventQueue::take() {
    const std::lock_guard lock(mutex_);
    eventfd_t ignored = 0;
    eventfd_read(fd_.get(), &ignored);
    return std::exchange(events_, {});
}

}  // namespace baton::fabric
