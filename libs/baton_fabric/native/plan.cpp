#include "plan.hpp"

#include "error.hpp"

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

void TransferPlan::check(const WriteLimits &limits, size_t endpoints) {
    if (layers == 0 || source_pages.size() != destination_pages.size()) {
        throw invalid("BAD_ARGUMENT",
                      "transfer " + std::to_string(id) + " has " + std::to_string(layers) + " layers, " +
                          std::to_string(source_pages.size()) + " source and " +
                          std::to_string(destination_pages.size()) +
                          " destination pages; there must be a layer and as many of the one as of the other",
                      {{"transfer", std::to_string(id)}, {"layers", std::to_string(layers)}});
    }
    std::erase_if(streams, [](const Stream &stream) { return stream.extents.empty(); });
    check_layers();
    check_endpoints(endpoints);
    check_bounds(limits);
}

// Every layer needs a stream: the last write of each layer is the one that proves delivery.
void TransferPlan::check_layers() const {
    std::vector<std::pair<uint64_t, uint64_t>> spans;
    for (const auto &stream : streams) {
        if (stream.source.parts == 0 || stream.remote.parts == 0 || stream.layers == 0 ||
            stream.first_layer >= layers || stream.layers > layers - stream.first_layer) {
            throw invalid("BAD_ARGUMENT",
                          "transfer " + std::to_string(id) + " has a stream of layers " +
                              std::to_string(stream.first_layer) + " + " + std::to_string(stream.layers) + " with " +
                              std::to_string(stream.source.parts) + " and " + std::to_string(stream.remote.parts) +
                              " parts of a page; there are " + std::to_string(layers) +
                              " layers, and at least 1 part",
                          {{"transfer", std::to_string(id)}});
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
    if (!spans.empty() && covered < layers) {
        const auto layer = std::to_string(covered);
        throw invalid("BAD_ARGUMENT", "no stream of transfer " + std::to_string(id) + " has layer " + layer,
                      {{"transfer", std::to_string(id)}, {"layer", layer}});
    }
}

void TransferPlan::check_endpoints(size_t endpoints) const {
    for (const auto &stream : streams) {
        const bool known = std::all_of(stream.remotes.begin(), stream.remotes.end(),
                                       [=](const RemoteAccess &access) { return access.endpoint < endpoints; });
        if (stream.remotes.empty() || !known) {
            throw invalid("BAD_ARGUMENT",
                          "a stream of transfer " + std::to_string(id) + " goes to " +
                              std::to_string(stream.remotes.size()) + " endpoints; it needs at least one, and its peer has " +
                              std::to_string(endpoints),
                          {{"transfer", std::to_string(id)}, {"endpoints", std::to_string(endpoints)}});
        }
    }
}

void TransferPlan::check_bounds(const WriteLimits &limits) const {
    const Wide last_source = largest(source_pages);
    const Wide last_destination = largest(destination_pages);
    for (const auto &stream : streams) {
        const Wide last_layer = stream.layers - 1;
        Wide source_end = 0;
        Wide destination_end = 0;
        for (const auto &extent : stream.extents) {
            if (extent.length == 0) {
                throw invalid("BAD_ARGUMENT", "transfer " + std::to_string(id) + " has an extent of 0 bytes");
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
        if (source_pages.empty()) {
            continue;
        }
        check_side(id, "source", page_start(stream.source, last_layer, last_source) + source_end,
                   stream.region->length());
        check_side(id, "destination", page_start(stream.remote, last_layer, last_destination) + destination_end,
                   stream.remote_length);
        for (const auto &access : stream.remotes) {
            if (access.base > std::numeric_limits<uint64_t>::max() - stream.remote_length) {
                throw invalid("OUT_OF_BOUNDS", "a destination region reaches beyond address 2^64");
            }
        }
    }
}

}  // namespace baton::fabric
