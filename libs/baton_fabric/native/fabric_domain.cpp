#include "fabric_domain.hpp"

#include "error.hpp"
#include "fabric_endpoint.hpp"

#include <rdma/fi_errno.h>
#include <sys/epoll.h>
#include <sys/uio.h>

namespace baton::fabric {
namespace {

struct FabricRegistration : Registration {
    UniqueFid<fid_mr> region;
};

}  // namespace

FabricDomain::FabricDomain(const std::string &provider, const std::string &node, bool device_memory)
    : info_(find_provider(provider, node, device_memory)),
      capabilities_(capabilities_of(*info_)),
      keys_(capabilities_.mr_key_size) {
    fid_fabric *fabric = nullptr;
    check("fi_fabric", fi_fabric(info_->fabric_attr, &fabric, nullptr));
    fabric_.reset(fabric);
    fid_domain *domain = nullptr;
    check("fi_domain", fi_domain(fabric, info_.get(), &domain, nullptr));
    domain_.reset(domain);

    auto first = std::make_shared<CompletionQueue>(fabric_.get(), domain_.get());
    // An rxm endpoint of libfabric 1.17 that is closed stays part of its queue's wait object: the next fi_trywait reads
    // freed memory. So the endpoints of a layered provider ("tcp;ofi_rxm") have queues that are closed with them.
    if (capabilities_.provider.find(';') == std::string::npos) {
        shared_ = std::move(first);
        queues_.push_back(shared_);
    } else if (first->wait_fd() >= 0) {
        wait_set_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
        if (!wait_set_) {
            throw system_call_failed("epoll_create1");
        }
    }
}

std::unique_ptr<Registration> FabricDomain::register_memory(const Mapping &memory, int) {
    const iovec whole{memory.address(), memory.length()};
    fi_mr_attr attributes{};
    attributes.mr_iov = &whole;
    attributes.iov_count = 1;
    attributes.iface = FI_HMEM_SYSTEM;
    int result = 0;
    auto registration = register_memory(attributes, 0, memory.address(), result);
    check("fi_mr_regattr", result);
    if (!capabilities_.mr_local()) {
        registration->descriptor = nullptr;
    }
    return registration;
}

std::unique_ptr<Registration> FabricDomain::register_memory(const DeviceRange &range) {
    fi_mr_attr attributes{};
    attributes.iov_count = 1;
    attributes.iface = FI_HMEM_CUDA;
    attributes.device.cuda = range.device;
    int result = 0;
    void *address = reinterpret_cast<void *>(range.address);
    std::unique_ptr<Registration> registration;
#ifdef FI_MR_DMABUF
    // Not where addresses are offsets: libfabric 2.6 takes the descriptor's number for the address there
    // (ofi_mr_map_insert).
    const fi_mr_dmabuf dmabuf{range.dmabuf_fd, 0, range.length, address};
    if (range.dmabuf_fd >= 0 && capabilities_.mr_virt_addr()) {
        attributes.dmabuf = &dmabuf;
        registration = register_memory(attributes, FI_MR_DMABUF, address, result);
    }
#endif
    // Whether a provider takes dma-bufs is not among what it says of itself.
    const iovec memory{address, range.length};
    if (!registration) {
        attributes.mr_iov = &memory;
        registration = register_memory(attributes, 0, address, result);
    }
    check("fi_mr_regattr", result);
    if (!capabilities_.mr_local() && !capabilities_.mr_device()) {
        registration->descriptor = nullptr;
    }
    return registration;
}

std::unique_ptr<Registration> FabricDomain::register_memory(fi_mr_attr attributes, uint64_t flags, void *address,
                                                            int &result) {
    attributes.access = FI_WRITE | FI_REMOTE_WRITE;
    fid_mr *region = nullptr;
    result = -FI_ENOKEY;
    for (int attempt = 0; attempt < 16 && result == -FI_ENOKEY; ++attempt) {
        attributes.requested_key = capabilities_.mr_prov_key() ? 0 : keys_.draw();
        result = fi_mr_regattr(domain_.get(), &attributes, flags, &region);
    }
    if (result != 0) {
        return nullptr;
    }
    auto registration = std::make_unique<FabricRegistration>();
    registration->region.reset(region);
    registration->descriptor = fi_mr_desc(region);
    registration->key = fi_mr_key(region);
    registration->base = capabilities_.mr_virt_addr() ? reinterpret_cast<uint64_t>(address) : 0;
    return registration;
}

std::unique_ptr<ReceivingEndpoint> FabricDomain::open_endpoint() {
    return std::make_unique<FabricReceivingEndpoint>(*this);
}

std::unique_ptr<SendingEndpoint> FabricDomain::connect(const std::string &address, uint64_t) {
    return std::make_unique<FabricSendingEndpoint>(*this, address);
}

std::shared_ptr<CompletionQueue> FabricDomain::open_queue() {
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
void FabricDomain::watch(const CompletionQueue &queue) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(wait_set_.get(), EPOLL_CTL_ADD, queue.wait_fd(), &event) != 0) {
        throw system_call_failed("epoll_ctl");
    }
}

void FabricDomain::forget_closed_queues() {
    std::erase_if(queues_, [](const auto &queue) { return queue.expired(); });
}

size_t FabricDomain::poll(Completions &completions) {
    size_t total = 0;
    bool closed = false;
    for (const auto &weak : queues_) {
        if (const auto queue = weak.lock()) {
            total += queue->poll(completions, errors_);
        } else {
            closed = true;
        }
    }
    if (closed) {
        forget_closed_queues();
    }
    for (size_t i = 0; i < errors_.size(); ++i) {
        completions.failed(errors_[i]);
    }
    errors_.clear();
    return total;
}

bool FabricDomain::may_block() {
    wait_fids_.clear();
    for (const auto &weak : queues_) {
        if (const auto queue = weak.lock()) {
            wait_fids_.push_back(queue->wait_fid());
        }
    }
    return wait_fids_.empty() || fi_trywait(fabric_.get(), wait_fids_.data(), static_cast<int>(wait_fids_.size())) == 0;
}

}  // namespace baton::fabric
