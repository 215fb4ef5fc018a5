#include "scratch.hpp"

#include <cstdlib>
#include <memory>
#include <new>

namespace baton::kernels {

void *scratch(int64_t bytes) {
    struct Free {
        void operator()(void *memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local int64_t size = 0;
    if (size < bytes) {
        memory.reset(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
        size = memory ? bytes : 0;
        if (!memory) throw std::bad_alloc();
    }
    return memory.get();
}

}  // namespace baton::kernels
