#include "checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace baton::fabric {
namespace {

constexpr std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78U : crc >> 1;
        }
        table[byte] = crc;
    }
    return table;
}

constexpr auto kTable = make_table();

uint32_t update_by_table(uint32_t crc, const unsigned char *data, size_t length) {
    for (size_t i = 0; i < length; ++i) {
        crc = kTable[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
    }
    return crc;
}

uint64_t word_at(const unsigned char *data) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    return word;
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) uint32_t update_by_cpu(uint32_t crc, const unsigned char *data, size_t length) {
    uint64_t state = crc;
    for (; length >= 8; data += 8, length -= 8) {
        state = _mm_crc32_u64(state, word_at(data));
    }
    for (; length != 0; ++data, --length) {
        state = _mm_crc32_u8(static_cast<uint32_t>(state), *data);
    }
    return static_cast<uint32_t>(state);
}

// The instruction takes three cycles but begins in each: three neighbours of `length` bytes at once, a multiple of 8.
__attribute__((target("sse4.2"))) void update_three(uint32_t *crcs, const unsigned char *data, size_t length) {
    uint64_t a = crcs[0];
    uint64_t b = crcs[1];
    uint64_t c = crcs[2];
    for (const unsigned char *end = data + length; data != end; data += 8) {
        a = _mm_crc32_u64(a, word_at(data));
        b = _mm_crc32_u64(b, word_at(data + length));
        c = _mm_crc32_u64(c, word_at(data + 2 * length));
    }
    crcs[0] = static_cast<uint32_t>(a);
    crcs[1] = static_cast<uint32_t>(b);
    crcs[2] = static_cast<uint32_t>(c);
}

const bool kByCpu = __builtin_cpu_supports("sse4.2");

#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)

uint32_t update_by_cpu(uint32_t crc, const unsigned char *data, size_t length) {
    for (; length >= 8; data += 8, length -= 8) {
        crc = __crc32cd(crc, word_at(data));
    }
    for (; length != 0; ++data, --length) {
        crc = __crc32cb(crc, *data);
    }
    return crc;
}

void update_three(uint32_t *crcs, const unsigned char *data, size_t length) {
    for (int i = 0; i < 3; ++i) {
        crcs[i] = update_by_cpu(crcs[i], data + i * length, length);
    }
}

constexpr bool kByCpu = true;

#else

uint32_t update_by_cpu(uint32_t crc, const unsigned char *data, size_t length) {
    return update_by_table(crc, data, length);
}

void update_three(uint32_t *, const unsigned char *, size_t) {}

constexpr bool kByCpu = false;

#endif

// The finaliser of splitmix64: every bit of the result depends on every bit of `value`.
uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
}

uint64_t placed(uint64_t salt, uint64_t place, uint32_t crc) {
    return mix(mix(salt + 0x9E3779B97F4A7C15U) + mix(place + 0x9E3779B97F4A7C15U) + crc);
}

}  // namespace

uint32_t crc32c_by_table(const void *data, size_t length) {
    return ~update_by_table(~0U, static_cast<const unsigned char *>(data), length);
}

uint32_t crc32c(const void *data, size_t length) {
    const auto *bytes = static_cast<const unsigned char *>(data);
    return ~(kByCpu ? update_by_cpu(~0U, bytes, length) : update_by_table(~0U, bytes, length));
}

uint64_t placed_checksum(const void *data, uint64_t place, size_t length, size_t unit, uint64_t salt) {
    const auto *bytes = static_cast<const unsigned char *>(data);
    uint64_t sum = 0;
    size_t at = 0;
    if (kByCpu && unit % 8 == 0) {
        for (; at + 3 * unit <= length; at += 3 * unit) {
            uint32_t crcs[3] = {~0U, ~0U, ~0U};
            update_three(crcs, bytes + at, unit);
            for (size_t i = 0; i < 3; ++i) {
                sum += placed(salt, place + at + i * unit, ~crcs[i]);
            }
        }
    }
    for (; at < length; at += unit) {
        sum += placed(salt, place + at, crc32c(bytes + at, unit));
    }
    return sum;
}

}  // namespace baton::fabric
