#include "local_ring.hpp"

#include "error.hpp"
#include "local_socket.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace baton::fabric {
namespace {

constexpr size_t kLength = sizeof(Ring::Header) + Ring::kEntries * sizeof(RingEntry);

}  // namespace

Ring::Ring(UniqueFd fd) : fd_(std::move(fd)), memory_(fd_.get(), kLength) {}

Ring Ring::create() {
    UniqueFd fd(memfd_create("baton-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || ftruncate(fd.get(), kLength) != 0 ||
        fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw system_call_failed("memfd_create");
    }
    Ring ring(std::move(fd));
    ring.header().wake_sender_at.store(kNever, std::memory_order_relaxed);
    return ring;
}

Ring Ring::open(UniqueFd fd) {
    check_sealed(fd.get(), kLength);
    return Ring(std::move(fd));
}

}  // namespace baton::fabric
