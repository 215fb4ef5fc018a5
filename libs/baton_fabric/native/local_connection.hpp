#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "local_domain.hpp"
#include "local_ring.hpp"
#include "local_socket.hpp"

namespace baton::fabric {

// The receiving side of a ring: copies. Nothing that the sender says is believed; what does not fit ends the
// connection.
class LocalConnection : private LocalSocket {
  public:
    LocalConnection(LocalDomain &domain, UniqueFd socket);

    size_t serve(Completions &completions, uint64_t &bytes);
    bool prepare_to_sleep();
    // And there is nothing left to report.
    bool ended() const { return !socket_ && !refusal_; }

  private:
    void readable() override;
    void take(ReceivedMessage &received);
    void open_region(const ReceivedMessage &received);
    void end();
    // Ends the connection because of what the sender did.
    void refuse(std::string detail);

    // How much of the entry was copied, at most `most`; 0 if the connection has ended by it. Regions may go between two
    // slices of an entry.
    uint64_t copy_slice(const RingEntry &entry, uint64_t most);
    void prefetch(const RingEntry &next) const;
    const Mapping *source_of(uint64_t region);
    void commit(Completions &completions);

    LocalDomain &domain_;
    UniqueFd socket_;
    std::optional<Ring> ring_;
    std::unordered_map<uint64_t, Mapping> sources_;
    std::pair<uint64_t, const Mapping *> source_{};  // the last one
    uint64_t committed_ = 0;
    uint64_t taken_ = 0;  // copied wholly
    RingEntry current_{};  // the one after, as it was when its copying began
    uint64_t done_ = 0;    // of it
    std::array<uint32_t, Ring::kEntries> immediates_{};  // of those that are not committed
    bool asleep_ = false;
    std::optional<std::string> refusal_;
};

}  // namespace baton::fabric
