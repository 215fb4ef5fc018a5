#include "completion_queue.hpp"

#include "error.hpp"

#include <poll.h>

namespace baton::fabric {
namespace {

// Completions that wait to be read. The util providers grow beyond it, hardware may not.
constexpr size_t kQueueSize = 8192;

UniqueFid<fid_cq> open_queue(fid_domain *domain, size_t size, fi_wait_obj wait) {
    fi_cq_attr attributes{};
    attributes.size = size;
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.wait_obj = wait;
    fid_cq *queue = nullptr;
    const int result = fi_cq_open(domain, &attributes, &queue, nullptr);
    if (result != 0 && wait != FI_WAIT_NONE) {
        return nullptr;
    }
    check("fi_cq_open", result);
    return UniqueFid<fid_cq>(queue);
}

int wait_fd_of(fid_cq *queue) {
    int fd = -1;
    return fi_control(&queue->fid, FI_GETWAIT, &fd) == 0 ? fd : -1;
}

bool readable(int fd) {
    pollfd entry{fd, POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
}

}  // namespace

// Before blocking on a queue's descriptor one calls fi_trywait, which also takes back the signal that the last
// completion left in it. The net provider of libfabric 1.17 does not: its descriptor stays readable after the first
// completion, and waiting on it spins. Its descriptor consists of that signal and of the domain's own epoll
// descriptor, readable while sockets are. So there the queue gets no wait object, and we wait on that of a second
// queue, which never holds a completion: it is readable exactly while there is progress to be made, and made progress
// shows in the first queue.
CompletionQueue::CompletionQueue(fid_fabric *fabric, fid_domain *domain)
    : queue_(open_queue(domain, kQueueSize, FI_WAIT_FD)) {
    wait_fd_ = queue_ ? wait_fd_of(queue_.get()) : -1;
    if (wait_fd_ >= 0 && try_wait_works(fabric)) {
        return;
    }
    queue_.reset();
    queue_ = open_queue(domain, kQueueSize, FI_WAIT_NONE);
    if (wait_fd_ >= 0) {
        sentinel_ = open_queue(domain, 1, FI_WAIT_FD);
        wait_fd_ = sentinel_ ? wait_fd_of(sentinel_.get()) : -1;
    }
}

bool CompletionQueue::try_wait_works(fid_fabric *fabric) const {
    if (fi_cq_signal(queue_.get()) != 0 || !readable(wait_fd_)) {
        return true;  // this provider has no signal that could be left behind
    }
    struct fid *fids[] = {&queue_->fid};
    return fi_trywait(fabric, fids, 1) != 0 || !readable(wait_fd_);
}

size_t CompletionQueue::poll(Completions &completions, std::vector<CompletionError> &errors) {
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
                completions.arrived(static_cast<uint32_t>(entries[i].data));
            } else {
                completions.written(entries[i].op_context);
            }
        }
        total += static_cast<size_t>(count);
        // Read empty, and the next read makes progress first, which costs system calls: the caller has more to do.
        if (count < static_cast<ssize_t>(kBatch)) {
            break;
        }
    }
    return total;
}

bool CompletionQueue::read_error(std::vector<CompletionError> &errors) const {
    fi_cq_err_entry entry{};
    const ssize_t count = fi_cq_readerr(queue_.get(), &entry, 0);
    if (count == -FI_EAGAIN || count == 0) {
        return false;
    }
    if (count < 0) {
        throw fabric_call_failed("fi_cq_readerr", count);
    }
    std::string detail = fi_strerror(entry.err);
    if (entry.prov_errno != 0) {
        char buffer[128] = "";
        const char *words = fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data, buffer, sizeof buffer);
        detail += std::string(" (") + (words != nullptr ? words : "") + ")";
    }
    const bool ours = (entry.flags & (FI_REMOTE_WRITE | FI_RECV)) == 0;
    errors.push_back({ours ? entry.op_context : nullptr, std::move(detail)});
    return true;
}

}  // namespace baton::fabric
