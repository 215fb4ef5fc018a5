#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "completion_queue.hpp"
#include "provider.hpp"
#include "resources.hpp"

namespace baton::fabric {

// One NIC: fabric, domain, and the completion queues of its endpoints. Used by one thread at a time.
class Domain {
  public:
    Domain(const std::string &provider, const std::string &node, bool device_memory);

    const Capabilities &capabilities() const { return capabilities_; }
    const fi_info &info() const { return *info_; }
    fid_domain *fid() const { return domain_.get(); }

    // The queue for a new endpoint. Shared with the others, if that is safe: the util providers make progress for a
    // whole domain at a time, and one queue costs one poll however many peers there are.
    std::shared_ptr<CompletionQueue> open_queue();

    // Readable when poll() may have something to do; -1 where the provider cannot say.
    int wait_fd() const { return wait_set_.get(); }
    // Whether it is safe to block on wait_fd() now; if not, poll() again first.
    bool may_block();

    // As CompletionQueue::poll, over all queues; and `failed(error)` for each error, which may close endpoints.
    template <class Written, class Arrived, class Failed>
    size_t poll(Written &&written, Arrived &&arrived, Failed &&failed);

  private:
    void watch(const CompletionQueue &queue);
    void forget_closed_queues();

    Info info_;
    Capabilities capabilities_;
    UniqueFid<fid_fabric> fabric_;
    UniqueFid<fid_domain> domain_;
    UniqueFd wait_set_;  // an epoll of the queues' descriptors
    std::shared_ptr<CompletionQueue> shared_;
    std::vector<std::weak_ptr<CompletionQueue>> queues_;
    std::vector<struct fid *> wait_fids_;
    std::vector<CompletionError> errors_;
};

template <class Written, class Arrived, class Failed>
size_t Domain::poll(Written &&written, Arrived &&arrived, Failed &&failed) {
    size_t total = 0;
    bool closed = false;
    for (const auto &weak : queues_) {
        if (const auto queue = weak.lock()) {
            total += queue->poll(written, arrived, errors_);
        } else {
            closed = true;
        }
    }
    if (closed) {
        forget_closed_queues();
    }
    for (size_t i = 0; i < errors_.size(); ++i) {
        failed(errors_[i]);
    }
    errors_.clear();
    return total;
}

}  // namespace baton::fabric
