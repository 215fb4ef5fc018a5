#include "fabric_endpoint.hpp"

#include "error.hpp"
#include "sockets.hpp"

#include <rdma/fi_errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace baton::fabric {
namespace {

// The process behind an address that says so (shm does: "fi_shm://<pid>..."), otherwise 0.
int process_of(const Capabilities &capabilities, const std::string &address) {
    constexpr const char *kPrefix = "fi_shm://";
    if (capabilities.provider != "shm" || address.rfind(kPrefix, 0) != 0) {
        return 0;
    }
    return static_cast<int>(std::strtol(address.c_str() + std::strlen(kPrefix), nullptr, 10));
}

UniqueFd watch_process(int process) {
    // The shm provider maps an endpoint of its own process by reference: once one side is closed, the other reads
    // unmapped memory.
    if (process == getpid()) {
        throw invalid("BAD_ADDRESS", "shm does not work between endpoints of one process; use tcp there");
    }
    // Absent on old kernels and for processes of others' namespaces; then timeouts tell.
    return process > 0 ? UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) : UniqueFd();
}

// Reads of a queue before its endpoint is closed, each of which lets rxm handle one completion of its own: more than the
// receives and writes that a connection has outstanding.
constexpr int kLastReads = 512;

}  // namespace

FabricEndpoint::FabricEndpoint(FabricDomain &domain)
    : format_(domain.info().addr_format),
      layered_(domain.capabilities().provider.ends_with("ofi_rxm")),
      queue_(domain.open_queue()) {
    fi_av_attr attributes{};
    attributes.type = FI_AV_UNSPEC;
    attributes.count = 1;
    fid_av *addresses = nullptr;
    check("fi_av_open", fi_av_open(domain.fid(), &attributes, &addresses, nullptr));
    addresses_.reset(addresses);

    fid_ep *endpoint = nullptr;
    check("fi_endpoint", fi_endpoint(domain.fid(), const_cast<fi_info *>(&domain.info()), &endpoint, nullptr));
    endpoint_.reset(endpoint);
    check("fi_ep_bind(av)", fi_ep_bind(endpoint, &addresses->fid, 0));
    check("fi_ep_bind(cq)", fi_ep_bind(endpoint, &queue_->fid()->fid, FI_TRANSMIT | FI_RECV));
    check("fi_enable", fi_enable(endpoint));

    char buffer[256];
    size_t length = sizeof buffer;
    check("fi_getname", fi_getname(&endpoint->fid, buffer, &length));
    address_.assign(buffer, length);
}

FabricEndpoint::~FabricEndpoint() { settle(); }

// rxm closes a connection and then handles what has completed on it, such as a credit from the peer: for that it posts
// the receive again, on the connection that it has freed (in every release up to 2.1: rxm_close_conn). So it gets to
// handle all that there is before. What comes between the last read and the close can't be helped.
void FabricEndpoint::settle() {
    for (int read = 0; layered_ && endpoint_ && read < kLastReads; ++read) {
        fi_cq_read(queue_->fid(), nullptr, 0);  // progress, and takes nothing
    }
}

void FabricEndpoint::close() {
    if (endpoint_) {
        settle();
        check("fi_close(ep)", fi_close(&endpoint_->fid));
        static_cast<void>(endpoint_.release());
    }
}

fi_addr_t FabricEndpoint::insert(const std::string &address) {
    // Providers take it for granted that an address has its format's length, or ends.
    const bool text = format_ == FI_ADDR_STR;
    const std::string terminated = text ? std::string(address.c_str()) : address;
    if (terminated.empty() || (!text && address.size() != address_.size())) {
        throw invalid("BAD_ADDRESS", "the address of a peer has " + std::to_string(address.size()) + " bytes, not " +
                                         std::to_string(address_.size()) + " as this provider's addresses");
    }
    fi_addr_t peer = FI_ADDR_NOTAVAIL;
    if (fi_av_insert(addresses_.get(), terminated.c_str(), 1, &peer, 0, nullptr) != 1 || peer == FI_ADDR_NOTAVAIL) {
        throw invalid("BAD_ADDRESS", "the provider does not understand the address of a peer (" +
                                         std::to_string(address.size()) + " bytes)");
    }
    return peer;
}

FabricReceivingEndpoint::FabricReceivingEndpoint(FabricDomain &domain)
    : endpoint_(domain),
      sockets_(domain.capabilities().provider == "tcp" || domain.capabilities().provider == "net") {}

// A socket that the tcp provider has accepted, but whose connection request it has not read yet, keeps a pointer to the
// endpoint that was listening. Closing that endpoint frees what it points to, and the next progress calls it (in every
// release: a TODO of xnet_pep_close). So before closing there must be no such socket: one that was shut down is
// forgotten at the next progress, and a listener that was shut down accepts none.
bool FabricReceivingEndpoint::refuse() { return sockets_ && shut_down_sockets(endpoint_.address()); }

FabricSendingEndpoint::FabricSendingEndpoint(FabricDomain &domain, const std::string &address)
    : endpoint_(domain),
      peer_(endpoint_.insert(address)),
      process_(watch_process(process_of(domain.capabilities(), address))),
      window_(domain.capabilities().useful_window) {}

ssize_t FabricSendingEndpoint::post(const Write &write, uint32_t immediate, bool delivery_complete, void *context) {
    iovec local{const_cast<void *>(write.source), write.length};
    fi_rma_iov remote{write.remote_address, write.length, write.remote_key};
    void *descriptor = write.descriptor;
    fi_msg_rma message{};
    message.msg_iov = &local;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = peer_;
    message.rma_iov = &remote;
    message.rma_iov_count = 1;
    message.context = context;
    message.data = immediate;
    const uint64_t flags = FI_REMOTE_CQ_DATA | FI_COMPLETION | (delivery_complete ? FI_DELIVERY_COMPLETE : 0);
    return fi_writemsg(endpoint_.fid(), &message, flags);
}

}  // namespace baton::fabric
