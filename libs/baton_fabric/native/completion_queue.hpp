#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include "domain.hpp"
#include "resources.hpp"

namespace baton::fabric {

// One libfabric completion queue and the right way to block on it.
class CompletionQueue {
  public:
    CompletionQueue(fid_fabric *fabric, fid_domain *domain);

    fid_cq *fid() const { return queue_.get(); }
    // Readable when poll() may have something to do; -1 where the provider cannot say.
    int wait_fd() const { return wait_fd_; }
    // What fi_trywait must be asked about before blocking on wait_fd().
    struct fid *wait_fid() const { return sentinel_ ? &sentinel_->fid : &queue_->fid; }

    // Makes progress, at most some hundred completions of it; returns how many. Errors are added to `errors`.
    size_t poll(Completions &completions, std::vector<CompletionError> &errors);

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

}  // namespace baton::fabric
