#pragma once

#include <cstddef>
#include <cstdint>

namespace baton::fabric {

// CRC-32C (Castagnoli, as iSCSI has it) of `length` bytes; by the CPU's instruction where it has one.
uint32_t crc32c(const void *data, size_t length);
// The same by table, for CPUs without, and to compare.
uint32_t crc32c_by_table(const void *data, size_t length);

// A checksum of bytes and of where they belong, cut in units: the sum of a mixture of each unit's CRC-32C, its place and
// `salt`. So it depends neither on the order of the units nor on which of them travel together.
// `data` has `length` bytes, a multiple of `unit`; `place` is the first one's.
uint64_t placed_checksum(const void *data, uint64_t place, size_t length, size_t unit, uint64_t salt);

}  // namespace baton::fabric
