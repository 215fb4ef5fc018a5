// Two engines of one process under many threads, for the sanitizers and as a soak.
//
//     fabric_stress PROVIDER [SECONDS [SEED]]
//
// Every lane is an engine's user on both sides, with pages, a counter and a connection of its own. Its transfers go
// through, are cancelled, lose their connection or are fenced off, at random moments; as soon as the protocol says that
// pages are free, the lane writes to them. Beside the lanes, threads read metrics, make checksums, and register and
// deregister memory; at the end everything is closed while all of them are at work.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "error.hpp"
#include "immediate.hpp"
#include "side.hpp"

namespace baton::tests {
namespace {

constexpr uint64_t kLayers = 3;
constexpr uint64_t kPages = 12;  // of a lane, in each layer
constexpr uint64_t kPageBytes = 24 << 10;
constexpr uint32_t kLanes = 3;
constexpr uint32_t kSlots = Immediate::kSlots / kLanes;
constexpr uint64_t kLaneBytes = kLayers * kPages * kPageBytes;

// What a lane's calls may meet once the engines are being closed.
bool is_closing(const Error &error) { return error.reason() == "ENGINE_CLOSED"; }
Error closed() { return Error("the engine is closed", "FAILED_PRECONDITION", "ENGINE_CLOSED"); }

// Over tcp both sides have several domains, and not as many as each other.
Options with_domains(Options options, std::vector<std::string> names) {
    if (options.provider == "tcp") {
        options.names = std::move(names);
    }
    return options;
}

struct World {
    explicit World(const Options &options)
        : sender(with_domains(options, {"127.0.0.2", "127.0.0.3"})),
          receiver(with_domains(options, {"127.0.0.4", "127.0.0.5", "127.0.0.6"})) {}

    Side sender;
    Side receiver;
    std::atomic<bool> closing{false};
    std::atomic<uint64_t> transfers{0};
    std::array<std::atomic<uint64_t>, 3> ends{};
};

class Lane {
  public:
    Lane(World &world, uint32_t number, uint64_t seed)
        : world_(world),
          number_(number),
          random_(seed + number),
          source_(kLaneBytes),
          destination_(kLaneBytes),
          ours_(world.sender.engine().register_region(source_.fd(), kLaneBytes, {})),
          theirs_(world.receiver.engine().register_region(destination_.fd(), kLaneBytes, {})),
          cell_(world.sender.engine().attach_counter(counter_.memory_fd(), counter_.doorbell_fd(), true)) {
        connect();
    }

    void run(std::chrono::steady_clock::time_point end) {
        try {
            while (std::chrono::steady_clock::now() < end || !world_.closing.load()) {
                transfer();
            }
        } catch (const Error &error) {
            require(is_closing(error) || world_.closing, error.what());
        }
    }

    const Engine::RegisteredRegion &theirs() const { return theirs_; }

  private:
    enum class Plan { kComplete, kCancel, kFence, kDisconnect };

    uint64_t draw(uint64_t below) { return random_() % below; }
    char *page(Memory &memory, uint64_t layer, uint64_t number) {
        return memory.bytes() + (layer * kPages + number) * kPageBytes;
    }

    void connect() {
        auto [endpoint, addresses] = world_.receiver.engine().open_endpoint({});
        endpoint_ = endpoint;
        peer_ = world_.sender.engine().connect(std::move(addresses), {});
    }

    std::vector<uint32_t> draw_pages(size_t count) {
        std::vector<uint32_t> pages(kPages);
        for (uint32_t i = 0; i < kPages; ++i) {
            pages[i] = i;
        }
        if (draw(2) == 0) {  // otherwise neighbours, which leave as one write
            std::shuffle(pages.begin(), pages.end(), random_);
        }
        pages.resize(count);
        return pages;
    }

