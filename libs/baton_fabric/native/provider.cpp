#include "provider.hpp"

#include "error.hpp"
#include "immediate.hpp"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

namespace baton::fabric {
namespace {

constexpr uint64_t kWriteAfterWrite = FI_ORDER_WAW | FI_ORDER_RMA_WAW;

// The interface that this code was written against. Providers take dma-bufs from those only who know of 1.20.
uint32_t interface_version([[maybe_unused]] bool device_memory) {
#ifdef FI_MR_DMABUF
    if (device_memory) {
        return FI_VERSION(1, 20);
    }
#endif
    return FI_VERSION(1, 11);
}

// What a domain is bound to: a local address, a device, or what the provider likes best.
struct Where {
    std::string node;
    std::string device;
};

// efa's domains are devices with an endpoint type behind the name, such as rdmap16s27-rdm.
bool is_of(const fi_info &info, const std::string &device) {
    const std::string name = info.domain_attr->name != nullptr ? info.domain_attr->name : "";
    return device.empty() || name == device || name.rfind(device + "-", 0) == 0;
}

// fi_getinfo of one provider name; null where there is none.
Info query(const std::string &name, const std::string &node, uint64_t order, bool device_memory) {
    Info hints(fi_allocinfo());
    if (!hints) {
        throw fabric_call_failed("fi_allocinfo", -FI_ENOMEM);
    }
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | (device_memory ? FI_HMEM : 0);
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = static_cast<int>(FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED |
                                                   (device_memory ? FI_MR_HMEM : 0));
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->tx_attr->msg_order = order;
    hints->rx_attr->msg_order = order;
    hints->fabric_attr->prov_name = strdup(name.c_str());

    const bool by_node = !node.empty();
    fi_info *found = nullptr;
    const int result = fi_getinfo(interface_version(device_memory), by_node ? node.c_str() : nullptr, nullptr,
                                  by_node ? FI_SOURCE : 0, hints.get(), &found);
    if (result != 0) {
        return nullptr;
    }
    return Info(found);
}

// Asks for ordered writes first: a provider promises an order only where it was asked for.
Info query(const std::string &name, const Where &where, bool device_memory) {
    for (const uint64_t order :
         {static_cast<uint64_t>(kWriteAfterWrite), static_cast<uint64_t>(FI_ORDER_WAW), static_cast<uint64_t>(0)}) {
        Info found = query(name, where.node, order, device_memory);
        // "tcp" alone also matches "tcp;ofi_rxm" in libfabric 1.x, where tcp itself has no RDM endpoints.
        for (const fi_info *info = found.get(); info != nullptr; info = info->next) {
            if (name == info->fabric_attr->prov_name && is_of(*info, where.device)) {
                return Info(fi_dupinfo(info));
            }
        }
    }
    return nullptr;
}

std::vector<std::string> names_of(const std::string &provider) {
    if (provider == "auto" || provider == "tcp") {
        // The RDM provider over tcp is "tcp" in libfabric 2 and "net" in 1.17, a little faster both than rxm over tcp:
        // 286 to 299 against 239 thousand writes of 4 KiB a second, 5.6 against 5.2 GB/s at 1 MiB (loopback, 2 cores).
        return {"tcp", "net", "tcp;ofi_rxm"};
    }
    if (provider == "verbs") {
        return {"verbs;ofi_rxm"};  // verbs itself has no RDM endpoints that can be written to
    }
    return {provider};
}

// What libfabric and libibverbs read from the environment, once, when they are first asked for anything.
void prepare_environment() {
    static const bool prepared = [] {
        // A cache of registrations keeps memory writable after fi_close(mr): seen on verbs, where writes went on landing
        // in a region that was deregistered. Our regions are few and live long, so nothing is lost without it.
        setenv("FI_MR_CACHE_MAX_COUNT", "0", 1);
        // rxm sizes the queue of every endpoint for so many peers (1024 unless told); ours have one. Soft-RoCE has no
        // queue of the default size, and other devices would spend megabytes on each.
        setenv("FI_UNIVERSE_SIZE", "16", 0);
        // Before Linux 5.12 a fork takes pinned pages away from a process that has not asked for this.
        setenv("RDMAV_FORK_SAFE", "1", 0);
        return true;
    }();
    static_cast<void>(prepared);
}

// The IP address that a domain's endpoints are bound to; empty where addresses are of another kind.
std::string address_of(const fi_info &info) {
    char text[INET6_ADDRSTRLEN] = "";
    const bool socket_address = info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
                                info.addr_format == FI_SOCKADDR_IN6;
    if (info.src_addr == nullptr || !socket_address) {
        return text;
    }
    const int family = static_cast<const sockaddr *>(info.src_addr)->sa_family;
    if (family == AF_INET) {
        inet_ntop(AF_INET, &static_cast<const sockaddr_in *>(info.src_addr)->sin_addr, text, sizeof text);
    } else if (family == AF_INET6) {
        inet_ntop(AF_INET6, &static_cast<const sockaddr_in6 *>(info.src_addr)->sin6_addr, text, sizeof text);
    }
    return text;
}

// In which senses `name` can be taken, the first that finds something holds.
std::vector<Where> meanings(const std::string &provider, const std::string &name) {
    const bool address = name.find_first_of(".:") != std::string::npos;
    // shm names its endpoints by process, and efa by device; an IP address means nothing to them.
    if (provider == "shm" || (provider == "efa" && address)) {
        return {{"", ""}};
    }
    if (address || provider == "efa") {
        return {address ? Where{name, ""} : Where{"", name}};
    }
    return {{name, ""}, {"", name}};  // a host's name, or a device's
}

}  // namespace

Info find_provider(const std::string &provider, const std::string &name, bool device_memory) {
    prepare_environment();
    const auto names = names_of(provider);
    for (const bool on_devices : {true, false}) {
        if (on_devices && !device_memory) {
            continue;
        }
        for (const auto &each : names) {
            for (const auto &where : meanings(each, name)) {
                Info info = query(each, where, on_devices);
                if (info && info->domain_attr->cq_data_size >= sizeof(uint32_t)) {
                    return info;
                }
            }
        }
    }
    std::string tried;
    for (const auto &each : names) {
        tried += (tried.empty() ? "" : ", ") + each;
    }
    throw Error("libfabric has no provider for \"" + provider + "\" on node \"" + name +
                    "\" with reliable datagrams, remote writes and 32 bits of remote CQ data; tried: " + tried,
                "UNAVAILABLE", "PROVIDER_UNAVAILABLE", {{"provider", provider}, {"node", name}, {"tried", tried}});
}

Capabilities capabilities_of(const fi_info &info) {
    Capabilities caps;
    const auto text = [](const char *value) { return std::string(value != nullptr ? value : ""); };
    caps.provider = text(info.fabric_attr->prov_name);
    caps.fabric = text(info.fabric_attr->name);
    caps.domain = text(info.domain_attr->name);
    caps.address = address_of(info);
    caps.mr_mode = static_cast<uint64_t>(static_cast<uint32_t>(info.domain_attr->mr_mode));
    caps.mr_key_size = info.domain_attr->mr_key_size;
    caps.cq_data_size = info.domain_attr->cq_data_size;
    caps.max_msg_size = info.ep_attr->max_msg_size;
    caps.inject_size = info.tx_attr->inject_size;
    caps.tx_size = info.tx_attr->size;
    // shm promises an order too, but was seen to let an immediate overtake the bytes of earlier writes.
    caps.ordered = caps.provider != "shm" && (info.tx_attr->msg_order & kWriteAfterWrite) != 0 &&
                   (info.rx_attr->msg_order & kWriteAfterWrite) != 0 &&
                   info.ep_attr->max_order_waw_size >= info.ep_attr->max_msg_size;
    caps.device_memory = (info.caps & FI_HMEM) != 0;
    return caps;
}

bool Capabilities::mr_local() const { return (mr_mode & FI_MR_LOCAL) != 0; }
bool Capabilities::mr_virt_addr() const { return (mr_mode & FI_MR_VIRT_ADDR) != 0; }
bool Capabilities::mr_prov_key() const { return (mr_mode & FI_MR_PROV_KEY) != 0; }
bool Capabilities::mr_allocated() const { return (mr_mode & FI_MR_ALLOCATED) != 0; }
bool Capabilities::mr_device() const { return (mr_mode & FI_MR_HMEM) != 0; }

}  // namespace baton::fabric
