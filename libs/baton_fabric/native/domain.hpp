#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "endpoint.hpp"
#include "provider.hpp"
#include "resources.hpp"

namespace baton::fabric {

// A write of ours that failed, or something that the provider says of no write of ours (context null).
struct CompletionError {
    void *context;
    std::string detail;
};

// Who is told what Domain::poll finds.
class Completions {
  public:
    // A write of ours is complete. Closes no endpoint.
    virtual void written(void *context) = 0;
    // The bytes of a peer's write are in place. Closes no endpoint.
    virtual void arrived(uint32_t immediate) = 0;
    virtual void failed(const CompletionError &error) = 0;
    // The peer with this id (see Domain::connect) can't be written to any more.
    virtual void lost(uint64_t peer, const std::string &detail) = 0;

  protected:
    ~Completions() = default;
};

// Memory of a GPU that this process has mapped.
struct DeviceRange {
    uint64_t address;
    uint64_t length;
    int device;     // its ordinal
    int dmabuf_fd;  // a dma-buf of the range from its beginning; -1 for none
};

// Memory that peers may write and that writes are posted from, until this goes.
struct Registration {
    virtual ~Registration() = default;

    void *descriptor = nullptr;  // for Write::descriptor
    uint64_t key = 0;            // names it to peers
    uint64_t base = 0;           // what a remote address adds to an offset
};

// One NIC, or what takes its place: memory registered with it, endpoints, and their completions. Used by one thread at
// a time, and outlives all that it gave out.
class Domain {
  public:
    virtual ~Domain() = default;

    virtual const Capabilities &capabilities() const = 0;

    // `memory` is a mapping of the first bytes of `fd` and stays until the registration goes. Throws Error.
    virtual std::unique_ptr<Registration> register_memory(const Mapping &memory, int fd) = 0;
    // Only where the capabilities say device_memory. Throws Error.
    virtual std::unique_ptr<Registration> register_memory(const DeviceRange &range) = 0;

    virtual std::unique_ptr<ReceivingEndpoint> open_endpoint() = 0;
    // `peer`: the id by which Completions::lost names it. Throws Error(BAD_ADDRESS).
    virtual std::unique_ptr<SendingEndpoint> connect(const std::string &address, uint64_t peer) = 0;

    // Makes progress, a bounded amount; returns how much there was, 0 if there was nothing to do.
    virtual size_t poll(Completions &completions) = 0;
    // Readable when poll() may have something to do; -1 where the provider cannot say.
    virtual int wait_fd() const = 0;
    // Whether it is safe to block on wait_fd() now; if not, poll() again first.
    virtual bool may_block() = 0;
};

// `provider`: "local"; "auto", which is tcp and local at once; or see find_provider. `name`: see there, too; local needs
// none. `device_memory` prefers a provider that can register memory of GPUs. Throws Error(PROVIDER_UNAVAILABLE).
std::unique_ptr<Domain> open_domain(const std::string &provider, const std::string &name, bool device_memory);

// The domains of an engine, which are numbered by their places.
using DomainList = std::vector<std::unique_ptr<Domain>>;

// One for each name, all of one provider. Throws Error(PROVIDER_UNAVAILABLE), and Error(BAD_DOMAINS) for no name, one
// that is there twice, and domains that can't work together.
DomainList open_domains(const std::string &provider, const std::vector<std::string> &names, bool device_memory);

}  // namespace baton::fabric
