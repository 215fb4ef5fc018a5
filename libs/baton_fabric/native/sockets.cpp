#include "sockets.hpp"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace baton::fabric {
namespace {

bool same_place(const sockaddr_storage &socket, const sockaddr_storage &ours) {
    if (socket.ss_family != ours.ss_family) {
        return false;
    }
    if (ours.ss_family == AF_INET) {
        const auto &a = reinterpret_cast<const sockaddr_in &>(socket);
        const auto &b = reinterpret_cast<const sockaddr_in &>(ours);
        return a.sin_port == b.sin_port &&
               (b.sin_addr.s_addr == INADDR_ANY || a.sin_addr.s_addr == b.sin_addr.s_addr);
    }
    if (ours.ss_family == AF_INET6) {
        const auto &a = reinterpret_cast<const sockaddr_in6 &>(socket);
        const auto &b = reinterpret_cast<const sockaddr_in6 &>(ours);
        return a.sin6_port == b.sin6_port && (std::memcmp(&b.sin6_addr, &in6addr_any, sizeof in6addr_any) == 0 ||
                                              std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof b.sin6_addr) == 0);
    }
    return false;
}

bool is_open(int fd) {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) {
        return false;
    }
    return info.tcpi_state == TCP_LISTEN || info.tcpi_state == TCP_ESTABLISHED || info.tcpi_state == TCP_CLOSE_WAIT;
}

}  // namespace

bool shut_down_sockets(const std::string &address) {
    sockaddr_storage ours{};
    std::memcpy(&ours, address.data(), std::min(address.size(), sizeof ours));
    const std::unique_ptr<DIR, int (*)(DIR *)> directory(opendir("/proc/self/fd"), &closedir);
    bool found = false;
    for (const dirent *entry = nullptr; directory && (entry = readdir(directory.get())) != nullptr;) {
        const int fd = std::atoi(entry->d_name);
        sockaddr_storage local{};
        socklen_t length = sizeof local;
        if (getsockname(fd, reinterpret_cast<sockaddr *>(&local), &length) == 0 && same_place(local, ours) &&
            is_open(fd)) {
            ::shutdown(fd, SHUT_RDWR);
            found = true;
        }
    }
    return found;
}

}  // namespace baton::fabric
