#include "regions.hpp"

#include "error.hpp"

#include <fcntl.h>
#include <rdma/fi_errno.h>
#include <sys/stat.h>
#include <sys/uio.h>

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

    region->address = region->mapping.address();
    region->size = length;

    const iovec memory{region->address, length};
    fi_mr_attr attributes{};
    attributes.mr_iov = &memory;
    attributes.iov_count = 1;
    attributes.iface = FI_HMEM_SYSTEM;
    int result = 0;
    fid_mr *registration = register_memory(attributes, 0, result);
    check("fi_mr_regattr", result);
    region->descriptor = domain_.capabilities().mr_local() ? fi_mr_desc(registration) : nullptr;
    return keep(std::move(region), registration);
}

Region &RegionTable::add(const DeviceRange &range) {
    const auto &capabilities = domain_.capabilities();
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

    fi_mr_attr attributes{};
    attributes.iov_count = 1;
    attributes.iface = FI_HMEM_CUDA;
    attributes.device.cuda = range.device;
    int result = 0;
    fid_mr *registration = nullptr;
#ifdef FI_MR_DMABUF
    // Not where addresses are offsets: libfabric 2.6 takes the descriptor's number for the address there
    // (ofi_mr_map_insert).
    const fi_mr_dmabuf dmabuf{range.dmabuf_fd, 0, range.length, region->address};
    if (range.dmabuf_fd >= 0 && capabilities.mr_virt_addr()) {
        attributes.dmabuf = &dmabuf;
        registration = register_memory(attributes, FI_MR_DMABUF, result);
    }
#endif
    // Whether a provider takes dma-bufs is not among what it says of itself.
    const iovec memory{region->address, range.length};
    if (registration == nullptr) {
        attributes.mr_iov = &memory;
        registration = register_memory(attributes, 0, result);
    }
    check("fi_mr_regattr", result);
    region->descriptor = capabilities.mr_local() || capabilities.mr_device() ? fi_mr_desc(registration) : nullptr;
    return keep(std::move(region), registration);
}

fid_mr *RegionTable::register_memory(fi_mr_attr attributes, uint64_t flags, int &result) {
    attributes.access = FI_WRITE | FI_REMOTE_WRITE;
    fid_mr *registration = nullptr;
    result = -FI_ENOKEY;
    for (int attempt = 0; attempt < 16 && result == -FI_ENOKEY; ++attempt) {
        attributes.requested_key = domain_.capabilities().mr_prov_key() ? 0 : draw_key();
        result = fi_mr_regattr(domain_.fid(), &attributes, flags, &registration);
    }
    return result == 0 ? registration : nullptr;
}

Region &RegionTable::keep(std::unique_ptr<Region> region, fid_mr *registration) {
    region->registration.reset(registration);
    region->key = fi_mr_key(registration);
    region->base = domain_.capabilities().mr_virt_addr() ? reinterpret_cast<uint64_t>(region->address) : 0;
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
        if (region.mapping.address() != nullptr) {
            region.mapping.replace_by_nothing();
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
