// The loop that the transfer agent is measured against: libfabric and nothing around it. Writes with remote CQ data, a
// window of them in flight, one endpoint, both sides polling their queue and blocking on it when it has nothing.
//
//   bare_loop fabric PROVIDER NODE WINDOW FD LENGTH     one side; FD is the pool, mapped and pre-faulted here
//   bare_loop copy FD LENGTH FD LENGTH                  memcpy from the first pool into the second
//
// Commands are lines on stdin, each answered by a line on stdout. Times are CLOCK_MONOTONIC nanoseconds.
//   load BYTES N        then N lines "SOURCE DESTINATION": what to write, offsets into the pools   -> loaded
//   connect HEX KEY BASE                                                                           -> connected
//   receive N WAIT      until N immediates have arrived; answers twice                             -> armed; FIRST LAST
//   send WAIT           writes what was loaded                                                     -> BEGIN END
//   copy                copies what was loaded                                                     -> BEGIN END
// WAIT is 1 to block on the queue where there is nothing to do, 0 to go on polling.

#include <poll.h>
#include <sys/mman.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void die(const std::string &what, ssize_t error) {
    std::cerr << what << ": " << fi_strerror(static_cast<int>(error < 0 ? -error : error)) << "\n";
    std::exit(1);
}

void check(const char *what, ssize_t result) {
    if (result < 0) {
        die(what, result);
    }
}

uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

char *map_pool(const char *fd, size_t length) {
    void *address = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, std::atoi(fd), 0);
    if (address == MAP_FAILED) {
        die("mmap", errno);
    }
    return static_cast<char *>(address);
}

struct Job {
    size_t bytes = 0;
    std::vector<std::pair<uint64_t, uint64_t>> writes;

    void load() {
        size_t count = 0;
        std::cin >> bytes >> count;
        writes.resize(count);
        for (auto &[source, destination] : writes) {
            std::cin >> source >> destination;
        }
    }
};

fid_cq *open_queue(fid_domain *domain, fi_wait_obj wait) {
    fi_cq_attr attributes{};
    attributes.size = 8192;
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.wait_obj = wait;
    fid_cq *queue = nullptr;
    return fi_cq_open(domain, &attributes, &queue, nullptr) == 0 ? queue : nullptr;
}

