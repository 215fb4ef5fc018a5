#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "counters.hpp"
#include "endpoint.hpp"
#include "events.hpp"
#include "regions.hpp"

namespace baton::fabric {

class Peer;

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

// What one source region sends into one destination region; see _native.pyi for the arithmetic.
struct Stream {
    Region *region = nullptr;
    Grid source;
    uint64_t remote_key = 0;
    uint64_t remote_base = 0;
    uint64_t remote_length = 0;
    Grid remote;
    // The layers that both regions hold: [first_layer, first_layer + layers).
    uint64_t first_layer = 0;
    uint64_t layers = 0;
    std::vector<Extent> extents;

    bool has(uint64_t layer) const { return layer - first_layer < layers; }
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

// How large a write may become.
struct WriteLimits {
    uint64_t largest_message;  // no extent may be larger
    uint64_t coalesced;        // neighbours are not joined beyond this
};

// One transfer at its sender: which write comes next. Knows nothing of endpoints; whoever posts asks prepare() and says
// posted(). A *batch* is one layer of one chunk.
class Transfer {
  public:
    // Throws Error if anything would lie outside the regions described.
    Transfer(TransferPlan plan, LayerCounter &counter, Peer &peer, const WriteLimits &limits);

    uint64_t id() const { return plan_.id; }
    LayerCounter &counter() const { return counter_; }
    Peer &peer() const { return peer_; }
    const std::vector<Stream> &streams() const { return plan_.streams; }
    uint64_t layers() const { return plan_.layers; }
    uint64_t pages() const { return plan_.source_pages.size(); }
    const Planned &planned() const { return planned_; }
    uint32_t immediate(const Write &write) const;

    // Takes a chunk that Planned::after has accepted.
    void plan(const Chunk &chunk);
    // Notes what the counter says now, for the statistics.
    void observe(uint64_t now);

    // Nothing will ever have to be sent: no pages, or none of their bytes.
    bool empty() const { return plan_.streams.empty() || pages() == 0; }
    bool has_batch() const { return !chunks_.empty(); }
    // The next batch may be sent.
    bool batch_ready() const;
    // Some, but not all, writes of a batch were posted.
    bool batch_begun() const { return begun_; }
    bool all_posted() const { return planned_.last && chunks_.empty(); }

    // The next write of the batch that is ready or begun. The same until posted().
    const Write &prepare();
    void posted();

    TransferStats stats;
    bool cancelled = false;
    uint32_t in_flight = 0;
    uint64_t last_sequence = 0;  // of its peer; 0 before the first post
    // Links of the lists that it is in.
    Transfer *next_ready = nullptr;
    bool is_ready = false;
    bool is_waiting = false;

  private:
    struct Position {
        uint32_t stream = 0;
        uint64_t page = 0;
        uint32_t extent = 0;
    };

    void check_layers() const;
    void check_bounds(const WriteLimits &limits) const;
    void choose_streams();
    bool step(Position &position, const Chunk &chunk) const;
    void write_at(const Position &position, Write &write) const;
    void begin_batch();

    TransferPlan plan_;
    LayerCounter &counter_;
    Peer &peer_;
    uint64_t coalesced_;
    Planned planned_;
    uint64_t final_value_ = 0;  // of the counter, when the last planned chunk has its last layer

    std::deque<Chunk> chunks_;
    uint64_t layer_ = 0;
    // Those of the present layer. All, if `layered_` is false.
    std::vector<const Stream *> active_;
    bool layered_ = false;
    Position position_;
    Position after_;  // behind the prepared write
    Write write_;
    bool prepared_ = false;
    bool begun_ = false;
};

}  // namespace baton::fabric
