#include "domain.hpp"

#include "error.hpp"

#include <sys/epoll.h>

namespace baton::fabric {

Domain::Domain(const std::string &provider, const std::string &node, bool device_memory)
    : info_(find_provider(provider, node, device_memory)), capabilities_(capabilities_of(*info_)) {
    fid_fabric *fabric = nullptr;
    check("fi_fabric", fi_fabric(info_->fabric_attr, &fabric, nullptr));
    fabric_.reset(fabric);
    fid_domain *domain = nullptr;
    check("fi_domain", fi_domain(fabric, info_.get(), &domain, nullptr));
    domain_.reset(domain);

    auto first = std::make_shared<CompletionQueue>(fabric_.get(), domain_.get());
    if (first->wait_fd() >= 0) {
        wait_set_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
        if (!wait_set_) {
            throw system_call_failed("epoll_create1");
        }
    }
    // An rxm endpoint of libfabric 1.17 that is closed stays part of its queue's wait object: the next fi_trywait reads
    // freed memory. So the endpoints of a layered provider ("tcp;ofi_rxm") have queues that are closed with them.
    if (capabilities_.provider.find(';') == std::string::npos) {
        shared_ = std::move(first);
        queues_.push_back(shared_);
        if (wait_set_) {
            watch(*shared_);
        }
    }
}

std::shared_ptr<CompletionQueue> Domain::open_queue() {
    if (shared_) {
        return shared_;
    }
    auto queue = std::make_shared<CompletionQueue>(fabric_.get(), domain_.get());
    if (wait_set_) {
        watch(*queue);
    }
    queues_.push_back(queue);
    return queue;
}

// Closing the queue closes its descriptor, which takes it out of the set.
void Domain::watch(const CompletionQueue &queue) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(wait_set_.get(), EPOLL_CTL_ADD, queue.wait_fd(), &event) != 0) {
        throw system_call_failed("epoll_ctl");
    }
}

void Domain::forget_closed_queues() {
    std::erase_if(queues_, [](const auto &queue) { return queue.expired(); });
}

bool Domain::may_block() {
    wait_fids_.clear();
    for (const auto &weak : queues_) {
        if (const auto queue = weak.lock()) {
            wait_fids_.push_back(queue->wait_fid());
        }
    }
    return wait_fids_.empty() || fi_trywait(fabric_.get(), wait_fids_.data(), static_cast<int>(wait_fids_.size())) == 0;
}

}  // namespace baton::fabric
