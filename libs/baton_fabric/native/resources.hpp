#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>

#include <rdma/fabric.h>

namespace baton::fabric {

// CLOCK_MONOTONIC, nanoseconds.
uint64_t now_ns();

class UniqueFd {
  public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    UniqueFd(UniqueFd &&other) noexcept : fd_(other.release()) {}
    UniqueFd &operator=(UniqueFd &&other) noexcept;
    ~UniqueFd();

    // A close-on-exec duplicate. Throws Error.
    static UniqueFd duplicate(int fd);
    // A non-blocking eventfd at 0. Throws Error.
    static UniqueFd event();

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int release();
    int fd_ = -1;
};

// A shared mapping of a file's first bytes.
class Mapping {
  public:
    enum class Access { kReadWrite, kRead };

    Mapping() = default;
    // Throws Error.
    Mapping(int fd, size_t length, Access access = Access::kReadWrite);
    Mapping(Mapping &&other) noexcept;
    Mapping &operator=(Mapping &&other) noexcept;
    ~Mapping();

    // Puts private memory that nobody else sees in the place of the file: a write that still comes does not fault and
    // does not reach the file. The file's memory is let go at once.
    void replace_by_nothing();

    // Maps every page now, as a NIC's registration does, and not when a transfer first touches it. A receiver that
    // faults on every page falls behind: over tcp its window closes, and a sender that paces by the rate that it
    // measures (BBR) was seen to stay slow for the rest of the connection. Does nothing before Linux 5.14. Other threads
    // may use the memory meanwhile. Throws Error where there is not so much memory.
    void populate() const;

    void *address() const { return address_; }
    size_t length() const { return length_; }

  private:
    void *address_ = nullptr;
    size_t length_ = 0;
};

// Random keys, so that one that was never handed out cannot be guessed, nor an old one met again.
class KeySource {
  public:
    explicit KeySource(uint64_t size) : size_(size) {}
    // Of `size` bytes, at most 8.
    uint64_t draw();

  private:
    uint64_t size_;
    std::random_device random_;
};

struct FidCloser {
    template <class Fid> void operator()(Fid *fid) const { fi_close(&fid->fid); }
};

// Owns a libfabric object: closed when it goes.
template <class Fid> using UniqueFid = std::unique_ptr<Fid, FidCloser>;

}  // namespace baton::fabric
