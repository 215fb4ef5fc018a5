#include "transfer.hpp"

#include "error.hpp"
#include "immediate.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace baton::fabric {
namespace {

__extension__ using Wide = unsigned __int128;

// A product of two 64-bit numbers, small enough that sums of several do not wrap around 128 bits.
Wide bounded_product(Wide a, Wide b) { return std::min(a * b, Wide{1} << 100); }

// Behind the largest page of the last layer: an extent that begins here would be outside.
Wide page_start(const Grid &grid, Wide last_layer, Wide page) {
    return bounded_product(last_layer, grid.layer_stride) + bounded_product(page / grid.parts, grid.page_stride) +
           bounded_product(grid.parts - 1, grid.part_stride);
}

Wide largest(const std::vector<uint32_t> &pages) {
    return pages.empty() ? 0 : *std::max_element(pages.begin(), pages.end());
}

void check_side(uint64_t transfer, const char *side, Wide end, uint64_t length) {
    if (end > length) {
        const auto shown = end > std::numeric_limits<uint64_t>::max() ? std::string("more than 2^64")
                                                                      : std::to_string(static_cast<uint64_t>(end));
        throw invalid("OUT_OF_BOUNDS",
                      "transfer " + std::to_string(transfer) + " would reach byte " + shown + " of a " + side +
                          " region of " + std::to_string(length) + " bytes",
                      {{"side", side}, {"end", shown}, {"length", std::to_string(length)}});
    }
}

}  // namespace

Planned Planned::after(uint64_t transfer, const Chunk &chunk, uint64_t layers, uint64_t total) const {
    const Error::Fields fields = {{"transfer", std::to_string(transfer)},
                                  {"first_page", std::to_string(chunk.first_page)},
                                  {"pages", std::to_string(chunk.pages)},
                                  {"planned", std::to_string(pages)},
                                  {"total", std::to_string(total)}};
    const auto name = "a chunk of transfer " + std::to_string(transfer);
    if (last) {
        throw invalid("CHUNK_OUT_OF_ORDER", name + " follows its last chunk", fields);
    }
    if (chunk.pages != 0 && chunk.first_page != pages) {
        throw invalid("CHUNK_OUT_OF_ORDER",
                      name + " starts at page " + std::to_string(chunk.first_page) + "; the next is page " +
                          std::to_string(pages),
                      fields);
    }
    if (chunk.pages > total - pages) {
        throw invalid(
            "CHUNK_TOO_LONG",
            name + " has " + std::to_string(chunk.pages) + " pages; " + std::to_string(total - pages) + " are left",
            fields);
    }
    if (chunk.last && pages + chunk.pages != total) {
        throw invalid(
            "LAST_CHUNK_SHORT",
            name + " is the last, but leaves " + std::to_string(total - pages - chunk.pages) + " pages unplanned",
            fields);
    }
    if (chunk.counter_base > std::numeric_limits<uint64_t>::max() - layers) {
        throw invalid("BAD_ARGUMENT", name + " waits for a counter value beyond 2^64", fields);
    }
    return {pages + chunk.pages, chunk.last};
}

Transfer::Transfer(TransferPlan plan, LayerCounter &counter, Peer &peer, const WriteLimits &limits)
    : plan_(std::move(plan)), counter_(counter), peer_(peer), coalesced_(limits.coalesced) {
    if (plan_.layers == 0 || plan_.source_pages.size() != plan_.destination_pages.size()) {
        throw invalid("BAD_ARGUMENT",
                      "transfer " + std::to_string(plan_.id) + " has " + std::to_string(plan_.layers) + " layers, " +
                          std::to_string(plan_.source_pages.size()) + " source and " +
                          std::to_string(plan_.destination_pages.size()) +
                          " destination pages; there must be a layer and as many of the one as of the other",
                      {{"transfer", std::to_string(plan_.id)}, {"layers", std::to_string(plan_.layers)}});
    }
    std::erase_if(plan_.streams, [](const Stream &stream) { return stream.extents.empty(); });
    check_layers();
    check_bounds(limits);
    active_.reserve(plan_.streams.size());
    choose_streams();
    layered_ = active_.size() != plan_.streams.size();
}

// Every layer needs a stream: the last write of each layer is the one that proves delivery.
void Transfer::check_layers() const {
    std::vector<std::pair<uint64_t, uint64_t>> spans;
    for (const auto &stream : plan_.streams) {
        if (stream.source.parts == 0 || stream.remote.parts == 0 || stream.layers == 0 ||
            stream.first_layer >= plan_.layers || stream.layers > plan_.layers - stream.first_layer) {
            throw invalid("BAD_ARGUMENT",
                          "transfer " + std::to_string(plan_.id) + " has a stream of layers " +
                              std::to_string(stream.first_layer) + " + " + std::to_string(stream.layers) + " with " +
                              std::to_string(stream.source.parts) + " and " + std::to_string(stream.remote.parts) +
                              " parts of a page; there are " + std::to_string(plan_.layers) +
                              " layers, and at least 1 part",
                          {{"transfer", std::to_string(plan_.id)}});
        }
        spans.emplace_back(stream.first_layer, stream.first_layer + stream.layers);
    }
    std::sort(spans.begin(), spans.end());
    uint64_t covered = 0;
    for (const auto &[first, end] : spans) {
        if (first > covered) {
            break;
        }
        covered = std::max(covered, end);
    }
    if (!spans.empty() && covered < plan_.layers) {
        const auto layer = std::to_string(covered);
        throw invalid("BAD_ARGUMENT", "no stream of transfer " + std::to_string(plan_.id) + " has layer " + layer,
                      {{"transfer", std::to_string(plan_.id)}, {"layer", layer}});
    }
}

