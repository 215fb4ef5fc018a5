#include "transfer.hpp"

#include "immediate.hpp"
#include "lane.hpp"
#include "spread.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace baton::fabric {
namespace {

// A batch is divided among lanes in pieces of at least so many bytes, or one extent: a write costs as much time as some
// 20 KB on the wire (286,000 small ones a second against 6 GB/s over tcp), so smaller pieces lose by coalescing what
// the second lane gains.
constexpr uint64_t kLeastShareBytes = 128 << 10;

uint64_t quantum_of(const Stream &stream) {
    const uint64_t bytes = std::accumulate(stream.extents.begin(), stream.extents.end(), uint64_t{0},
                                           [](uint64_t sum, const Extent &extent) { return sum + extent.length; });
    return std::max<uint64_t>(1, kLeastShareBytes * stream.extents.size() / bytes);
}

}  // namespace

Transfer::Transfer(TransferPlan plan, LayerCounter &counter, Peer &peer, const WriteLimits &limits, const Lanes &lanes)
    : plan_(std::move(plan)), counter_(counter), peer_(peer) {
    for (uint64_t number = 0; !empty() && number < plan_.streams.size(); ++number) {
        spread(plan_.streams[number], number, limits, lanes);
    }
}

void Transfer::spread(const Stream &stream, uint64_t number, const WriteLimits &limits, const Lanes &lanes) {
    const auto &domains = stream.region->domains;
    const uint64_t quantum = quantum_of(stream);
    for (const auto &meeting : meet(static_cast<uint32_t>(domains.size()), static_cast<uint32_t>(stream.remotes.size()))) {
        const auto &[domain, registration] = domains[meeting.source];
        const auto &access = stream.remotes[meeting.destination];
        strand_of(lanes(domain, access.endpoint), limits.coalesced)
            .add({&stream, registration->descriptor, access.key, access.base, meeting.from, meeting.to, meeting.whole,
                  quantum, plan_.id + number});
    }
}

Strand &Transfer::strand_of(Lane &lane, uint64_t coalesced) {
    for (auto &strand : strands_) {
        if (&strand.lane() == &lane) {
            return strand;
        }
    }
    return strands_.emplace_back(*this, lane, coalesced);
}

uint32_t Transfer::immediate(const Write &write) const {
    return Immediate{plan_.slot, plan_.generation % Immediate::kGenerations, write.extents}.encode();
}

void Transfer::plan(const Chunk &chunk) {
    planned_ = {planned_.pages + chunk.pages, chunk.last};
    stats.pages += chunk.pages;
    if (chunk.pages == 0 || plan_.streams.empty()) {
        return;
    }
    final_value_ = chunk.counter_base + plan_.layers;
    for (auto &strand : strands_) {
        strand.plan(chunk);
    }
}

void Transfer::observe(uint64_t now) {
    if (stats.first_ready_ns == 0 &&
        std::any_of(strands_.begin(), strands_.end(), [](const Strand &strand) { return strand.batch_ready(); })) {
        stats.first_ready_ns = now;
    }
    if (stats.final_layer_ns == 0 && planned_.last && counter_.value() >= final_value_) {
        stats.final_layer_ns = now;
    }
}

void Transfer::count(const Write &write) {
    stats.bytes += write.length;
    stats.extents += write.extents;
    stats.writes += 1;
}

bool Transfer::has_batch() const {
    return std::any_of(strands_.begin(), strands_.end(), [](const Strand &strand) { return strand.has_batch(); });
}

bool Transfer::batch_begun() const {
    return std::any_of(strands_.begin(), strands_.end(), [](const Strand &strand) { return strand.batch_begun(); });
}

bool Transfer::all_posted() const {
    return planned_.last && std::none_of(strands_.begin(), strands_.end(), [](const Strand &strand) {
               return strand.has_batch() || strand.ended_early();
           });
}

void Transfer::end_early() {
    for (auto &strand : strands_) {
        strand.end_early();
    }
}

bool Transfer::delivered() const {
    return std::all_of(strands_.begin(), strands_.end(),
                       [](const Strand &strand) { return strand.lane().delivered(strand); });
}

}  // namespace baton::fabric
