#include "local_socket.hpp"

#include "error.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <random>

namespace baton::fabric {
namespace {

constexpr const char *kPrefix = "local:baton-";
constexpr size_t kScheme = 6;  // of "local:", which is not part of the name
constexpr size_t kDigits = 32;
constexpr size_t kMostFds = 4;

struct AbstractName {
    explicit AbstractName(const std::string &address) {
        name.sun_family = AF_UNIX;
        // A name that begins with a zero byte is abstract.
        std::memcpy(name.sun_path + 1, address.data() + kScheme, address.size() - kScheme);
        length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size() - kScheme);
    }
    const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&name); }

    sockaddr_un name{};
    socklen_t length = 0;
};

UniqueFd open_socket() {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) {
        throw system_call_failed("socket");
    }
    return socket;
}

// The other side's user must be ours: whoever may not read our memory anyway is not shown it.
bool same_user(int socket) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == geteuid();
}

void check_address(const std::string &address) {
    const size_t expected = local_address_length();
    if (address.size() != expected || address.rfind(kPrefix, 0) != 0) {
        throw invalid("BAD_ADDRESS", "the address of a local peer has " + std::to_string(expected) +
                                         " bytes and begins with \"" + kPrefix + "\"; this one of " +
                                         std::to_string(address.size()) + " bytes is none");
    }
}

}  // namespace

std::string draw_local_address() {
    std::random_device random;
    char digits[kDigits + 1];
    std::snprintf(digits, sizeof digits, "%08x%08x%08x%08x", random(), random(), random(), random());
    return std::string(kPrefix) + digits;
}

size_t local_address_length() { return std::strlen(kPrefix) + kDigits; }

UniqueFd listen_at(const std::string &address, int waiting) {
    check_address(address);
    UniqueFd listener = open_socket();
    const AbstractName name(address);
    if (bind(listener.get(), name.get(), name.length) != 0) {
        throw system_call_failed("bind");
    }
    if (listen(listener.get(), waiting) != 0) {
        throw system_call_failed("listen");
    }
    return listener;
}

UniqueFd connect_to(const std::string &address) {
    check_address(address);
    UniqueFd socket = open_socket();
    const AbstractName name(address);
    if (connect(socket.get(), name.get(), name.length) != 0 || !same_user(socket.get())) {
        return UniqueFd();
    }
    return socket;
}

UniqueFd accept_from(int listener, int &error) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    error = socket ? 0 : errno;
    if (socket && !same_user(socket.get())) {
        error = EACCES;
        return UniqueFd();
    }
    return socket;
}

Sent send_message(int socket, const LocalMessage &message, int fd) {
    iovec data{const_cast<LocalMessage *>(&message), sizeof message};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    if (fd >= 0) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof fd);
        std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    while (sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno == EINTR) {
            continue;
        }
        // ETOOMANYREFS: many descriptors are on their way to processes that do not read.
        const bool full = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ETOOMANYREFS;
        return full ? Sent::kFull : Sent::kLost;
    }
    return Sent::kYes;
}

Received receive_message(int socket, ReceivedMessage &received) {
    iovec data{&received.message, sizeof received.message};
    alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))];
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t length = 0;
    do {
        length = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (length < 0 && errno == EINTR);
    if (length < 0) {
        return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kEnd;
    }
    received.fd = UniqueFd();
    for (cmsghdr *rights = CMSG_FIRSTHDR(&header); rights != nullptr; rights = CMSG_NXTHDR(&header, rights)) {
        if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        // The last one is kept, and every other closed.
        for (size_t at = 0; at + CMSG_LEN(sizeof(int)) <= rights->cmsg_len; at += sizeof(int)) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(rights) + at, sizeof fd);
            received.fd = UniqueFd(fd);
        }
    }
    const bool whole = length == sizeof received.message && (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
                       received.message.magic == LocalMessage::kMagic;
    return whole ? Received::kMessage : Received::kEnd;
}

bool has_ended(int socket) {
    pollfd entry{socket, POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void check_sealed(int fd, uint64_t length) {
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw invalid("BAD_REGION", "memory that another process is to read must be a memfd sealed against shrinking");
    }
    struct stat status{};
    if (fstat(fd, &status) != 0 || status.st_size < 0 || static_cast<uint64_t>(status.st_size) < length) {
        throw invalid("BAD_REGION",
                      "memory of " + std::to_string(status.st_size) + " bytes is said to have " +
                          std::to_string(length),
                      {{"length", std::to_string(length)}, {"file", std::to_string(status.st_size)}});
    }
}

}  // namespace baton::fabric
