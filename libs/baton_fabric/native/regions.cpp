#include "regions.hpp"

#include "error.hpp"

#include <fcntl.h>
#include <rdma/fi_errno.h>
#include <sys/stat.h>

#include <algorithm>

namespace baton::fabric {

Region &RegionTable::add(int fd, uint64_t length) {
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
        region->mapping = Mapping(fd, length);
    } catch (const Error &error) {
        throw invalid("BAD_REGION", std::string("a region cannot be mapped: ") + error.what(), error.fields());
    }

    const auto &capabilities = domain_.capabilities();
    fid_mr *registration = nullptr;
    int result = -FI_ENOKEY;
    for (int attempt = 0; attempt < 16 && result == -FI_ENOKEY; ++attempt) {
        const uint64_t key = capabilities.mr_prov_key() ? 0 : draw_key();
        result = fi_mr_reg(domain_.fid(), region->mapping.address(), length, FI_WRITE | FI_REMOTE_WRITE, 0, key, 0,
                           &registration, nullptr);
    }
    check("fi_mr_reg", result);
    region->registration.reset(registration);
    region->descriptor = capabilities.mr_local() ? fi_mr_desc(registration) : nullptr;
    region->key = fi_mr_key(registration);
    region->base = capabilities.mr_virt_addr() ? reinterpret_cast<uint64_t>(region->mapping.address()) : 0;

    metrics_.regions.add();
    return *(regions_[region->id] = std::move(region));
}

// Random, so that a key that was never handed out cannot be guessed, nor an old one met again.
uint64_t RegionTable::draw_key() {
    const auto size = domain_.capabilities().mr_key_size;
    const uint64_t key = (static_cast<uint64_t>(random_()) << 32) | random_();
    return size >= 8 ? key : key & ((uint64_t{1} << (8 * size)) - 1);
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
    region.registration.reset();
    if (!endpoints.empty()) {
        region.mapping.replace_by_nothing();
        retired_.push_back({std::move(region.mapping), std::move(endpoints)});
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

}  // namespace baton::fabric
