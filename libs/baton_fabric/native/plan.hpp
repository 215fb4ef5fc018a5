#pragma once

#include <cstdint>
#include <vector>

#include "regions.hpp"

namespace baton::fabric {

struct Extent {
    uint64_t source;
    uint64_t destination;
    uint64_t length;
};

// How the pages of one side lie. Page numbers of a transfer count the smaller pages of its two sides: on the side with
// the larger ones, `parts` of them make a page.
struct Grid {
    uint64_t layer_stride = 0;
    uint64_t page_stride = 0;
    uint64_t parts = 1;
    uint64_t part_stride = 0;

    uint64_t at(uint64_t layer, uint64_t page) const {
        return layer * layer_stride +
               (parts == 1 ? page * page_stride : page / parts * page_stride + page % parts * part_stride);
    }
};

// How a remote region is addressed through one of its peer's endpoints.
struct RemoteAccess {
    uint32_t endpoint = 0;  // by its place among the addresses of the peer
    uint64_t key = 0;
    uint64_t base = 0;
};

// What one source region sends into one destination region; see _native.pyi for the arithmetic.
struct Stream {
    Region *region = nullptr;
    Grid source;
    std::vector<RemoteAccess> remotes;
    uint64_t remote_length = 0;
    Grid remote;
    // The layers that both regions hold: [first_layer, first_layer + layers).
    uint64_t first_layer = 0;
    uint64_t layers = 0;
    std::vector<Extent> extents;

    bool has(uint64_t layer) const { return layer - first_layer < layers; }
};

// How large a write may become.
struct WriteLimits {
    uint64_t largest_message;  // no extent may be larger
    uint64_t coalesced;        // neighbours are not joined beyond this
};

// Where a transfer goes and which pages it has.
struct TransferPlan {
    uint64_t id = 0;
    uint32_t slot = 0;
    uint32_t generation = 0;
    uint64_t layers = 0;
    std::vector<Stream> streams;
    std::vector<uint32_t> source_pages;
    std::vector<uint32_t> destination_pages;

    // Drops streams without extents. Throws Error if anything would lie outside the regions described, or goes to
    // another endpoint than the `endpoints` that its peer has.
    void check(const WriteLimits &limits, size_t endpoints);

  private:
    void check_layers() const;
    void check_endpoints(size_t endpoints) const;
    void check_bounds(const WriteLimits &limits) const;
};

// These pages are complete in layer l once the counter is at least counter_base + l + 1.
struct Chunk {
    uint64_t counter_base = 0;
    uint64_t first_page = 0;
    uint64_t pages = 0;
    bool last = false;
};

// How far the planning of a transfer has come; chunks are checked against it before they are taken.
struct Planned {
    uint64_t pages = 0;
    bool last = false;

    // Throws Error if `chunk` cannot follow in a transfer of `total` pages.
    Planned after(uint64_t transfer, const Chunk &chunk, uint64_t layers, uint64_t total) const;
};

}  // namespace baton::fabric
