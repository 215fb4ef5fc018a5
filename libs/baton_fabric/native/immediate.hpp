#pragma once

#include <cstdint>

namespace baton::fabric {

// What each write tells the receiver, in the 32 bits that every provider can carry: slot 12 | generation 8 | extents
// 12, slot in the highest bits. baton_kv.immediate is the same in Python.
struct Immediate {
    static constexpr uint32_t kSlots = 1U << 12;
    static constexpr uint32_t kGenerations = 1U << 8;
    static constexpr uint32_t kMaxExtents = (1U << 12) - 1;

    uint32_t slot;
    uint32_t generation;
    uint32_t extents;

    uint32_t encode() const { return (slot << 20) | (generation << 12) | extents; }
    static Immediate decode(uint32_t bits) { return {bits >> 20, (bits >> 12) & 0xff, bits & 0xfff}; }
};

}  // namespace baton::fabric
