#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <rdma/fi_cm.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include "endpoint.hpp"
#include "fabric_domain.hpp"

namespace baton::fabric {

// One RDM endpoint of libfabric.
class FabricEndpoint {
  public:
    explicit FabricEndpoint(FabricDomain &domain);
    ~FabricEndpoint();

    const std::string &address() const { return address_; }
    fid_ep *fid() const { return endpoint_.get(); }
    void close();

    // Throws Error(BAD_ADDRESS).
    fi_addr_t insert(const std::string &address);

  private:
    void settle();

    uint32_t format_;
    bool layered_;  // over rxm
    std::shared_ptr<CompletionQueue> queue_;
    UniqueFid<fid_av> addresses_;
    UniqueFid<fid_ep> endpoint_;  // closed before what is bound to it
    std::string address_;
};

class FabricReceivingEndpoint : public ReceivingEndpoint {
  public:
    explicit FabricReceivingEndpoint(FabricDomain &domain);

    const std::string &address() const override { return endpoint_.address(); }
    bool refuse() override;
    void close() override { endpoint_.close(); }

  private:
    FabricEndpoint endpoint_;
    bool sockets_;
};

class FabricSendingEndpoint : public SendingEndpoint {
  public:
    FabricSendingEndpoint(FabricDomain &domain, const std::string &address);

    ssize_t post(const Write &write, uint32_t immediate, bool delivery_complete, void *context) override;
    int process_fd() const override { return process_.get(); }
    uint64_t window() const override { return window_; }

  private:
    FabricEndpoint endpoint_;
    fi_addr_t peer_;
    UniqueFd process_;
    uint64_t window_;
};

}  // namespace baton::fabric
