#pragma once

#include <cstdint>
#include <functional>
#include <limits>

#include "resources.hpp"

namespace baton::fabric {

// Blocks the progress thread until one of several descriptors, or a time.
class Waiter {
  public:
    enum class Source : uint8_t { kCommands, kQueue, kDoorbell, kProcess };
    static constexpr uint64_t kForever = std::numeric_limits<uint64_t>::max();

    Waiter();

    // `edge`: reported once for each time it is rung, and need not be read.
    void add(int fd, Source source, uint64_t id, bool edge);
    void remove(int fd);

    // Until `wake_ns` at the latest. `ready` is called with the source and id of every descriptor that is.
    void wait(uint64_t now, uint64_t wake_ns, const std::function<void(Source, uint64_t)> &ready);

  private:
    UniqueFd epoll_;
    bool precise_ = true;
};

}  // namespace baton::fabric
