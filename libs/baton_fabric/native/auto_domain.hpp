#pragma once

#include <memory>
#include <string>

#include "fabric_domain.hpp"
#include "local_domain.hpp"

namespace baton::fabric {

// A domain of libfabric and, for peers that it can reach, the local transport: an endpoint's address has one of each,
// and whoever connects takes the local one if it is there. That needs no host's identity: a local address is a random
// name that exists in one kernel's network namespace only.
class AutoDomain : public Domain {
  public:
    // `fabric` alone where the two can't stand for each other: its provider must address memory by offset, with keys of
    // our choice.
    static std::unique_ptr<Domain> over(std::unique_ptr<FabricDomain> fabric);

    const Capabilities &capabilities() const override { return capabilities_; }
    std::unique_ptr<Registration> register_memory(const Mapping &memory, int fd) override;
    std::unique_ptr<Registration> register_memory(const DeviceRange &range) override;
    std::unique_ptr<ReceivingEndpoint> open_endpoint() override;
    std::unique_ptr<SendingEndpoint> connect(const std::string &address, uint64_t peer) override;
    size_t poll(Completions &completions) override;
    int wait_fd() const override { return wait_set_.get(); }
    bool may_block() override;

  private:
    explicit AutoDomain(std::unique_ptr<FabricDomain> fabric);

    std::unique_ptr<FabricDomain> fabric_;
    LocalDomain local_;
    UniqueFd wait_set_;  // an epoll of both domains' descriptors
    Capabilities capabilities_;
};

}  // namespace baton::fabric
