#include "local_receiver.hpp"

#include "error.hpp"
#include "local_socket.hpp"

#include <algorithm>
#include <cerrno>

namespace baton::fabric {
namespace {

// A sender makes one from each of its domains that meets this endpoint, and an agent has up to 64 domains. Twice as many:
// one that comes again may be seen before the ends of its former connections are. All of them may come at once.
constexpr size_t kMostConnections = 128;

}  // namespace

LocalReceivingEndpoint::LocalReceivingEndpoint(LocalDomain &domain)
    : domain_(domain), address_(draw_local_address()), listener_(listen_at(address_, static_cast<int>(kMostConnections))) {
    domain_.watch(listener_.get(), *this);
    domain_.add(*this);
}

LocalReceivingEndpoint::~LocalReceivingEndpoint() { domain_.remove(*this); }

void LocalReceivingEndpoint::close() {
    connections_.clear();
    listener_ = UniqueFd();
}

void LocalReceivingEndpoint::readable() { asked_ = true; }

void LocalReceivingEndpoint::accept_waiting() {
    if (!asked_) {
        return;
    }
    asked_ = false;
    while (listener_) {
        int error = 0;
        UniqueFd socket = accept_from(listener_.get(), error);
        if (socket) {
            if (connections_.size() < kMostConnections) {
                connect(std::move(socket));
            }
        } else if (error == EAGAIN) {
            return;
        } else if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
            // Waiting connections would keep us awake; so they are refused, and their senders hear of it.
            listener_ = UniqueFd();
        }
    }
}

void LocalReceivingEndpoint::connect(UniqueFd socket) {
    try {
        connections_.push_back(std::make_unique<LocalConnection>(domain_, std::move(socket)));
    } catch (const Error &) {
        // It can't be waited for; its sender sees it closed.
    }
}

size_t LocalReceivingEndpoint::serve(Completions &completions, uint64_t &bytes) {
    size_t total = 0;
    ++turn_;
    for (size_t i = 0; i < connections_.size() && bytes != 0; ++i) {
        total += connections_[(turn_ + i) % connections_.size()]->serve(completions, bytes);
    }
    return total;
}

bool LocalReceivingEndpoint::prepare_to_sleep() {
    bool idle = true;
    for (const auto &connection : connections_) {
        idle &= connection->prepare_to_sleep();
    }
    return idle;
}

void LocalReceivingEndpoint::drop_ended() {
    std::erase_if(connections_, [](const auto &connection) { return connection->ended(); });
}

}  // namespace baton::fabric
