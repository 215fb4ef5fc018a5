// Linked with --wrap=mmap,munmap into tests under ThreadSanitizer: a file that is mapped several times is mapped once.
//
// Engines of one process share memory through mappings of their own. The sanitizer knows memory by its address, and
// would take what one of them stores and the other loads for unrelated. With one address for one file it checks the whole
// way of a page: written by the model's thread, announced by the counter, copied by the receiver's thread, counted, and
// read or written again by whoever was told that it is there, or that nothing can come any more.

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

extern "C" {
void *__real_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t length);
void *__wrap_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *address, size_t length);
}

namespace {

struct Shared {
    void *address;
    size_t length;
    int users;
};
using File = std::pair<dev_t, ino_t>;

std::mutex mutex;
std::map<File, Shared> by_file;

}  // namespace

void *__wrap_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    struct stat status{};
    if (address != nullptr || (flags & MAP_SHARED) == 0 || fstat(fd, &status) != 0) {
        return __real_mmap(address, length, protection, flags, fd, offset);
    }
    const std::lock_guard lock(mutex);
    const auto found = by_file.find({status.st_dev, status.st_ino});
    if (found != by_file.end() && length <= found->second.length) {
        ++found->second.users;
        return found->second.address;
    }
    // The whole file, and for all: another mapping of it may be larger, or may write.
    const size_t whole = std::max(length, static_cast<size_t>(status.st_size));
    void *mapped = __real_mmap(nullptr, whole, PROT_READ | PROT_WRITE, flags, fd, offset);
    if (mapped != MAP_FAILED) {
        by_file[{status.st_dev, status.st_ino}] = {mapped, whole, 1};
    }
    return mapped;
}

int __wrap_munmap(void *address, size_t length) {
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(by_file.begin(), by_file.end(),
                                    [address](const auto &each) { return each.second.address == address; });
    if (found == by_file.end()) {
        return __real_munmap(address, length);
    }
    if (--found->second.users != 0) {
        return 0;
    }
    const size_t whole = found->second.length;
    by_file.erase(found);
    return __real_munmap(address, whole);
}
