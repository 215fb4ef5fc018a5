#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "local_domain.hpp"
#include "local_ring.hpp"
#include "local_socket.hpp"

namespace baton::fabric {

// The sending side of a ring. Every completion is a delivery.
class LocalSendingEndpoint : public SendingEndpoint, private LocalSocket {
  public:
    // `socket`: from connect_to. If that has found nobody, take_loss() tells, as it does of a receiver that goes later.
    LocalSendingEndpoint(LocalDomain &domain, UniqueFd socket, uint64_t peer);
    // No write that was not complete by then will ever count.
    ~LocalSendingEndpoint() override;

    uint64_t peer() const { return peer_; }
    ssize_t post(const Write &write, uint32_t immediate, bool delivery_complete, void *context) override;

    uint64_t window() const override { return Ring::kEntries; }

    // Reports what the receiver has done; how much.
    size_t reap(Completions &completions);
    // From now on the receiver wakes us; false if reap() has something to do already.
    bool prepare_to_sleep();
    // The receiver need not keep this region mapped.
    void forget(uint64_t region);
    // Once, why the receiver can't be written to any more.
    std::optional<std::string> take_loss();

  private:
    struct Posted {
        void *context;
        uint64_t length;
    };

    void readable() override;
    void lose(const char *detail);
    bool announce(const LocalRegistration &region);
    bool flush_forgotten();
    uint64_t wake_position() const;

    LocalDomain &domain_;
    uint64_t peer_;
    Ring ring_;
    UniqueFd socket_;
    uint64_t head_ = 0;
    uint64_t tail_ = 0;
    bool asleep_ = false;
    bool lost_ = false;
    std::optional<std::string> loss_;
    std::array<Posted, Ring::kEntries> posted_{};
    std::vector<uint64_t> announced_;
    std::vector<uint64_t> forgotten_;  // that the receiver has not been told of
};

}  // namespace baton::fabric
