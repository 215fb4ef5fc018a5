// Preloaded: counts what the process asks of the allocator, over all threads.
#include <atomic>
#include <cstddef>
#include <cstdint>

extern "C" {

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *block, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

static std::atomic<uint64_t> made{0};
static std::atomic<uint64_t> freed{0};

static void *counted(void *block) {
    if (block != nullptr) {
        made.fetch_add(1, std::memory_order_relaxed);
    }
    return block;
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = counted(__libc_memalign(alignment, size));
    return *block != nullptr ? 0 : 12;
}

void *realloc(void *block, size_t size) {
    if (block != nullptr) {
        freed.fetch_add(1, std::memory_order_relaxed);
    }
    return counted(__libc_realloc(block, size));
}

void free(void *block) {
    if (block != nullptr) {
        freed.fetch_add(1, std::memory_order_relaxed);
    }
    __libc_free(block);
}

uint64_t baton_allocations(void) { return made.load(); }
uint64_t baton_live_allocations(void) { return made.load() - freed.load(); }
}