    void transfer() {
        const size_t count = 1 + draw(kPages);
        const auto from = draw_pages(count);
        const auto to = draw_pages(count);
        const auto plan = static_cast<Plan>(draw(8) < 4 ? 0 : draw(4));
        const uint64_t stops_at = draw(kLayers);
        const uint32_t slot = number_ * kSlots + static_cast<uint32_t>(round_ % kSlots);
        const auto generation = static_cast<uint32_t>(round_ / kSlots);
        const uint64_t id = (uint64_t{number_} << 48) | ++round_;
        const uint64_t base = steps_++ * kLayers;
        std::memset(destination_.bytes(), 0, kLaneBytes);

        auto &sender = world_.sender.engine();
        auto &receiver = world_.receiver.engine();
        receiver.open_inbox(endpoint_, slot, generation, kLayers * count, std::vector{theirs_.region});
        open(id, slot, generation, from, to);
        const bool early = draw(2) == 0;
        const auto submit = [&] { sender.submit_chunks({{id, Chunk{base, 0, count, true}}}); };
        if (early) {
            submit();
        }
        for (uint64_t layer = 0; layer < kLayers; ++layer) {
            for (const auto number : from) {
                std::memset(page(source_, layer, number), static_cast<int>(1 + draw(255)), kPageBytes);
            }
            counter_.advance(base + layer + 1);
            if (plan != Plan::kComplete && layer == stops_at) {
                if (!early) {
                    submit();
                }
                break;
            }
            if (layer == 0 && !early && plan == Plan::kComplete) {
                submit();
            }
        }
        stop(plan, id);
        finish(plan, id, slot, generation, from, to);
        counter_.advance(base + kLayers);
        world_.transfers.fetch_add(1, std::memory_order_relaxed);
    }

    void open(uint64_t id, uint32_t slot, uint32_t generation, const std::vector<uint32_t> &from,
              const std::vector<uint32_t> &to) {
        const Grid grid{kPages * kPageBytes, kPageBytes, 1, 0};
        Stream stream{nullptr, grid, {}, kLaneBytes, grid, 0, kLayers, {{0, 0, kPageBytes}}};
        for (const auto &[domain, key, base] : theirs_.accesses) {
            stream.remotes.push_back({domain, key, base});
        }
        world_.sender.engine().open_transfer(peer_, cell_, TransferPlan{id, slot, generation, kLayers, {}, from, to},
                                             {{ours_.region, std::move(stream)}});
    }

    void stop(Plan plan, uint64_t id) {
        for (uint64_t spins = draw(3000); spins != 0; --spins) {
            std::atomic_signal_fence(std::memory_order_seq_cst);
        }
        if (plan == Plan::kCancel) {
            world_.sender.engine().cancel_transfer(id);
        } else if (plan == Plan::kDisconnect) {
            world_.sender.engine().disconnect(peer_);
        }
        if (plan == Plan::kFence || plan == Plan::kDisconnect) {
            world_.receiver.engine().close_endpoint(endpoint_);
            // Fenced: the destination is ours.
            std::memset(destination_.bytes(), 0, kLaneBytes);
        }
    }

    void finish(Plan plan, uint64_t id, uint32_t slot, uint32_t generation, const std::vector<uint32_t> &from,
                const std::vector<uint32_t> &to) {
        const bool fenced = plan == Plan::kFence || plan == Plan::kDisconnect;
        if (plan == Plan::kFence) {
            // If it had nothing in flight, it does not notice.
            world_.sender.engine().cancel_transfer(id);
        }
        const Ended ended = world_.sender.await_end(id);
        world_.ends.at(static_cast<size_t>(ended.how)).fetch_add(1, std::memory_order_relaxed);
        // The receiver's engine may be closed before the sender's: of the end of its thread this one would not know.
        if (ended.reason == "ENGINE_CLOSED" || (world_.closing && ended.how != Ended::How::kDone)) {
            throw closed();
        }
        require(fenced || ended.how != Ended::How::kFailed || world_.closing,
                "only a fenced transfer fails: " + ended.reason);
        if (!fenced && ended.how == Ended::How::kDone) {
            if (!world_.receiver.await_full(slot, generation)) {
                throw closed();
            }
            for (uint64_t layer = 0; layer < kLayers; ++layer) {
                for (size_t i = 0; i < from.size(); ++i) {
                    const char *sent = page(source_, layer, from[i]);
                    require(std::memcmp(sent, page(destination_, layer, to[i]), kPageBytes) == 0, "exact delivery");
                }
            }
        }
        // Whichever way it ended, nothing reads the source and nothing writes the destination.
        std::memset(source_.bytes(), 0xEE, kLaneBytes);
        if (fenced) {
            require(std::all_of(destination_.bytes(), destination_.bytes() + kLaneBytes, [](char c) { return c == 0; }),
                    "nothing lands behind a fence");
            world_.sender.engine().disconnect(peer_);
            connect();
        } else {
            std::memset(destination_.bytes(), 0xDD, kLaneBytes);
            const bool full = world_.receiver.engine().close_inbox(slot, generation);
            require(full == (ended.how == Ended::How::kDone) || world_.closing, "full if the transfer is done");
        }
    }

