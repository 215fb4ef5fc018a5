#pragma once

#include <cstdint>
#include <vector>

namespace baton::fabric {

// Where two groups of domains meet: this part of all bytes, [from, to) of `whole`, goes from our domain `source` to the
// peer's domain `destination`, both counted within their groups.
struct Meeting {
    uint32_t source;
    uint32_t destination;
    uint64_t from;
    uint64_t to;
    uint64_t whole;
};

// Both groups cut the same bytes into equal parts, and meet where their parts overlap: so each domain has an equal share
// on either side, whatever their numbers, and equal numbers meet one to one. sources + destinations - gcd of the two.
std::vector<Meeting> meet(uint32_t sources, uint32_t destinations);

// Where rounding turns, to whole pieces and to whole extents: fractions of 2^64.
struct Phase {
    uint64_t piece;
    uint64_t extent;
};

// Of batches that follow each other: spread evenly, however many there are (multiples of the golden ratio, and of the
// square root of 2), so that they make up for what one batch can't divide. `salt`: different for streams and transfers,
// so that they don't turn together.
constexpr Phase phase_of(uint64_t batch, uint64_t salt) {
    return {batch * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03, batch * 0x6A09E667F3BCC909 + salt};
}

// The first of `extents` extents of a batch that belongs to what begins at `at` of `whole`: 0 at 0, all at `whole`. A
// batch is cut into equal pieces of `quantum` extents or a little more, and in between only, so that a run of neighbours
// is not cut small.
uint64_t cut(uint64_t extents, uint64_t quantum, uint64_t at, uint64_t whole, Phase phase);

}  // namespace baton::fabric
