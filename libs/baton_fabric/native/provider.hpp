#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <rdma/fabric.h>

namespace baton::fabric {

// What fi_getinfo said of the provider, and nothing that it did not say.
struct Capabilities {
    std::string provider;
    std::string fabric;
    std::string domain;
    std::string address;  // that it is bound to, if that is an IP address
    uint64_t mr_mode = 0;
    uint64_t mr_key_size = 0;
    uint64_t cq_data_size = 0;
    uint64_t max_msg_size = 0;
    uint64_t inject_size = 0;
    uint64_t tx_size = 0;
    // Writes in flight to a peer beyond which throughput does not grow; measured on tcp and shm.
    uint64_t useful_window = 64;
    // Writes to a peer land in the order of posting.
    bool ordered = false;
    // Memory of GPUs can be registered, as far as this libfabric was built for it.
    bool device_memory = false;

    bool mr_local() const;
    bool mr_virt_addr() const;
    bool mr_prov_key() const;
    bool mr_allocated() const;
    bool mr_device() const;
};

struct InfoDeleter {
    void operator()(fi_info *info) const { fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, InfoDeleter>;

// Asks libfabric for an RDM endpoint that can write with remote CQ data. `provider` is "auto", "tcp", "shm" or a
// libfabric name; `name` the local address to bind to, or the device (an RDMA device, a network interface);
// `device_memory` prefers one that can register memory of GPUs. Throws Error(PROVIDER_UNAVAILABLE).
Info find_provider(const std::string &provider, const std::string &name, bool device_memory);

Capabilities capabilities_of(const fi_info &info);

}  // namespace baton::fabric
