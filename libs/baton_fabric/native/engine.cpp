#include "engine.hpp"

#include "checksum.hpp"
#include "error.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <chrono>
#include <future>
#include <mutex>
#include <thread>

namespace baton::fabric {

// Shared with the progress thread, so that it stays valid for one that never returns from the provider.
struct Engine::Core {
    explicit Core(const Options &options) : progress(std::make_unique<Progress>(options, commands, events, metrics)) {}

    CommandQueue commands;
    EventQueue events;
    Metrics metrics;
    std::unique_ptr<Progress> progress;
    std::promise<void> finished;
    std::mutex closing;
    std::thread thread;
};

namespace {

Engine::RegisteredRegion registered(const Region &region) {
    Engine::RegisteredRegion result{region.id, {}};
    for (const auto &[domain, registration] : region.domains) {
        result.accesses.push_back({domain, registration->key, registration->base});
    }
    return result;
}

}  // namespace

Engine::Engine(const Options &options) : core_(std::make_shared<Core>(options)) {
    for (const auto &domain : core_->progress->domains()) {
        capabilities_.push_back(domain->capabilities());
    }
    window_ = core_->progress->sender().window();
    has_wait_fd_ = core_->progress->has_wait_fd();

    // Signals are for the threads of the language above.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    core_->thread = std::thread([core = core_] {
        pthread_setname_np(pthread_self(), "baton-fabric");
        prctl(PR_SET_TIMERSLACK, 1000UL);  // the default of 50 us doubles the shortest poll interval
        core->progress->run();
        // What was asked and not heard fails with a broken promise.
        core->commands.close();
        core->progress.reset();
        core->metrics.busy_since_ns.store(0);
        core->finished.set_value();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Engine::~Engine() { close(); }

void Engine::close() {
    const std::lock_guard lock(core_->closing);
    if (!core_->thread.joinable()) {
        return;
    }
    core_->commands.push([core = core_.get()] { core->progress->stop(); });
    if (core_->finished.get_future().wait_for(std::chrono::nanoseconds(kCallNs)) == std::future_status::ready) {
        core_->thread.join();
    } else {
        core_->thread.detach();
    }
}

template <class Function> auto Engine::call(Function function, uint64_t timeout_ns) {
    using Result = decltype(function(*core_->progress));
    const auto closed = [] { return Error("the engine is closed", "FAILED_PRECONDITION", "ENGINE_CLOSED"); };
    auto promise = std::make_shared<std::promise<Result>>();
    auto future = promise->get_future();
    const bool taken = core_->commands.push(
        [promise = std::move(promise), function = std::move(function), core = core_.get()]() mutable {
            try {
                if constexpr (std::is_void_v<Result>) {
                    function(*core->progress);
                    promise->set_value();
                } else {
                    promise->set_value(function(*core->progress));
                }
            } catch (...) {
                promise->set_exception(std::current_exception());
            }
        });
    if (!taken) {
        throw closed();
    }
    if (future.wait_for(std::chrono::nanoseconds(timeout_ns)) != std::future_status::ready) {
        throw Error("the progress thread has not answered for " + std::to_string(timeout_ns / 1'000'000'000) +
                        " s: the provider does not return",
                    "DEADLINE_EXCEEDED", "ENGINE_STALLED");
    }
    try {
        return future.get();
    } catch (const std::future_error &) {
        throw closed();
    }
}

const Metrics &Engine::metrics() const { return core_->metrics; }

int Engine::event_fd() const { return core_->events.fd(); }

std::vector<Event> Engine::events() { return core_->events.take(); }

Engine::RegisteredRegion Engine::register_region(int fd, uint64_t length, Domains domains) {
    // The descriptor is the caller's again if the call times out, and a stalled thread must not use it then.
    auto own = std::make_shared<UniqueFd>(UniqueFd::duplicate(fd));
    const auto [region, memory] = call(
        [own, length, domains = std::move(domains)](Progress &progress) {
            const Region &added = progress.regions().add(own->get(), length, progress.chosen(domains));
            return std::pair(registered(added), progress.regions().readable(added.id));
        },
        kRegisterNs);
    // On the caller's thread: it takes some 0.2 s a GB, in which the progress thread has transfers to serve.
    try {
        memory->populate();
    } catch (const Error &) {
        deregister_region(region.region);
        throw;
    }
    return region;
}

Engine::RegisteredRegion Engine::register_device_region(DeviceRange range, Domains domains) {
    auto own = std::make_shared<UniqueFd>(range.dmabuf_fd < 0 ? UniqueFd() : UniqueFd::duplicate(range.dmabuf_fd));
    return call(
        [own, range, domains = std::move(domains)](Progress &progress) {
            return registered(progress.regions().add({range.address, range.length, range.device, own->get()},
                                                     progress.chosen(domains)));
        },
        kRegisterNs);
}

void Engine::deregister_region(uint64_t region) {
    call([region](Progress &progress) { progress.deregister_region(region); });
}

bool Engine::region_retired(uint64_t region) {
    return call([region](Progress &progress) { return progress.regions().retired(region); });
}

uint64_t Engine::attach_counter(int memory_fd, int doorbell_fd, bool rung) {
    auto memory = std::make_shared<UniqueFd>(UniqueFd::duplicate(memory_fd));
    auto doorbell = std::make_shared<UniqueFd>(UniqueFd::duplicate(doorbell_fd));
    return call([memory, doorbell, rung](Progress &progress) {
        return progress.attach_counter(memory->get(), doorbell->get(), rung);
    });
}

void Engine::detach_counter(uint64_t counter) {
    call([counter](Progress &progress) { progress.detach_counter(counter); });
}

std::pair<uint64_t, std::vector<std::string>> Engine::open_endpoint(Domains domains) {
    return call([domains = std::move(domains)](Progress &progress) {
        return progress.open_endpoint(progress.chosen(domains));
    });
}

std::vector<std::pair<uint32_t, uint32_t>> Engine::close_endpoint(uint64_t endpoint) {
    return call([endpoint](Progress &progress) { return progress.close_endpoint(endpoint); });
}

void Engine::open_inbox(uint64_t endpoint, uint64_t slot, uint64_t generation, uint64_t expected,
                        std::optional<std::vector<uint64_t>> regions) {
    call([=, regions = std::move(regions)](Progress &progress) {
        progress.open_inbox(endpoint, slot, generation, expected, regions ? *regions : progress.regions().ids());
    });
}

bool Engine::close_inbox(uint64_t slot, uint64_t generation) {
    return call([slot, generation](Progress &progress) { return progress.close_inbox(slot, generation); });
}

uint64_t Engine::connect(std::vector<std::string> addresses, Domains domains) {
    return call([addresses = std::move(addresses), domains = std::move(domains)](Progress &progress) mutable {
        return progress.connect(std::move(addresses), progress.chosen(domains));
    });
}

void Engine::disconnect(uint64_t peer) {
    call([peer](Progress &progress) { progress.sender().disconnect(peer); });
}

void Engine::open_transfer(uint64_t peer, uint64_t counter, TransferPlan plan, std::vector<StreamRequest> streams) {
    call([peer, counter, plan = std::move(plan), streams = std::move(streams)](Progress &progress) mutable {
        for (auto &request : streams) {
            request.stream.region = &progress.regions().at(request.region);
            plan.streams.push_back(std::move(request.stream));
        }
        progress.open_transfer(peer, counter, std::move(plan));
    });
}

void Engine::submit_chunks(Chunks chunks) {
    call([chunks = std::move(chunks)](Progress &progress) { progress.sender().submit(chunks, now_ns()); });
}

void Engine::cancel_transfer(uint64_t transfer) {
    call([transfer](Progress &progress) { progress.sender().cancel(transfer); });
}

uint64_t Engine::checksum(uint64_t region, const uint64_t *runs, size_t count, uint64_t unit, uint64_t salt) {
    const auto memory = call([region](Progress &progress) { return progress.regions().readable(region); });
    const auto *bytes = static_cast<const char *>(memory->address());
    uint64_t sum = 0;
    for (const uint64_t *run = runs; run != runs + 3 * count; run += 3) {
        const auto [offset, place, length] = std::tuple(run[0], run[1], run[2]);
        if (unit == 0 || length % unit != 0 || length > memory->length() || offset > memory->length() - length) {
            throw invalid("OUT_OF_BOUNDS",
                          std::to_string(length) + " bytes from byte " + std::to_string(offset) +
                              " are not whole units of " + std::to_string(unit) + " within a region of " +
                              std::to_string(memory->length()) + " bytes",
                          {{"region", std::to_string(region)}, {"length", std::to_string(length)}});
        }
        sum += placed_checksum(bytes + offset, place, length, unit, salt);
    }
    return sum;
}

void Engine::set_faults(std::vector<FaultRule> rules, uint64_t seed) {
    call([rules = std::move(rules), seed](Progress &progress) mutable { progress.set_faults(std::move(rules), seed); });
}

void Engine::release_faults() {
    call([](Progress &progress) { progress.release_faults(); });
}

}  // namespace baton::fabric
