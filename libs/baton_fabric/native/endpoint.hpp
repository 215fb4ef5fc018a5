#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <rdma/fi_cm.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include "domain.hpp"

namespace baton::fabric {

// One write, ready to post.
struct Write {
    const void *source = nullptr;
    void *descriptor = nullptr;  // of the source region, where the provider wants one
    uint64_t remote_address = 0;
    uint64_t remote_key = 0;
    size_t length = 0;
    uint32_t extents = 0;
    bool last_of_batch = false;
};

// One RDM endpoint. Closing it is the fence: afterwards no byte that was sent to it can land, and it reads no local
// memory any more.
class Endpoint {
  public:
    explicit Endpoint(Domain &domain);

    const std::string &address() const { return address_; }

    // Throws Error if the provider refuses: then nothing is fenced.
    void close();

    // Throws Error(BAD_ADDRESS).
    fi_addr_t insert(const std::string &address);

    // 0, -FI_EAGAIN, or another negative error number. `context` must hold an fi_context2 at its beginning and stay
    // until the completion.
    ssize_t post(const Write &write, fi_addr_t peer, uint32_t immediate, bool delivery_complete, void *context);

  private:
    uint32_t format_;
    std::shared_ptr<CompletionQueue> queue_;
    UniqueFid<fid_av> addresses_;
    UniqueFid<fid_ep> endpoint_;  // closed before what is bound to it
    std::string address_;
};

}  // namespace baton::fabric
