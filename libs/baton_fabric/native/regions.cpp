#include "regions.hpp"

#include "error.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

namespace baton::fabric {

Region &RegionTable::add(int fd, uint64_t length, const std::vector<uint32_t> &domains) {
    struct stat status{};
    if (fstat(fd, &status) != 0) {
        throw invalid("BAD_REGION", "descriptor " + std::to_string(fd) + " cannot be examined");
    }
    if (length == 0 || status.st_size < 0 || length > static_cast<uint64_t>(status.st_size)) {
        throw invalid("BAD_REGION",
                      "a region of " + std::to_string(length) + " bytes is not within its file of " +
                          std::to_string(status.st_size) + " bytes",
                      {{"length", std::to_string(length)}, {"file", std::to_string(status.st_size)}});
    }
    // A file that its owner shrinks under us would end this process by SIGBUS. Fails where the file is sealed already
    // or forbids seals; then it is the hand-off's business to have checked.
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);

    auto region = std::make_unique<Region>();
    region->id = next_++;
    try {
        region->mapping = std::make_shared<Mapping>(fd, length);
    } catch (const Error &error) {
        throw invalid("BAD_REGION", std::string("a region cannot be mapped: ") + error.what(), error.fields());
    }

    region->address = region->mapping->address();
    region->size = length;
    for (const auto number : domains) {
        region->domains.emplace_back(number, domains_[number]->register_memory(*region->mapping, fd));
    }
    return keep(std::move(region));
}

Region &RegionTable::add(const DeviceRange &range, const std::vector<uint32_t> &domains) {
    const auto &capabilities = domains_[domains.front()]->capabilities();
    if (!capabilities.device_memory) {
        throw Error("the provider \"" + capabilities.provider + "\" can't register memory of a GPU here",
                    "FAILED_PRECONDITION", "DEVICE_UNSUPPORTED", {{"provider", capabilities.provider}});
    }
    if (range.address == 0 || range.length == 0 || range.length > UINT64_MAX - range.address || range.device < 0) {
        throw invalid("BAD_REGION", "there is no memory of " + std::to_string(range.length) + " bytes at " +
                                        std::to_string(range.address) + " of GPU " + std::to_string(range.device));
    }
    auto region = std::make_unique<Region>();
    region->id = next_++;
    region->address = reinterpret_cast<void *>(range.address);
    region->size = range.length;
    for (const auto number : domains) {
        region->domains.emplace_back(number, domains_[number]->register_memory(range));
    }
    return keep(std::move(region));
}

Region &RegionTable::keep(std::unique_ptr<Region> region) {
    metrics_.regions.add();
    return *(regions_[region->id] = std::move(region));
}

Region *RegionTable::find(uint64_t id) {
    const auto found = regions_.find(id);
    return found == regions_.end() ? nullptr : found->second.get();
}

std::vector<uint64_t> RegionTable::ids() const {
    std::vector<uint64_t> ids;
    for (const auto &[id, region] : regions_) {
        ids.push_back(id);
    }
    return ids;
}

Region &RegionTable::at(uint64_t id) {
    Region *region = find(id);
    if (region == nullptr) {
        throw unknown("region", "UNKNOWN_REGION", id);
    }
    return *region;
}

std::shared_ptr<const Mapping> RegionTable::readable(uint64_t id) {
    const Region &region = at(id);
    if (!region.mapping) {
        throw Error("region " + std::to_string(id) + " is memory of a GPU, of which no checksum can be made",
                    "FAILED_PRECONDITION", "CHECKSUM_UNSUPPORTED", {{"region", std::to_string(id)}});
    }
    return region.mapping;
}

void RegionTable::remove(uint64_t id, std::set<uint64_t> endpoints) {
    Region &region = at(id);
    if (region.transfers != 0 || region.inboxes != 0) {
        throw in_use("REGION_IN_USE",
                     "region " + std::to_string(id) + " is read by " + std::to_string(region.transfers) +
                         " transfers and may be written for " + std::to_string(region.inboxes) + " inboxes",
                     {{"region", std::to_string(id)},
                      {"transfers", std::to_string(region.transfers)},
                      {"inboxes", std::to_string(region.inboxes)}});
    }
    region.domains.clear();
    if (!endpoints.empty()) {
        if (region.mapping) {
            region.mapping->replace_by_nothing();
        }
        retired_.push_back({id, std::move(region.mapping), std::move(endpoints)});
        metrics_.retired_regions.add();
    }
    regions_.erase(id);
    metrics_.regions.subtract();
}

void RegionTable::endpoint_closed(uint64_t endpoint) {
    for (auto &retired : retired_) {
        retired.endpoints.erase(endpoint);
    }
    const auto before = retired_.size();
    std::erase_if(retired_, [](const Retired &retired) { return retired.endpoints.empty(); });
    metrics_.retired_regions.subtract(before - retired_.size());
}

bool RegionTable::retired(uint64_t id) const {
    return std::any_of(retired_.begin(), retired_.end(), [id](const Retired &retired) { return retired.id == id; });
}

}  // namespace baton::fabric
