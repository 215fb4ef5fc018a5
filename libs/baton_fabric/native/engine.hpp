#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "events.hpp"
#include "metrics.hpp"
#include "progress.hpp"

namespace baton::fabric {

// The engine as other threads see it: each call goes to the progress thread and waits there. See _native.pyi.
class Engine {
  public:
    explicit Engine(const Options &options);
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    // How a region is addressed in one domain.
    struct Access {
        uint32_t domain;
        uint64_t key;
        uint64_t base;
    };
    struct RegisteredRegion {
        uint64_t region;
        std::vector<Access> accesses;
    };
    // Numbers of domains; none given: all.
    using Domains = std::optional<std::vector<uint32_t>>;
    // A stream as the caller knows it: its region by number.
    struct StreamRequest {
        uint64_t region;
        Stream stream;
    };
    using Chunks = std::vector<std::pair<uint64_t, Chunk>>;

    // Of each domain.
    const std::vector<Capabilities> &capabilities() const { return capabilities_; }
    uint32_t window() const { return window_; }
    bool has_wait_fd() const { return has_wait_fd_; }
    const Metrics &metrics() const;
    int event_fd() const;
    std::vector<Event> events();
    void close();

    RegisteredRegion register_region(int fd, uint64_t length, Domains domains);
    RegisteredRegion register_device_region(DeviceRange range, Domains domains);
    void deregister_region(uint64_t region);
    bool region_retired(uint64_t region);
    uint64_t attach_counter(int memory_fd, int doorbell_fd, bool rung);
    void detach_counter(uint64_t counter);
    std::pair<uint64_t, std::vector<std::string>> open_endpoint(Domains domains);
    std::vector<std::pair<uint32_t, uint32_t>> close_endpoint(uint64_t endpoint);
    void open_inbox(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected,
                    std::optional<std::vector<uint64_t>> regions);
    bool close_inbox(uint64_t slot, uint64_t generation);
    uint64_t connect(std::vector<std::string> addresses, Domains domains);
    void disconnect(uint64_t peer);
    void open_transfer(uint64_t peer, uint64_t counter, TransferPlan plan, std::vector<StreamRequest> streams);
    void submit_chunks(Chunks chunks);
    void cancel_transfer(uint64_t transfer);
    // On the calling thread: the sum of placed_checksum over runs of (offset, place, length) of a region.
    uint64_t checksum(uint64_t region, const uint64_t *runs, size_t count, uint64_t unit, uint64_t salt);
    void set_faults(std::vector<FaultRule> rules, uint64_t seed);
    void release_faults();

  private:
    struct Core;
    template <class Function> auto call(Function function, uint64_t timeout_ns = kCallNs);

    // How long a call waits for the progress thread before it is declared stalled. Registration may have to pin
    // gigabytes.
    static constexpr uint64_t kCallNs = 10'000'000'000;
    static constexpr uint64_t kRegisterNs = 120'000'000'000;

    std::shared_ptr<Core> core_;
    std::vector<Capabilities> capabilities_;
    uint32_t window_ = 0;
    bool has_wait_fd_ = false;
};

}  // namespace baton::fabric
