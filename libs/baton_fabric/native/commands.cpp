#include "commands.hpp"

#include <sys/eventfd.h>

#include <utility>

namespace baton::fabric {

bool CommandQueue::push(Command command) {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) {
            return false;
        }
        commands_.push_back(std::move(command));
        pending_.store(true, std::memory_order_release);
    }
    eventfd_write(fd_.get(), 1);
    return true;
}

std::vector<CommandQueue::Command> CommandQueue::take() {
    const std::lock_guard lock(mutex_);
    pending_.store(false, std::memory_order_relaxed);
    return std::exchange(commands_, {});
}

std::vector<CommandQueue::Command> CommandQueue::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    return std::exchange(commands_, {});
}

}  // namespace baton::fabric
