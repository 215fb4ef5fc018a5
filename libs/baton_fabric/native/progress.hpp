#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "counters.hpp"
#include "domain.hpp"
#include "events.hpp"
#include "faults.hpp"
#include "inboxes.hpp"
#include "metrics.hpp"
#include "regions.hpp"
#include "sender.hpp"
#include "waiter.hpp"

namespace baton::fabric {

struct Options {
    std::string provider = "auto";
    std::string node = "127.0.0.1";
    bool spin = false;
    uint64_t post_timeout_ns = 5'000'000'000;
    bool device_memory = false;  // prefer a provider that can register memory of GPUs
};

// What the progress thread owns, and its loop. Everything here happens on that thread.
class Progress : private Completions {
  public:
    Progress(const Options &options, CommandQueue &commands, EventQueue &events, Metrics &metrics);

    Domain &domain() { return *domain_; }
    RegionTable &regions() { return regions_; }
    Sender &sender() { return sender_; }

    // Commands; see _native.pyi.
    std::pair<uint64_t, std::string> open_endpoint();
    std::vector<std::pair<uint32_t, uint32_t>> close_endpoint(uint64_t endpoint);
    void open_inbox(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected,
                    std::vector<uint64_t> regions);
    bool close_inbox(uint64_t slot, uint64_t generation);
    void deregister_region(uint64_t region);
    uint64_t attach_counter(int memory_fd, int doorbell_fd, bool rung);
    void detach_counter(uint64_t counter);
    uint64_t connect(const std::string &address);
    void open_transfer(uint64_t peer, uint64_t counter, TransferPlan plan);
    void set_faults(std::vector<FaultRule> rules, uint64_t seed);
    void release_faults();

    void stop() { stopping_ = true; }
    // Until stop(). An error on the way ends every transfer, and is the engine's last event.
    void run();

  private:
    void written(void *context) override;
    void arrived(uint32_t immediate) override;
    void failed(const CompletionError &error) override;
    void lost(uint64_t peer, const std::string &detail) override;

    void turn();
    size_t poll(uint64_t now);
    void wait(uint64_t now);
    uint64_t wake_time(uint64_t now);
    void close_all(const char *reason);
    void let_faults_go(uint64_t now);

    Options options_;
    CommandQueue &commands_;
    EventQueue &events_;
    Metrics &metrics_;
    std::unique_ptr<Domain> domain_;
    RegionTable regions_;
    CounterTable counters_;
    InboxTable inboxes_;
    std::unordered_map<uint64_t, std::unique_ptr<ReceivingEndpoint>> endpoints_;
    Sender sender_;
    std::unique_ptr<Faults> faults_;
    Waiter waiter_;
    uint64_t next_endpoint_ = 1;
    bool stopping_ = false;
    // For providers without a wait descriptor.
    uint64_t poll_interval_ns_;
    uint64_t last_active_ns_ = 0;
    uint64_t linger_until_ns_ = 0;
    uint64_t poll_ns_ = 0;  // the time of the poll under way
    // The latest time at which the thread meant to run again.
    uint64_t expected_ns_ = 0;
};

}  // namespace baton::fabric
