#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lane.hpp"

namespace baton::fabric {

// One receiver, by the addresses of the endpoints that it opened for us, and the lanes to them. It fails as a whole.
class Peer {
  public:
    Peer(uint64_t id, std::vector<std::string> addresses) : id_(id), addresses_(std::move(addresses)) {}

    uint64_t id() const { return id_; }
    bool failed() const { return failed_; }
    const std::vector<std::string> &addresses() const { return addresses_; }

    const std::vector<std::unique_ptr<Lane>> &lanes() const { return lanes_; }
    // Null if there is none yet.
    Lane *find(uint32_t domain, uint32_t endpoint) const;
    Lane &add(std::unique_ptr<Lane> lane);
    // How many of its lanes begin at this domain of ours: together they have one peer's turn there.
    uint32_t lanes_of(uint32_t domain) const;

    // Closes every lane: local memory is not read any more. By domain, the contexts: see Lane::close.
    std::vector<std::pair<uint32_t, ContextBlock>> fail();

  private:
    uint64_t id_;
    std::vector<std::string> addresses_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    bool failed_ = false;
};

}  // namespace baton::fabric
