#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "domain.hpp"
#include "metrics.hpp"
#include "resources.hpp"

namespace baton::fabric {

// Memory that was handed over, and is registered with one domain or several.
struct Region {
    uint64_t id = 0;
    // None for a device's memory, which its owner has mapped.
    std::shared_ptr<Mapping> mapping;
    void *address = nullptr;
    uint64_t size = 0;
    // By number of the domain, ascending; at least one. Gone before the mapping is.
    std::vector<std::pair<uint32_t, std::unique_ptr<Registration>>> domains;
    uint32_t transfers = 0;  // that read it and have not ended
    uint32_t inboxes = 0;    // that are open, not full, and said to be written through it

    const char *bytes() const { return static_cast<const char *>(address); }
    uint64_t length() const { return size; }
};

class RegionTable {
  public:
    // `domains`: outlive the table.
    RegionTable(const DomainList &domains, Metrics &metrics) : domains_(domains), metrics_(metrics) {}

    // `domains`: numbers of those to register it with.
    Region &add(int fd, uint64_t length, const std::vector<uint32_t> &domains);
    // The range's addresses must be kept until, after remove(), retired() says that nothing can reach them any more.
    Region &add(const DeviceRange &range, const std::vector<uint32_t> &domains);
    Region &at(uint64_t id);
    Region *find(uint64_t id);
    std::vector<uint64_t> ids() const;
    // The region's memory for other threads to read; stays mapped while they hold it. Throws Error(CHECKSUM_UNSUPPORTED)
    // for memory of a device.
    std::shared_ptr<const Mapping> readable(uint64_t id);

    // `endpoints`: the receiving endpoints open now. Deregistering memory is no fence: over tcp, writes in flight went
    // on landing afterwards. They can come over these endpoints only, so until those are closed the addresses stay
    // mapped, to memory that nobody sees.
    void remove(uint64_t id, std::set<uint64_t> endpoints);
    void endpoint_closed(uint64_t endpoint);
    // Whether a removed region's addresses must still be kept.
    bool retired(uint64_t id) const;

  private:
    struct Retired {
        uint64_t id;
        std::shared_ptr<Mapping> mapping;
        std::set<uint64_t> endpoints;
    };

    Region &keep(std::unique_ptr<Region> region);

    const DomainList &domains_;
    Metrics &metrics_;
    uint64_t next_ = 1;
    std::unordered_map<uint64_t, std::unique_ptr<Region>> regions_;
    std::vector<Retired> retired_;
};

}  // namespace baton::fabric
