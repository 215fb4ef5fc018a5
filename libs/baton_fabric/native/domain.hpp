#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include "provider.hpp"
#include "resources.hpp"

namespace baton::fabric {

// One completion, whatever it says.
struct Completion {
    enum class Kind { kWrite, kRemoteWrite, kError };
    Kind kind;
    void *context;       // of the write; null where the provider gave none
    uint32_t immediate;  // kRemoteWrite
    std::string detail;  // kError
};

// One NIC: fabric, domain, and the completion queue of all its endpoints. Used by one thread at a time.
//
// The queue is one for all endpoints because the util providers make progress per domain: reading one queue may put
// completions into another, so with several none of them could be left unread before blocking.
class Domain {
  public:
    Domain(const std::string &provider, const std::string &node);

    const Capabilities &capabilities() const { return capabilities_; }
    const fi_info &info() const { return *info_; }
    fid_domain *fid() const { return domain_.get(); }
    fid_cq *queue() const { return queue_.get(); }

    // Readable when poll() may have something to do; -1 where the provider cannot say.
    int wait_fd() const { return wait_fd_; }
    // Whether it is safe to block on wait_fd() now; if not, poll() again first.
    bool may_block() const;

    // Makes progress and hands each completion to `sink`, at most some hundred; returns how many.
    template <class Sink> size_t poll(Sink &&sink);

  private:
    void open_queue();
    bool try_wait_works() const;
    Completion read_error() const;

    static constexpr size_t kBatch = 64;

    Info info_;
    Capabilities capabilities_;
    UniqueFid<fid_fabric> fabric_;
    UniqueFid<fid_domain> domain_;
    UniqueFid<fid_cq> queue_;
    // Where try-wait does not work (see open_queue): an empty queue of whose wait object only progress is part.
    UniqueFid<fid_cq> sentinel_;
    int wait_fd_ = -1;
};

template <class Sink> size_t Domain::poll(Sink &&sink) {
    constexpr size_t kLimit = 4 * kBatch;
    fi_cq_data_entry entries[kBatch];
    size_t total = 0;
    while (total < kLimit) {
        const ssize_t count = fi_cq_read(queue_.get(), entries, kBatch);
        if (count == -FI_EAGAIN || count == 0) {
            break;
        }
        if (count < 0) {
            sink(read_error());
            ++total;
            continue;
        }
        for (ssize_t i = 0; i < count; ++i) {
            const auto &entry = entries[i];
            const bool remote =
                (entry.flags & FI_REMOTE_WRITE) != 0 || (entry.flags & (FI_REMOTE_CQ_DATA | FI_WRITE)) == FI_REMOTE_CQ_DATA;
            sink(Completion{remote ? Completion::Kind::kRemoteWrite : Completion::Kind::kWrite, entry.op_context,
                            static_cast<uint32_t>(entry.data), {}});
        }
        total += static_cast<size_t>(count);
    }
    return total;
}

}  // namespace baton::fabric