void Transfer::choose_streams() {
    active_.clear();
    for (const auto &stream : plan_.streams) {
        if (stream.has(layer_)) {
            active_.push_back(&stream);
        }
    }
}

void Transfer::check_bounds(const WriteLimits &limits) const {
    const Wide source_page = largest(plan_.source_pages);
    const Wide destination_page = largest(plan_.destination_pages);
    for (const auto &stream : plan_.streams) {
        const Wide last_layer = stream.layers - 1;
        Wide source_end = 0;
        Wide destination_end = 0;
        for (const auto &extent : stream.extents) {
            if (extent.length == 0) {
                throw invalid("BAD_ARGUMENT", "transfer " + std::to_string(plan_.id) + " has an extent of 0 bytes");
            }
            if (extent.length > limits.largest_message) {
                throw invalid(
                    "EXTENT_TOO_LARGE",
                    "an extent of " + std::to_string(extent.length) +
                        " bytes is larger than the provider's largest message, " +
                        std::to_string(limits.largest_message),
                    {{"length", std::to_string(extent.length)}, {"largest", std::to_string(limits.largest_message)}});
            }
            source_end = std::max(source_end, Wide{extent.source} + extent.length);
            destination_end = std::max(destination_end, Wide{extent.destination} + extent.length);
        }
        if (pages() == 0) {
            continue;
        }
        check_side(plan_.id, "source", page_start(stream.source, last_layer, source_page) + source_end,
                   stream.region->length());
        check_side(plan_.id, "destination", page_start(stream.remote, last_layer, destination_page) + destination_end,
                   stream.remote_length);
        if (stream.remote_base > std::numeric_limits<uint64_t>::max() - stream.remote_length) {
            throw invalid("OUT_OF_BOUNDS", "a destination region reaches beyond address 2^64");
        }
    }
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
    chunks_.push_back(chunk);
    if (chunks_.size() == 1) {
        layer_ = 0;
        begin_batch();
    }
}

void Transfer::observe(uint64_t now) {
    if (stats.first_ready_ns == 0 && batch_ready()) {
        stats.first_ready_ns = now;
    }
    if (stats.final_layer_ns == 0 && planned_.last && counter_.value() >= final_value_) {
        stats.final_layer_ns = now;
    }
}

bool Transfer::batch_ready() const {
    return !chunks_.empty() && counter_.value() >= chunks_.front().counter_base + layer_ + 1;
}

void Transfer::begin_batch() {
    if (layered_) {
        choose_streams();
    }
    position_ = {0, chunks_.front().first_page, 0};
    begun_ = false;
    prepared_ = false;
}

// To the next extent; false behind the last of the batch.
bool Transfer::step(Position &position, const Chunk &chunk) const {
    if (++position.extent < active_[position.stream]->extents.size()) {
        return true;
    }
    position.extent = 0;
    if (++position.page < chunk.first_page + chunk.pages) {
        return true;
    }
    position.page = chunk.first_page;
    return ++position.stream < active_.size();
}

void Transfer::write_at(const Position &position, Write &write) const {
    const auto &stream = *active_[position.stream];
    const auto &extent = stream.extents[position.extent];
    const uint64_t layer = layer_ - stream.first_layer;
    write.source = stream.region->bytes() + stream.source.at(layer, plan_.source_pages[position.page]) + extent.source;
    write.remote_address =
        stream.remote_base + stream.remote.at(layer, plan_.destination_pages[position.page]) + extent.destination;
    write.length = extent.length;
    write.descriptor = stream.region->registration->descriptor;
    write.remote_key = stream.remote_key;
}

const Write &Transfer::prepare() {
    if (prepared_) {
        return write_;
    }
    const Chunk &chunk = chunks_.front();
    after_ = position_;
    write_at(after_, write_);
    write_.extents = 1;
    bool more = step(after_, chunk);
    // Coalescing is worth two to three times on tcp: 12 KiB pages one by one against 384 KiB at once.
    while (more && after_.stream == position_.stream && write_.extents < Immediate::kMaxExtents) {
        Write next;
        write_at(after_, next);
        if (static_cast<const char *>(next.source) != static_cast<const char *>(write_.source) + write_.length ||
            next.remote_address != write_.remote_address + write_.length || write_.length + next.length > coalesced_) {
            break;
        }
        write_.length += next.length;
        ++write_.extents;
        more = step(after_, chunk);
    }
    write_.last_of_batch = !more;
    prepared_ = true;
    return write_;
}

void Transfer::posted() {
    stats.bytes += write_.length;
    stats.extents += write_.extents;
    stats.writes += 1;
    prepared_ = false;
    if (!write_.last_of_batch) {
        position_ = after_;
        begun_ = true;
        return;
    }
    if (++layer_ == plan_.layers) {
        layer_ = 0;
        chunks_.pop_front();
    }
    begun_ = false;
    if (!chunks_.empty()) {
        begin_batch();
    }
}

}  // namespace baton::fabric
