#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "resources.hpp"

namespace baton::fabric {

// From any thread to the progress thread. Bounded by its callers: each waits for its command.
class CommandQueue {
  public:
    using Command = std::function<void()>;

    CommandQueue() : fd_(UniqueFd::event()) {}

    // False once the queue is closed.
    bool push(Command command);
    bool pending() const { return pending_.load(std::memory_order_acquire); }
    std::vector<Command> take();
    // Refuses all further commands and returns those that were not taken.
    std::vector<Command> close();
    // Rung by every push; never read, so to be waited on edge-triggered.
    int fd() const { return fd_.get(); }

  private:
    UniqueFd fd_;
    std::mutex mutex_;
    std::vector<Command> commands_;
    std::atomic<bool> pending_{false};
    bool closed_ = false;
};

}  // namespace baton::fabric
