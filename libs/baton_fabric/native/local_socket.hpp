#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "resources.hpp"

namespace baton::fabric {

// The socket between two local endpoints: descriptors and wake-ups go over it, the bytes and what is to be done with
// them do not. Its end is how either side learns that the other has ended or closed. A message is one packet.
struct LocalMessage {
    enum Kind : uint32_t {
        kHello = 1,   // first of a sender; with the ring's descriptor
        kRegion = 2,  // the sender's region with this number has this length; with the memory's descriptor
        kForget = 3,  // the sender's region with this number is gone
        kWake = 4,    // look at the ring
    };
    static constexpr uint32_t kMagic = 0x31435442;  // "BTC1": the layout of ring and messages

    uint32_t magic = kMagic;
    uint32_t kind = 0;
    uint64_t region = 0;
    uint64_t length = 0;
};

struct ReceivedMessage {
    LocalMessage message;
    UniqueFd fd;
};

enum class Sent { kYes, kFull, kLost };
enum class Received { kMessage, kNothing, kEnd };

// Addresses are names in the abstract namespace, which the kernel frees with the socket: 128 random bits, never the
// same twice. They are valid within one network namespace.
std::string draw_local_address();
size_t local_address_length();

// Throw Error: BAD_ADDRESS for what is no local address, SYSTEM_CALL_FAILED.
// `waiting`: connections that may wait to be accepted.
UniqueFd listen_at(const std::string &address, int waiting);
// No descriptor if nobody listens there (any more), or somebody of another user, or too many wait.
UniqueFd connect_to(const std::string &address);
// Likewise if there is no connection to accept; `error` is the number of the error then.
UniqueFd accept_from(int listener, int &error);

Sent send_message(int socket, const LocalMessage &message, int fd = -1);
// kEnd also for what is no message.
Received receive_message(int socket, ReceivedMessage &received);
// Whether the other side has closed or ended. Messages of it may still wait.
bool has_ended(int socket);

// Throws Error unless `fd` is memory of at least `length` bytes that nobody can shrink: touching a mapping beyond the
// end of its file would end this process.
void check_sealed(int fd, uint64_t length);

}  // namespace baton::fabric
