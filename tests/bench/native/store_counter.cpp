// What a model process does after a layer, with the time at which it does it: Python's own time is not the agent's.
#include <sys/eventfd.h>
#include <time.h>

#include <atomic>
#include <cstdint>

// Stores into the layer counter at `cell` and rings `doorbell`; CLOCK_MONOTONIC nanoseconds before the store.
extern "C" uint64_t store_counter(uint64_t *cell, uint64_t value, int doorbell) {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    std::atomic_ref<uint64_t>(*cell).store(value, std::memory_order_release);
    eventfd_write(doorbell, 1);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}
