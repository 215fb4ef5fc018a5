#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "endpoint.hpp"
#include "plan.hpp"

namespace baton::fabric {

class Lane;
class Transfer;

// The part of a stream that goes over one lane.
struct Share {
    const Stream *stream = nullptr;
    void *descriptor = nullptr;  // of the source region in the lane's domain
    uint64_t key = 0;
    uint64_t base = 0;
    // See cut(): [from, to) of `whole`.
    uint64_t from = 0;
    uint64_t to = 1;
    uint64_t whole = 1;
    uint64_t quantum = 1;
    uint64_t salt = 0;
};

// What of a transfer goes over one lane, and which write comes next. Knows nothing of endpoints; whoever posts asks
// prepare() and says posted(). A *batch* is what it has of one layer of one chunk.
class Strand {
  public:
    Strand(Transfer &transfer, Lane &lane, uint64_t coalesced) : transfer_(transfer), lane_(lane), coalesced_(coalesced) {}

    Transfer &transfer() const { return transfer_; }
    Lane &lane() const { return lane_; }

    // Before the first chunk.
    void add(const Share &share);
    void plan(const Chunk &chunk);

    bool has_batch() const { return !chunks_.empty(); }
    // The next batch may be sent.
    bool batch_ready() const;
    // Some, but not all, writes of a batch were posted.
    bool batch_begun() const { return begun_; }

    // No batch is begun any more, and one that has begun ends with its next write: its last, which proves that all of it
    // is delivered.
    void end_early();
    // Not all of what was planned is sent.
    bool ended_early() const { return dropped_; }

    // The next write of the batch that is ready or begun. The same until posted().
    const Write &prepare();
    void posted();

    uint32_t in_flight = 0;
    uint64_t last_sequence = 0;  // of its lane; 0 before the first post
    // Links of the lane's list.
    Strand *next_ready = nullptr;
    bool is_ready = false;

  private:
    // Extents of a share that belong to the present batch.
    struct Range {
        const Share *share;
        uint64_t first;
        uint64_t count;
    };
    struct Position {
        uint32_t range = 0;
        uint32_t extent = 0;
        uint64_t page = 0;
        uint64_t left = 0;  // extents of the range
    };

    void enter(Position &position, uint32_t range) const;
    bool step(Position &position) const;
    void write_at(const Position &position, Write &write) const;
    bool lay_out();
    void next_batch();
    void begin_batch();
    void drop();

    Transfer &transfer_;
    Lane &lane_;
    uint64_t coalesced_;
    std::vector<Share> shares_;
    std::deque<Chunk> chunks_;
    uint64_t layer_ = 0;
    uint64_t batch_ = 0;
    std::vector<Range> ranges_;
    Position position_;
    Position after_;  // behind the prepared write
    Write write_;
    bool prepared_ = false;
    bool begun_ = false;
    bool ending_ = false;
    bool dropped_ = false;
};

}  // namespace baton::fabric
