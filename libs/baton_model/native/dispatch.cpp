#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace baton::kernels {

namespace {

// Best first.
std::vector<const Kernels *> usable() {
    std::vector<const Kernels *> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (avx512vnni && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512bf16_kernels);
    if (avx512vnni) found.push_back(&avx512vnni_kernels);
    if (avx512) found.push_back(&avx512_kernels);
    if (avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&avxvnni_kernels);
    if (avx2) found.push_back(&avx2_kernels);
#endif
    found.push_back(&portable_kernels);
    return found;
}

const Kernels &choose() {
    const auto candidates = usable();
    const char *wanted = std::getenv("BATON_KERNELS");
    if (wanted == nullptr || *wanted == '\0') return *candidates.front();
    std::string names;
    for (const Kernels *each : candidates) {
        if (std::strcmp(each->name, wanted) == 0) return *each;
        names += std::string(names.empty() ? "" : ", ") + each->name;
    }
    throw std::invalid_argument("BATON_KERNELS is " + std::string(wanted) + "; this processor runs " + names);
}

uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

}  // namespace

double uniform(uint64_t seed, uint64_t position, uint64_t attempt) {
    uint64_t state = mix(seed) + (position + 1) * 0x9E3779B97F4A7C15u;
    state = mix(state) + (attempt + 1) * 0x9E3779B97F4A7C15u;
    return static_cast<double>(mix(state) >> 11) * 0x1p-53;
}

const Kernels &kernels() {
    static const Kernels &chosen = choose();
    return chosen;
}

}  // namespace baton::kernels
