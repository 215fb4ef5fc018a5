#pragma once

#include <memory>
#include <random>
#include <vector>

#include "completion_queue.hpp"
#include "domain.hpp"

namespace baton::fabric {

// A domain of libfabric: fabric, domain, and the completion queues of its endpoints.
class FabricDomain : public Domain {
  public:
    // Throws Error(PROVIDER_UNAVAILABLE).
    FabricDomain(const std::string &provider, const std::string &node, bool device_memory);

    const fi_info &info() const { return *info_; }
    fid_domain *fid() const { return domain_.get(); }

    // The queue for a new endpoint. Shared with the others, if that is safe: the util providers make progress for a
    // whole domain at a time, and one queue costs one poll however many peers there are.
    std::shared_ptr<CompletionQueue> open_queue();

    const Capabilities &capabilities() const override { return capabilities_; }
    std::unique_ptr<Registration> register_memory(const Mapping &memory, int fd) override;
    std::unique_ptr<Registration> register_memory(const DeviceRange &range) override;
    std::unique_ptr<ReceivingEndpoint> open_endpoint() override;
    std::unique_ptr<SendingEndpoint> connect(const std::string &address, uint64_t peer) override;
    size_t poll(Completions &completions) override;
    int wait_fd() const override { return shared_ ? shared_->wait_fd() : wait_set_.get(); }
    bool may_block() override;

  private:
    // Null with an error in `result`.
    std::unique_ptr<Registration> register_memory(fi_mr_attr attributes, uint64_t flags, void *address, int &result);
    void watch(const CompletionQueue &queue);
    void forget_closed_queues();

    Info info_;
    Capabilities capabilities_;
    KeySource keys_;
    UniqueFid<fid_fabric> fabric_;
    UniqueFid<fid_domain> domain_;
    UniqueFd wait_set_;  // an epoll of the queues' descriptors, where they are several
    std::shared_ptr<CompletionQueue> shared_;
    std::vector<std::weak_ptr<CompletionQueue>> queues_;
    std::vector<struct fid *> wait_fids_;
    std::vector<CompletionError> errors_;
};

}  // namespace baton::fabric
