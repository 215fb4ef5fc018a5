#include "spread.hpp"

#include <algorithm>
#include <numeric>

namespace baton::fabric {
namespace {

__extension__ using Wide = unsigned __int128;

}  // namespace

std::vector<Meeting> meet(uint32_t sources, uint32_t destinations) {
    std::vector<Meeting> meetings;
    const uint64_t whole = std::lcm<uint64_t>(sources, destinations);
    const uint64_t ours = whole / sources;
    const uint64_t theirs = whole / destinations;
    for (uint64_t from = 0; from < whole;) {
        const uint64_t to = std::min((from / ours + 1) * ours, (from / theirs + 1) * theirs);
        meetings.push_back({static_cast<uint32_t>(from / ours), static_cast<uint32_t>(from / theirs), from, to, whole});
        from = to;
    }
    return meetings;
}

uint64_t cut(uint64_t extents, uint64_t quantum, uint64_t at, uint64_t whole, Phase phase) {
    if (at >= whole) {
        return extents;
    }
    const uint64_t pieces = std::max<uint64_t>(extents / quantum, 1);
    // at / whole of the pieces, and the phase; 32 bits behind the point are enough.
    const Wide piece = (((Wide{at} * pieces) << 32) / whole + (phase.piece >> 32)) >> 32;
    const Wide extent = (((piece * extents) << 32) / pieces + (phase.extent >> 32)) >> 32;
    return static_cast<uint64_t>(std::min<Wide>(extent, extents));
}

}  // namespace baton::fabric
