#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace baton::fabric {

// Written by the progress thread alone, read by any.
class Counter64 {
  public:
    void add(uint64_t amount = 1) { value_.store(get() + amount, std::memory_order_relaxed); }
    void subtract(uint64_t amount = 1) { value_.store(get() - amount, std::memory_order_relaxed); }
    void set(uint64_t value) { value_.store(value, std::memory_order_relaxed); }
    uint64_t get() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<uint64_t> value_{0};
};

#define BATON_FABRIC_METRICS(X) \
    X(bytes)                    \
    X(writes)                   \
    X(extents)                  \
    X(completions)              \
    X(delivery_completions)     \
    X(write_errors)             \
    X(eagain)                   \
    X(transfers_done)           \
    X(transfers_failed)         \
    X(transfers_cancelled)      \
    X(peers_failed)             \
    X(immediates)               \
    X(extents_received)         \
    X(stale_immediates)         \
    X(violations)               \
    X(inboxes_full)             \
    X(late_chunks)              \
    X(receive_errors)           \
    X(wakeups)                  \
    X(faults)                   \
    X(transfers)                \
    X(inboxes)                  \
    X(regions)                  \
    X(retired_regions)          \
    X(peers)                    \
    X(endpoints)                \
    X(counters)                 \
    X(writes_in_flight)         \
    X(bytes_in_flight)

// Of one domain.
struct DomainMetrics {
    Counter64 bytes;
    Counter64 writes;
    Counter64 immediates;
};

// The meaning of each is told in _native.pyi.
struct Metrics {
#define BATON_DECLARE(name) Counter64 name;
    BATON_FABRIC_METRICS(BATON_DECLARE)
#undef BATON_DECLARE
    std::vector<DomainMetrics> domains;
    // When the thread went to work, 0 while it waits.
    std::atomic<uint64_t> busy_since_ns{0};

    template <class Visit> void each(Visit &&visit) const {
#define BATON_VISIT(name) visit(#name, name.get());
        BATON_FABRIC_METRICS(BATON_VISIT)
#undef BATON_VISIT
    }
};

}  // namespace baton::fabric
