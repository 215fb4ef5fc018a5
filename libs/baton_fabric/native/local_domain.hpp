#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "domain.hpp"

namespace baton::fabric {

class LocalDomain;
class LocalReceivingEndpoint;
class LocalSendingEndpoint;

// Something with a socket that LocalDomain waits for.
class LocalSocket {
  public:
    virtual void readable() = 0;

  protected:
    ~LocalSocket() = default;
};

struct LocalRegistration : Registration {
    LocalRegistration(LocalDomain &domain, uint64_t id, const Mapping &memory, int fd);
    ~LocalRegistration() override;

    LocalDomain &domain;
    uint64_t id;  // names it to receivers, never used again
    char *address;
    uint64_t length;
    UniqueFd fd;
};

// The fast path between two agents of one host and user. The sender shares the memory that it was handed, and says in a
// ring what goes where; the receiver's thread maps that memory and copies. Therefore the fence is local and total (who
// does not copy any more is not written to), and a sender that stands still or is gone can't write anything.
//
// A write counts only if, after its last byte was copied, the sender still had the ring open: one that gives up on a
// receiver closes the ring first, and whatever is copied from its memory later is not reported as arrived.
class LocalDomain : public Domain {
  public:
    static constexpr const char *kName = "local";

    LocalDomain();

    const Capabilities &capabilities() const override { return capabilities_; }
    std::unique_ptr<Registration> register_memory(const Mapping &memory, int fd) override;
    std::unique_ptr<Registration> register_memory(const DeviceRange &range) override;
    std::unique_ptr<ReceivingEndpoint> open_endpoint() override;
    std::unique_ptr<SendingEndpoint> connect(const std::string &address, uint64_t peer) override;
    size_t poll(Completions &completions) override;
    int wait_fd() const override { return sockets_.get(); }
    bool may_block() override;

    // For AutoDomain: under a key that is not in use here; and null if nobody is at the address.
    std::unique_ptr<Registration> register_as(uint64_t key, const Mapping &memory, int fd);
    std::unique_ptr<SendingEndpoint> try_connect(const std::string &address, uint64_t peer);

    // For registrations and endpoints.
    const LocalRegistration *find(uint64_t key) const;
    void add(LocalReceivingEndpoint &endpoint) { receivers_.push_back(&endpoint); }
    void add(LocalSendingEndpoint &endpoint) { senders_.push_back(&endpoint); }
    void remove(const LocalReceivingEndpoint &endpoint) { std::erase(receivers_, &endpoint); }
    void remove(const LocalSendingEndpoint &endpoint) { std::erase(senders_, &endpoint); }
    void forget(const LocalRegistration &registration);
    // Until the descriptor is closed.
    void watch(int fd, LocalSocket &socket);

  private:
    void read_sockets();

    Capabilities capabilities_;
    KeySource keys_;
    UniqueFd sockets_;  // an epoll
    uint64_t next_region_ = 1;
    std::unordered_map<uint64_t, const LocalRegistration *> by_key_;
    mutable const LocalRegistration *found_ = nullptr;  // the last one
    std::vector<LocalReceivingEndpoint *> receivers_;
    std::vector<LocalSendingEndpoint *> senders_;
    std::vector<std::pair<uint64_t, std::string>> lost_;
    size_t turn_ = 0;
    uint32_t busy_polls_ = 0;
};

}  // namespace baton::fabric
