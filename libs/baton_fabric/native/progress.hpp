#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
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
    std::vector<std::string> names = {"127.0.0.1"};  // of the domains
    bool spin = false;
    uint64_t post_timeout_ns = 5'000'000'000;
    bool device_memory = false;  // prefer a provider that can register memory of GPUs
};

// What the progress thread owns, and its loop. Everything here happens on that thread.
class Progress : private Completions {
  public:
    Progress(const Options &options, CommandQueue &commands, EventQueue &events, Metrics &metrics);

    const DomainList &domains() const { return domains_; }
    bool has_wait_fd() const;
    RegionTable &regions() { return regions_; }
    Sender &sender() { return sender_; }

    // Commands; see _native.pyi.
    std::pair<uint64_t, std::vector<std::string>> open_endpoint(const std::vector<uint32_t> &domains);
    std::vector<std::pair<uint32_t, uint32_t>> close_endpoint(uint64_t endpoint);
    void open_inbox(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected,
                    std::vector<uint64_t> regions);
    bool close_inbox(uint64_t slot, uint64_t generation);
    // As regions(), for all domains unless some are named. Throws Error(BAD_ARGUMENT) for one that there is not.
    std::vector<uint32_t> chosen(const std::optional<std::vector<uint32_t>> &domains) const;
    void deregister_region(uint64_t region);
    uint64_t attach_counter(int memory_fd, int doorbell_fd, bool rung);
    void detach_counter(uint64_t counter);
    uint64_t connect(std::vector<std::string> addresses, const std::vector<uint32_t> &domains);
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
    bool may_block();
    void wait(uint64_t now);
    uint64_t wake_time(uint64_t now);
    void close_all(const char *reason);
    void let_faults_go(uint64_t now);

    Options options_;
    CommandQueue &commands_;
    EventQueue &events_;
    Metrics &metrics_;
    DomainList domains_;
    RegionTable regions_;
    CounterTable counters_;
    InboxTable inboxes_;
    // One peer's: where it writes to in each of some domains.
    using Endpoints = std::vector<std::unique_ptr<ReceivingEndpoint>>;
    std::unordered_map<uint64_t, Endpoints> endpoints_;
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
    uint32_t polled_ = 0;   // the domain that is being polled
    // The latest time at which the thread meant to run again.
    uint64_t expected_ns_ = 0;
};

}  // namespace baton::fabric