class Side {
  public:
    Side(const std::string &provider, const char *node, size_t window, char *pool, size_t length)
        : window_(window), contexts_(window) {
        fi_info *hints = fi_allocinfo();
        hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
        hints->mode = FI_CONTEXT | FI_CONTEXT2;
        hints->ep_attr->type = FI_EP_RDM;
        hints->domain_attr->mr_mode =
            static_cast<int>(FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED);
        hints->domain_attr->threading = FI_THREAD_DOMAIN;
        hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
        hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
        hints->tx_attr->msg_order = provider == "shm" ? 0 : FI_ORDER_WAW | FI_ORDER_RMA_WAW;
        hints->rx_attr->msg_order = hints->tx_attr->msg_order;
        hints->fabric_attr->prov_name = strdup(provider.c_str());
        const bool by_node = provider != "shm";
        check("fi_getinfo", fi_getinfo(FI_VERSION(1, 11), by_node ? node : nullptr, nullptr, by_node ? FI_SOURCE : 0,
                                       hints, &info_));
        check("fi_fabric", fi_fabric(info_->fabric_attr, &fabric_, nullptr));
        check("fi_domain", fi_domain(fabric_, info_, &domain_, nullptr));
        // Waiting on a queue's own descriptor spins with the net provider of 1.17: it stays readable after the first
        // completion. A second queue that never holds one tells when there is progress to be made.
        queue_ = open_queue(domain_, FI_WAIT_NONE);
        sentinel_ = open_queue(domain_, FI_WAIT_FD);
        if (queue_ == nullptr) {
            die("fi_cq_open", FI_EINVAL);
        }
        if (sentinel_ != nullptr && fi_control(&sentinel_->fid, FI_GETWAIT, &wait_fd_) != 0) {
            wait_fd_ = -1;
        }

        fi_av_attr attributes{};
        check("fi_av_open", fi_av_open(domain_, &attributes, &addresses_, nullptr));
        check("fi_endpoint", fi_endpoint(domain_, info_, &endpoint_, nullptr));
        check("fi_ep_bind", fi_ep_bind(endpoint_, &addresses_->fid, 0));
        check("fi_ep_bind", fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV));
        check("fi_enable", fi_enable(endpoint_));
        const bool provider_keys = (info_->domain_attr->mr_mode & FI_MR_PROV_KEY) != 0;
        check("fi_mr_reg", fi_mr_reg(domain_, pool, length, FI_WRITE | FI_REMOTE_WRITE, 0, provider_keys ? 0 : 4711, 0,
                                     &region_, nullptr));
        pool_ = pool;
        for (auto &context : contexts_) {
            free_.push_back(&context);
        }
    }

    void identify() const {
        char address[256];
        size_t length = sizeof address;
        check("fi_getname", fi_getname(&endpoint_->fid, address, &length));
        std::cout << "ready ";
        for (size_t i = 0; i < length; ++i) {
            std::printf("%02x", static_cast<unsigned char>(address[i]));
        }
        std::fflush(stdout);
        const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
        std::cout << " " << fi_mr_key(region_) << " " << (by_address ? reinterpret_cast<uint64_t>(pool_) : 0)
                  << std::endl;
    }

    void connect() {
        std::string hex;
        std::cin >> hex >> key_ >> base_;
        std::string address;
        for (size_t i = 0; i + 1 < hex.size(); i += 2) {
            address.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
        }
        if (fi_av_insert(addresses_, address.c_str(), 1, &peer_, 0, nullptr) != 1) {
            die("fi_av_insert", FI_EINVAL);
        }
    }

    void receive(size_t expected, bool wait) {
        uint64_t first = 0;
        for (size_t seen = 0; seen < expected;) {
            const ssize_t count = read_queue();
            if (count > 0) {
                first = first == 0 ? now_ns() : first;
                seen += static_cast<size_t>(count);
            } else if (wait) {
                block();
            }
        }
        std::cout << first << " " << now_ns() << std::endl;
    }

    void send(const Job &job, bool wait) {
        const uint64_t begin = now_ns();
        size_t posted = 0;
        size_t completed = 0;
        while (completed < job.writes.size()) {
            bool refused = false;
            while (posted < job.writes.size() && !free_.empty()) {
                if (!post(job, posted)) {
                    refused = true;
                    break;
                }
                ++posted;
            }
            const ssize_t count = read_queue();
            completed += static_cast<size_t>(count);
            if (count == 0 && wait && (refused || free_.empty() || posted == job.writes.size())) {
                block();
            }
        }
        std::cout << begin << " " << now_ns() << std::endl;
    }

  private:
    bool post(const Job &job, size_t index) {
        const auto &[source, destination] = job.writes[index];
        iovec local{pool_ + source, job.bytes};
        fi_rma_iov remote{base_ + destination, job.bytes, key_};
        void *descriptor = (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0 ? fi_mr_desc(region_) : nullptr;
        fi_msg_rma message{};
        message.msg_iov = &local;
        message.desc = &descriptor;
        message.iov_count = 1;
        message.addr = peer_;
        message.rma_iov = &remote;
        message.rma_iov_count = 1;
        message.context = free_.back();
        message.data = 1;
        const bool last = index + 1 == job.writes.size();
        const ssize_t result = fi_writemsg(
            endpoint_, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION | (last ? FI_DELIVERY_COMPLETE : 0));
        if (result == -FI_EAGAIN) {
            return false;
        }
        check("fi_writemsg", result);
        free_.pop_back();
        return true;
    }

    // How many completions there were, at most some dozens.
    ssize_t read_queue() {
        fi_cq_data_entry entries[64];
        const ssize_t count = fi_cq_read(queue_, entries, 64);
        if (count == -FI_EAGAIN) {
            return 0;
        }
        check("fi_cq_read", count);
        for (ssize_t i = 0; i < count; ++i) {
            if ((entries[i].flags & FI_WRITE) != 0 && (entries[i].flags & FI_REMOTE_CQ_DATA) == 0) {
                free_.push_back(static_cast<fi_context2 *>(entries[i].op_context));
            }
        }
        return count;
    }

    void block() {
        struct fid *fids[] = {&sentinel_->fid};
        if (wait_fd_ >= 0 && fi_trywait(fabric_, fids, 1) == 0) {
            pollfd entry{wait_fd_, POLLIN, 0};
            ::poll(&entry, 1, 1000);
        }
    }

    size_t window_;
    std::vector<fi_context2> contexts_;
    std::vector<fi_context2 *> free_;
    fi_info *info_ = nullptr;
    fid_fabric *fabric_ = nullptr;
    fid_domain *domain_ = nullptr;
    fid_cq *queue_ = nullptr;
    fid_cq *sentinel_ = nullptr;
    int wait_fd_ = -1;
    fid_av *addresses_ = nullptr;
    fid_ep *endpoint_ = nullptr;
    fid_mr *region_ = nullptr;
    char *pool_ = nullptr;
    fi_addr_t peer_ = FI_ADDR_UNSPEC;
    uint64_t key_ = 0;
    uint64_t base_ = 0;
};

int serve_fabric(char **arguments) {
    const size_t length = std::stoull(arguments[4]);
    Side side(arguments[0], arguments[1], std::stoull(arguments[2]), map_pool(arguments[3], length), length);
    side.identify();
    Job job;
    for (std::string command; std::cin >> command;) {
        if (command == "load") {
            job.load();
            std::cout << "loaded" << std::endl;
        } else if (command == "connect") {
            side.connect();
            std::cout << "connected" << std::endl;
        } else if (command == "receive") {
            size_t expected = 0;
            bool wait = false;
            std::cin >> expected >> wait;
            std::cout << "armed" << std::endl;
            side.receive(expected, wait);
        } else if (command == "send") {
            bool wait = false;
            std::cin >> wait;
            side.send(job, wait);
        } else {
            std::cerr << "unknown command " << command << "\n";
            return 2;
        }
    }
    return 0;
}

int serve_copy(char **arguments) {
    const char *source = map_pool(arguments[0], std::stoull(arguments[1]));
    char *destination = map_pool(arguments[2], std::stoull(arguments[3]));
    std::cout << "ready" << std::endl;
    Job job;
    for (std::string command; std::cin >> command;) {
        if (command == "load") {
            job.load();
            std::cout << "loaded" << std::endl;
        } else if (command == "copy") {
            const uint64_t begin = now_ns();
            for (const auto &[from, to] : job.writes) {
                std::memcpy(destination + to, source + from, job.bytes);
            }
            std::cout << begin << " " << now_ns() << std::endl;
        } else {
            std::cerr << "unknown command " << command << "\n";
            return 2;
        }
    }
    return 0;
}

}  // namespace

int main(int count, char **arguments) {
    if (count == 7 && std::string(arguments[1]) == "fabric") {
        return serve_fabric(arguments + 2);
    }
    if (count == 6 && std::string(arguments[1]) == "copy") {
        return serve_copy(arguments + 2);
    }
    std::cerr << "usage: bare_loop fabric PROVIDER NODE WINDOW FD LENGTH | copy FD LENGTH FD LENGTH\n";
    return 2;
}
