#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include "resources.hpp"

namespace baton::fabric {

// A write of ours that failed, or something that the provider says of no write of ours (context null).
struct CompletionError {
    void *context;
    std::string detail;
};

// One libfabric completion queue and the right way to block on it.
class CompletionQueue {
  public:
    CompletionQueue(fid_fabric *fabric, fid_domain *domain);

    fid_cq *fid() const { return queue_.get(); }
    // Readable when poll() may have something to do; -1 where the provider cannot say.
    int wait_fd() const { return wait_fd_; }
    // What fi_trywait must be asked about before blocking on wait_fd().
    struct fid *wait_fid() const { return sentinel_ ? &sentinel_->fid : &queue_->fid; }

    // Makes progress, at most some hundred completions of it; returns how many. `written(context)` is called for each
    // write of ours, `arrived(immediate)` for each of a peer's; neither may close an endpoint.
    template <class Written, class Arrived>
    size_t poll(Written &&written, Arrived &&arrived, std::vector<CompletionError> &errors);

  private:
    bool try_wait_works(fid_fabric *fabric) const;
    bool read_error(std::vector<CompletionError> &errors) const;

    static constexpr size_t kBatch = 64;
    static constexpr size_t kLimit = 4 * kBatch;

    UniqueFid<fid_cq> queue_;
    // Where try-wait does not work (see the constructor): a queue that stays empty, for its wait object.
    UniqueFid<fid_cq> sentinel_;
    int wait_fd_ = -1;
};

template <class Written, class Arrived>
size_t CompletionQueue::poll(Written &&written, Arrived &&arrived, std::vector<CompletionError> &errors) {
    fi_cq_data_entry entries[kBatch];
    size_t total = 0;
    while (total < kLimit) {
        const ssize_t count = fi_cq_read(queue_.get(), entries, kBatch);
        if (count == -FI_EAGAIN || count == 0) {
            break;
        }
        if (count < 0) {
            if (!read_error(errors)) {
                break;
            }
            ++total;
            continue;
        }
        for (ssize_t i = 0; i < count; ++i) {
            const uint64_t flags = entries[i].flags;
            if ((flags & FI_REMOTE_WRITE) != 0 || (flags & (FI_REMOTE_CQ_DATA | FI_WRITE)) == FI_REMOTE_CQ_DATA) {
                arrived(static_cast<uint32_t>(entries[i].data));
            } else {
                written(entries[i].op_context);
            }
        }
        total += static_cast<size_t>(count);
    }
    return total;
}

}  // namespace baton::fabric
