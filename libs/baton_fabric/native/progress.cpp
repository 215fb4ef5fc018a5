#include "progress.hpp"

#include "error.hpp"

#include <algorithm>
#include <exception>
#include <numeric>
#include <set>

namespace baton::fabric {
namespace {

// How often a provider without a wait descriptor is polled while something may happen: right after something did, a
// little later, and once nothing has for a while. An empty turn with its wait costs about 13 us: 7 % of a core at the
// second pace, 1.5 % at the third.
constexpr uint64_t kShortestPollNs = 50'000;
constexpr uint64_t kLongPollNs = 200'000;
constexpr uint64_t kQuietPollNs = 1'000'000;
constexpr uint64_t kQuietAfterNs = 50'000'000;
// And for how long after the last arrival although every inbox is full: what arrives then is a violation.
constexpr uint64_t kArrivalLingerNs = 100'000'000;
// Before an endpoint is closed: its peer may be writing without end.
constexpr int kLastPolls = 8;

}  // namespace

Progress::Progress(const Options &options, CommandQueue &commands, EventQueue &events, Metrics &metrics)
    : options_(options),
      commands_(commands),
      events_(events),
      metrics_(metrics),
      domains_(open_domains(options.provider, options.names, options.device_memory)),
      regions_(domains_, metrics),
      counters_(metrics),
      inboxes_(regions_, events, metrics),
      sender_(domains_, events, metrics, options.post_timeout_ns),
      poll_interval_ns_(kShortestPollNs) {
    metrics_.domains = std::vector<DomainMetrics>(domains_.size());
    waiter_.add(commands.fd(), Waiter::Source::kCommands, 0, true);
    for (size_t number = 0; number < domains_.size(); ++number) {
        Domain &domain = *domains_[number];
        const auto &name = options.names[number];
        try {
            domain.open_endpoint();  // shows now, and not at the first transfer, whether the node is ours
        } catch (const Error &error) {
            throw Error("no endpoint can be opened on node \"" + name + "\": " + error.what(), "UNAVAILABLE",
                        "PROVIDER_UNAVAILABLE", {{"provider", domain.capabilities().provider}, {"node", name}});
        }
        if (domain.wait_fd() >= 0) {
            waiter_.add(domain.wait_fd(), Waiter::Source::kQueue, number, false);
        }
    }
    sender_.set_on_lane([this](const Lane &lane) {
        if (lane.process_fd() >= 0) {
            waiter_.add(lane.process_fd(), Waiter::Source::kProcess, lane.peer().id(), true);
        }
    });
}

bool Progress::has_wait_fd() const {
    return std::all_of(domains_.begin(), domains_.end(), [](const auto &domain) { return domain->wait_fd() >= 0; });
}

std::vector<uint32_t> Progress::chosen(const std::optional<std::vector<uint32_t>> &domains) const {
    std::vector<uint32_t> numbers(domains_.size());
    std::iota(numbers.begin(), numbers.end(), 0U);
    if (!domains) {
        return numbers;
    }
    std::set<uint32_t> different(domains->begin(), domains->end());
    if (domains->empty() || different.size() != domains->size() || *different.rbegin() >= domains_.size()) {
        throw invalid("BAD_ARGUMENT",
                      "domains must be different ones of the " + std::to_string(domains_.size()) +
                          " that there are, and at least one",
                      {{"domains", std::to_string(domains_.size())}});
    }
    return {different.begin(), different.end()};
}

std::pair<uint64_t, std::vector<std::string>> Progress::open_endpoint(const std::vector<uint32_t> &domains) {
    Endpoints opened;
    std::vector<std::string> addresses;
    for (const auto number : domains) {
        addresses.push_back(opened.emplace_back(domains_[number]->open_endpoint())->address());
    }
    const uint64_t id = next_endpoint_++;
    metrics_.endpoints.add(opened.size());
    endpoints_.emplace(id, std::move(opened));
    return {id, addresses};
}

std::vector<std::pair<uint32_t, uint32_t>> Progress::close_endpoint(uint64_t id) {
    const auto found = endpoints_.find(id);
    if (found == endpoints_.end()) {
        throw unknown("endpoint", "UNKNOWN_ENDPOINT", id);
    }
    // What has arrived already still counts.
    for (int polls = 0; polls < kLastPolls && poll(now_ns()) != 0; ++polls) {
    }
    // One after the other, and none is left out because another can't be closed: what is closed is closed for good, and
    // the next attempt has only the rest to do.
    auto &endpoints = found->second;
    std::exception_ptr refused;
    for (auto &endpoint : endpoints) {
        try {
            while (endpoint->refuse()) {
                poll(now_ns());
            }
            endpoint->close();
            poll(now_ns());
            endpoint.reset();
            metrics_.endpoints.subtract();
        } catch (const Error &) {
            refused = std::current_exception();
        }
    }
    std::erase(endpoints, nullptr);
    if (refused) {
        std::rethrow_exception(refused);
    }
    endpoints_.erase(found);
    auto dropped = inboxes_.close_all(id);
    regions_.endpoint_closed(id);
    return dropped;
}

void Progress::open_inbox(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected,
                          std::vector<uint64_t> regions) {
    if (!endpoints_.contains(endpoint)) {
        throw unknown("endpoint", "UNKNOWN_ENDPOINT", endpoint);
    }
    inboxes_.open(endpoint, slot, generation, expected, std::move(regions), now_ns());
}

bool Progress::close_inbox(uint64_t slot, uint64_t generation) {
    const bool was_full = inboxes_.close(slot, generation);
    if (!was_full) {
        // Its sender may still be draining, which over a provider that must be polled takes our part.
        linger_until_ns_ = std::max(linger_until_ns_, now_ns() + options_.post_timeout_ns);
    }
    return was_full;
}

void Progress::deregister_region(uint64_t region) {
    std::set<uint64_t> open;
    for (const auto &[id, endpoint] : endpoints_) {
        open.insert(id);
    }
    regions_.remove(region, std::move(open));
}

uint64_t Progress::attach_counter(int memory_fd, int doorbell_fd, bool rung) {
    LayerCounter &counter = counters_.add(memory_fd, doorbell_fd, rung);
    waiter_.add(counter.doorbell(), Waiter::Source::kDoorbell, counter.id(), true);
    return counter.id();
}

void Progress::detach_counter(uint64_t id) {
    const int doorbell = counters_.at(id).doorbell();
    counters_.check_unused(id);
    waiter_.remove(doorbell);
    counters_.remove(id);
}

uint64_t Progress::connect(std::vector<std::string> addresses, const std::vector<uint32_t> &domains) {
    return sender_.connect(std::move(addresses), domains).id();
}

void Progress::open_transfer(uint64_t peer, uint64_t counter, TransferPlan plan) {
    sender_.open(peer, counters_.at(counter), std::move(plan), now_ns());
}

void Progress::set_faults(std::vector<FaultRule> rules, uint64_t seed) {
    release_faults();
    faults_ = rules.empty() ? nullptr : std::make_unique<Faults>(std::move(rules), seed, metrics_);
    sender_.set_faults(faults_.get());
}

void Progress::release_faults() {
    if (faults_) {
        faults_->release();
        let_faults_go(now_ns());
    }
}

void Progress::let_faults_go(uint64_t now) {
    now = poll_ns_ = std::max(poll_ns_, now);
    faults_->due(
        now, [this, now](WriteContext &context) { sender_.completed(context, now); },
        [this](WriteContext &context) { sender_.write_failed(context, "as a test had it"); },
        [this, now](uint32_t immediate) { inboxes_.arrived(immediate, now); });
}

void Progress::run() {
    expected_ns_ = now_ns();
    try {
        while (!stopping_) {
            turn();
        }
        close_all("ENGINE_CLOSED");
    } catch (const std::exception &error) {
        close_all("ENGINE_FAILED");
        events_.push(EngineFailed{error.what()});
    }
}

void Progress::close_all(const char *reason) {
    sender_.close(reason);
    endpoints_.clear();
}

void Progress::turn() {
    const uint64_t now = now_ns();
    metrics_.busy_since_ns.store(now, std::memory_order_relaxed);
    if (now > expected_ns_ + options_.post_timeout_ns / 2) {
        sender_.forgive(now);  // the whole process was stopped, or the machine was
    }
    expected_ns_ = now;

    bool active = commands_.pending();
    if (active) {
        for (auto &command : commands_.take()) {
            command();
        }
    }
    const uint64_t before = metrics_.writes.get();
    bool moved = false;
    for (const auto &counter : counters_.all()) {
        if (counter->refresh()) {
            sender_.counter_moved(*counter, now);
            moved = true;
        }
    }
    if (moved) {
        sender_.post(now);  // a poll may take long, and only what was in flight already waits for it
        active = true;
    }
    // Completions before deadlines: they may be what one waits for.
    active |= poll(moved ? now_ns() : now) != 0;
    if (faults_) {
        let_faults_go(now);
    }
    sender_.check_deadlines(now);
    const bool more = sender_.post(now);
    active |= more || metrics_.writes.get() != before;

    // A post may complete at once, and a queue must have been read empty before one blocks.
    if (active) {
        poll_interval_ns_ = kShortestPollNs;
        last_active_ns_ = now;
    } else if (!options_.spin && !counters_.must_be_polled()) {
        wait(now);
    }
}

size_t Progress::poll(uint64_t now) {
    // A command of this turn may have polled since the turn began; what comes later has no earlier time.
    poll_ns_ = std::max(poll_ns_, now);
    size_t total = 0;
    for (polled_ = 0; polled_ < domains_.size(); ++polled_) {
        const size_t count = domains_[polled_]->poll(*this);
        if (count == 0) {
            sender_.queue_empty(polled_);
        }
        total += count;
    }
    return total;
}

bool Progress::may_block() {
    bool idle = true;
    for (const auto &domain : domains_) {
        idle &= domain->wait_fd() < 0 || domain->may_block();
    }
    return idle;
}

void Progress::written(void *context) {
    auto &write = *static_cast<WriteContext *>(context);
    // Without a transfer it is of a peer that was closed meanwhile.
    if (!faults_ || write.strand == nullptr || !faults_->completed(write, poll_ns_)) {
        sender_.completed(write, poll_ns_);
    }
}

void Progress::arrived(uint32_t immediate) {
    metrics_.domains[polled_].immediates.add();
    if (!faults_ || !faults_->arrived(polled_, immediate, poll_ns_)) {
        inboxes_.arrived(immediate, poll_ns_);
    }
    linger_until_ns_ = std::max(linger_until_ns_, poll_ns_ + kArrivalLingerNs);
}

void Progress::failed(const CompletionError &error) {
    if (error.context != nullptr) {
        sender_.write_failed(*static_cast<WriteContext *>(error.context), error.detail);
    } else {
        metrics_.receive_errors.add();
    }
}

void Progress::lost(uint64_t peer, const std::string &detail) { sender_.peer_lost(peer, detail); }

uint64_t Progress::wake_time(uint64_t now) {
    uint64_t wake = faults_ ? std::min(sender_.next_time_ns(), faults_->next_ns()) : sender_.next_time_ns();
    const bool open = inboxes_.active() != 0 || sender_.writes_in_flight() || now < linger_until_ns_;
    if (open && !has_wait_fd()) {
        wake = std::min(wake, now + poll_interval_ns_);
        const bool quiet = now - last_active_ns_ > kQuietAfterNs;
        poll_interval_ns_ = std::min(2 * poll_interval_ns_, quiet ? kQuietPollNs : kLongPollNs);
    }
    return wake;
}

void Progress::wait(uint64_t now) {
    if (!may_block()) {
        return;
    }
    const uint64_t wake = wake_time(now);
    metrics_.busy_since_ns.store(0, std::memory_order_relaxed);
    waiter_.wait(now, wake, [this](Waiter::Source source, uint64_t id) {
        if (source == Waiter::Source::kProcess) {
            sender_.peer_lost(id, "the peer's process has ended");
        }
    });
    metrics_.wakeups.add();
    expected_ns_ = wake == Waiter::kForever ? Waiter::kForever - options_.post_timeout_ns : wake;
}

}  // namespace baton::fabric
