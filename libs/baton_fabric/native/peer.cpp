#include "peer.hpp"

#include <algorithm>

namespace baton::fabric {

Lane *Peer::find(uint32_t domain, uint32_t endpoint) const {
    for (const auto &lane : lanes_) {
        if (lane->domain() == domain && lane->remote() == endpoint) {
            return lane.get();
        }
    }
    return nullptr;
}

Lane &Peer::add(std::unique_ptr<Lane> lane) { return *lanes_.emplace_back(std::move(lane)); }

uint32_t Peer::lanes_of(uint32_t domain) const {
    return static_cast<uint32_t>(std::count_if(lanes_.begin(), lanes_.end(),
                                               [domain](const auto &lane) { return lane->domain() == domain; }));
}

std::vector<std::pair<uint32_t, ContextBlock>> Peer::fail() {
    failed_ = true;
    std::vector<std::pair<uint32_t, ContextBlock>> contexts;
    for (auto &lane : lanes_) {
        contexts.emplace_back(lane->domain(), lane->close());
    }
    return contexts;
}

}  // namespace baton::fabric