    World &world_;
    uint32_t number_;
    std::mt19937_64 random_;
    Memory source_;
    Memory destination_;
    Counter counter_;
    Engine::RegisteredRegion ours_;
    Engine::RegisteredRegion theirs_;
    uint64_t cell_;
    uint64_t endpoint_ = 0;
    uint64_t peer_ = 0;
    uint64_t round_ = 0;
    uint64_t steps_ = 0;
};

// Until the engines close.
template <class Body> std::thread beside(World &world, Body body) {
    return std::thread([&world, body] {
        try {
            while (!world.closing.load()) {
                body();
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        } catch (const Error &error) {
            require(is_closing(error) || world.closing, error.what());
        }
    });
}

// Everything at once, and closed in the middle of it.
void run(const Options &options, double seconds, uint64_t seed) {
    World world(options);
    std::vector<std::unique_ptr<Lane>> lanes;
    for (uint32_t number = 0; number < kLanes; ++number) {
        lanes.push_back(std::make_unique<Lane>(world, number, seed));
    }
    Memory steady(1 << 16);
    const auto steady_region = world.sender.engine().register_region(steady.fd(), steady.length(), {});
    const auto passing = Memory(1 << 16);

    const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                            std::chrono::duration<double>(seconds));
    std::vector<std::thread> threads;
    for (auto &lane : lanes) {
        threads.emplace_back([&lane, end] { lane->run(end); });
    }
    threads.push_back(beside(world, [&world] {
        for (Side *side : {&world.sender, &world.receiver}) {
            side->engine().metrics().each([](const char *, uint64_t) {});
        }
    }));
    threads.push_back(beside(world, [&world, &steady_region] {
        const uint64_t runs[] = {0, 0, 1 << 16};
        world.sender.engine().checksum(steady_region.region, runs, 1, 4096, 7);
    }));
    threads.push_back(beside(world, [&world, &passing] {
        auto &engine = world.receiver.engine();
        const auto region = engine.register_region(passing.fd(), 1 << 16, {});
        engine.deregister_region(region.region);
        engine.region_retired(region.region);
    }));
    std::this_thread::sleep_until(end);
    world.closing = true;
    std::thread first([&world] { world.sender.close(); });
    world.receiver.close();
    first.join();
    for (auto &thread : threads) {
        thread.join();
    }
    std::printf("%s%s: %lu transfers, %lu done, %lu cancelled, %lu failed\n", options.provider.c_str(),
                options.spin ? ", spinning" : "", world.transfers.load(), world.ends[0].load(), world.ends[1].load(),
                world.ends[2].load());
    std::fflush(stdout);
}

}  // namespace
}  // namespace baton::tests

int main(int argc, char **argv) {
    baton::fabric::Options options;
    options.provider = argc > 1 ? argv[1] : "local";
    const double seconds = argc > 2 ? std::strtod(argv[2], nullptr) : 2.0;
    uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
    // Several lives of engines, because their ends are the most intricate.
    const int lives = std::max(2, static_cast<int>(seconds / 2));
    for (int life = 0; life < lives; ++life) {
        options.spin = life % 4 == 3;
        baton::tests::run(options, seconds / lives, seed++);
    }
    return 0;
}
