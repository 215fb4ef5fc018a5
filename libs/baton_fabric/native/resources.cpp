#include "resources.hpp"

#include "error.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace baton::fabric {

uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

UniqueFd &UniqueFd::operator=(UniqueFd &&other) noexcept {
    if (this != &other) {
        UniqueFd old(std::exchange(fd_, other.release()));
    }
    return *this;
}

UniqueFd::~UniqueFd() {
    if (fd_ >= 0) {
        close(fd_);
    }
}

UniqueFd UniqueFd::duplicate(int fd) {
    UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!copy) {
        throw system_call_failed("fcntl(F_DUPFD_CLOEXEC)");
    }
    return copy;
}

UniqueFd UniqueFd::event() {
    UniqueFd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) {
        throw system_call_failed("eventfd");
    }
    return fd;
}

int UniqueFd::release() { return std::exchange(fd_, -1); }

Mapping::Mapping(int fd, size_t length, Access access) : length_(length) {
    const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
    address_ = mmap(nullptr, length, protection, MAP_SHARED, fd, 0);
    if (address_ == MAP_FAILED) {
        address_ = nullptr;
        throw system_call_failed("mmap");
    }
    // Best effort: a core dump of this process needs no copy of everybody's KV cache.
    madvise(address_, length, MADV_DONTDUMP);
}

Mapping::Mapping(Mapping &&other) noexcept
    : address_(std::exchange(other.address_, nullptr)), length_(std::exchange(other.length_, 0)) {}

Mapping &Mapping::operator=(Mapping &&other) noexcept {
    std::swap(address_, other.address_);
    std::swap(length_, other.length_);
    return *this;
}

Mapping::~Mapping() {
    if (address_ != nullptr) {
        munmap(address_, length_);
    }
}

void Mapping::replace_by_nothing() {
    mmap(address_, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void Mapping::populate() const {
#ifdef MADV_POPULATE_WRITE
    int done = 0;
    do {
        done = madvise(address_, length_, MADV_POPULATE_WRITE);
    } while (done != 0 && errno == EINTR);
    if (done != 0 && (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON)) {
        throw Error("there is no memory for a region of " + std::to_string(length_) + " bytes: " + std::strerror(errno),
                    "RESOURCE_EXHAUSTED", "NO_MEMORY", {{"length", std::to_string(length_)}});
    }
#endif
}

uint64_t KeySource::draw() {
    const uint64_t key = (static_cast<uint64_t>(random_()) << 32) | random_();
    return size_ >= 8 ? key : key & ((uint64_t{1} << (8 * size_)) - 1);
}

}  // namespace baton::fabric
