#include "local_domain.hpp"

#include "error.hpp"
#include "local_receiver.hpp"
#include "local_sender.hpp"

#include <sys/epoll.h>

#include <limits>

namespace baton::fabric {
namespace {

// What one poll copies at most, so that the thread can post and hear between: some 150 us.
constexpr uint64_t kPollBytes = 1 << 20;
// While rings move, sockets (wake-ups, ends, new peers) are looked at once in so many polls.
constexpr uint32_t kSocketPolls = 16;

}  // namespace

LocalRegistration::LocalRegistration(LocalDomain &owner, uint64_t number, const Mapping &memory, int file)
    : domain(owner),
      id(number),
      address(static_cast<char *>(memory.address())),
      length(memory.length()),
      fd(UniqueFd::duplicate(file)) {
    descriptor = this;
}

LocalRegistration::~LocalRegistration() { domain.forget(*this); }

LocalDomain::LocalDomain() : keys_(sizeof(uint64_t)), sockets_(epoll_create1(EPOLL_CLOEXEC)) {
    if (!sockets_) {
        throw system_call_failed("epoll_create1");
    }
    capabilities_.provider = capabilities_.fabric = capabilities_.domain = kName;
    capabilities_.mr_key_size = sizeof(uint64_t);
    capabilities_.cq_data_size = sizeof(uint32_t);
    capabilities_.max_msg_size = std::numeric_limits<uint64_t>::max();
    capabilities_.tx_size = capabilities_.useful_window = Ring::kEntries;
    capabilities_.ordered = true;
}

std::unique_ptr<Registration> LocalDomain::register_memory(const Mapping &memory, int fd) {
    uint64_t key = keys_.draw();
    while (by_key_.contains(key)) {
        key = keys_.draw();
    }
    return register_as(key, memory, fd);
}

std::unique_ptr<Registration> LocalDomain::register_as(uint64_t key, const Mapping &memory, int fd) {
    check_sealed(fd, memory.length());
    auto registration = std::make_unique<LocalRegistration>(*this, next_region_, memory, fd);
    ++next_region_;
    registration->key = key;
    by_key_.emplace(key, registration.get());
    return registration;
}

std::unique_ptr<Registration> LocalDomain::register_memory(const DeviceRange &) {
    throw Error("a GPU's memory can't be copied over the local transport", "FAILED_PRECONDITION", "DEVICE_UNSUPPORTED",
                {{"provider", kName}});
}

const LocalRegistration *LocalDomain::find(uint64_t key) const {
    if (found_ == nullptr || found_->key != key) {
        const auto found = by_key_.find(key);
        found_ = found == by_key_.end() ? nullptr : found->second;
    }
    return found_;
}

void LocalDomain::forget(const LocalRegistration &registration) {
    found_ = nullptr;
    const auto found = by_key_.find(registration.key);
    if (found != by_key_.end() && found->second == &registration) {
        by_key_.erase(found);
    }
    for (LocalSendingEndpoint *sender : senders_) {
        sender->forget(registration.id);
    }
}

std::unique_ptr<ReceivingEndpoint> LocalDomain::open_endpoint() {
    return std::make_unique<LocalReceivingEndpoint>(*this);
}

std::unique_ptr<SendingEndpoint> LocalDomain::connect(const std::string &address, uint64_t peer) {
    return std::make_unique<LocalSendingEndpoint>(*this, connect_to(address), peer);
}

std::unique_ptr<SendingEndpoint> LocalDomain::try_connect(const std::string &address, uint64_t peer) {
    UniqueFd socket = connect_to(address);
    return socket ? std::make_unique<LocalSendingEndpoint>(*this, std::move(socket), peer) : nullptr;
}

void LocalDomain::watch(int fd, LocalSocket &socket) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &socket;
    if (epoll_ctl(sockets_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw system_call_failed("epoll_ctl");
    }
}

size_t LocalDomain::poll(Completions &completions) {
    size_t total = 0;
    for (LocalSendingEndpoint *sender : senders_) {
        total += sender->reap(completions);
    }
    uint64_t bytes = kPollBytes;
    ++turn_;
    for (size_t i = 0; i < receivers_.size() && bytes != 0; ++i) {
        total += receivers_[(turn_ + i) % receivers_.size()]->serve(completions, bytes);
    }
    if (total == 0 || ++busy_polls_ >= kSocketPolls) {
        busy_polls_ = 0;
        read_sockets();
    }
    // An endpoint that is lost may be closed by who hears it. What the receiver did before it went is done.
    for (LocalSendingEndpoint *sender : senders_) {
        if (auto detail = sender->take_loss()) {
            total += sender->reap(completions);
            lost_.emplace_back(sender->peer(), std::move(*detail));
        }
    }
    for (const auto &[peer, detail] : lost_) {
        completions.lost(peer, detail);
        ++total;
    }
    lost_.clear();
    return total;
}

void LocalDomain::read_sockets() {
    constexpr int kEvents = 64;
    epoll_event events[kEvents];
    const int count = epoll_wait(sockets_.get(), events, kEvents, 0);
    for (int i = 0; i < count; ++i) {
        static_cast<LocalSocket *>(events[i].data.ptr)->readable();
    }
    for (LocalReceivingEndpoint *receiver : receivers_) {
        receiver->drop_ended();
        // Only now: who comes in place of one that has left finds room.
        receiver->accept_waiting();
    }
}

// As when going to sleep beside any shared memory: say that one sleeps, and look once more.
bool LocalDomain::may_block() {
    bool idle = true;
    for (LocalReceivingEndpoint *receiver : receivers_) {
        idle &= receiver->prepare_to_sleep();
    }
    for (LocalSendingEndpoint *sender : senders_) {
        idle &= sender->prepare_to_sleep();
    }
    return idle;
}

}  // namespace baton::fabric
