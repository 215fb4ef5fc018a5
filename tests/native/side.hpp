#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "engine.hpp"
#include "resources.hpp"

namespace baton::tests {

using namespace baton::fabric;

// Ends the process if `condition` does not hold: a test that went wrong has threads that nobody can join.
void require(bool condition, const std::string &what);

// A sealed memfd, mapped.
class Memory {
  public:
    explicit Memory(uint64_t length);

    int fd() const { return fd_.get(); }
    uint64_t length() const { return mapping_.length(); }
    char *bytes() { return static_cast<char *>(mapping_.address()); }

  private:
    UniqueFd fd_;
    Mapping mapping_;
};

// What a model process has beside its pages.
class Counter {
  public:
    Counter();
    int memory_fd() const { return cell_.fd(); }
    int doorbell_fd() const { return doorbell_.get(); }
    void advance(uint64_t value);

  private:
    Memory cell_;
    UniqueFd doorbell_;
};

// The terminal event of a transfer.
struct Ended {
    enum class How { kDone, kCancelled, kFailed };
    How how;
    bool quiesced;
    std::string reason;
};

// An engine, and a thread that hands its events to those who wait for them.
class Side {
  public:
    explicit Side(const Options &options);
    ~Side();

    Engine &engine() { return engine_; }
    void close();
    Ended await_end(uint64_t transfer);
    // False if the engine was closed first.
    bool await_full(uint32_t slot, uint32_t generation);

  private:
    void listen();
    void take(const Event &event);

    Engine engine_;
    std::mutex mutex_;
    std::condition_variable came_;
    std::map<uint64_t, Ended> ended_;
    std::map<std::pair<uint32_t, uint32_t>, bool> full_;
    bool closed_ = false;
    UniqueFd stop_;
    std::thread listener_;
};

}  // namespace baton::tests
