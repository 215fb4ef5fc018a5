#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <rdma/fabric.h>

#include <tuple>

#include "checksum.hpp"
#include "engine.hpp"
#include "error.hpp"
#include "spread.hpp"

namespace nb = nanobind;
using namespace baton::fabric;

namespace {

using ExtentTuple = std::tuple<uint64_t, uint64_t, uint64_t>;
// endpoint, key, base
using AccessTuple = std::tuple<uint32_t, uint64_t, uint64_t>;
using PlainStream = std::tuple<uint64_t, uint64_t, uint64_t, std::vector<AccessTuple>, uint64_t, uint64_t, uint64_t,
                               std::vector<ExtentTuple>>;
// first_layer, layers, source_parts, source_part_stride, remote_parts, remote_part_stride
using PlacementTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;
using PlacedStream = std::tuple<uint64_t, uint64_t, uint64_t, std::vector<AccessTuple>, uint64_t, uint64_t, uint64_t,
                                std::vector<ExtentTuple>, std::optional<PlacementTuple>>;
using StreamTuple = std::variant<PlainStream, PlacedStream>;
using ChunkTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, bool>;
// at, action, peer, transfer, domain, nth, times, probability, amount
using FaultTuple = std::tuple<int, int, uint64_t, uint64_t, int64_t, uint64_t, uint64_t, double, uint64_t>;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

// Without a placement: all layers, and pages of one size.
Engine::StreamRequest to_stream(const PlainStream &tuple, const std::optional<PlacementTuple> &placement,
                                uint64_t all_layers) {
    const auto &[region, source_layer, source_page, remotes, length, remote_layer, remote_page, extents] = tuple;
    const auto [first_layer, layers, source_parts, source_part, remote_parts, remote_part] =
        placement.value_or(PlacementTuple{0, all_layers, 1, 0, 1, 0});
    Engine::StreamRequest request{region,
                                  {nullptr,
                                   {source_layer, source_page, source_parts, source_part},
                                   {},
                                   length,
                                   {remote_layer, remote_page, remote_parts, remote_part},
                                   first_layer,
                                   layers,
                                   {}}};
    for (const auto &[endpoint, key, base] : remotes) {
        request.stream.remotes.push_back({endpoint, key, base});
    }
    request.stream.extents.reserve(extents.size());
    for (const auto &[source, destination, size] : extents) {
        request.stream.extents.push_back({source, destination, size});
    }
    return request;
}

Engine::StreamRequest to_stream(const StreamTuple &tuple, uint64_t layers) {
    if (const auto *plain = std::get_if<PlainStream>(&tuple)) {
        return to_stream(*plain, std::nullopt, layers);
    }
    const auto &[region, source_layer, source_page, remotes, length, remote_layer, remote_page, extents, placement] =
        std::get<PlacedStream>(tuple);
    return to_stream({region, source_layer, source_page, remotes, length, remote_layer, remote_page, extents},
                     placement, layers);
}

void open_transfer(Engine &engine, uint64_t transfer, uint64_t peer, uint32_t slot, uint32_t generation,
                   uint64_t counter, uint64_t layers, const std::vector<StreamTuple> &streams,
                   std::vector<uint32_t> source_pages, std::vector<uint32_t> destination_pages) {
    if (slot >= Immediate::kSlots) {
        throw invalid("BAD_ARGUMENT",
                      "slot " + std::to_string(slot) + " is not below " + std::to_string(Immediate::kSlots));
    }
    TransferPlan plan{transfer, slot, generation, layers, {}, std::move(source_pages), std::move(destination_pages)};
    std::vector<Engine::StreamRequest> requests;
    requests.reserve(streams.size());
    for (const auto &stream : streams) {
        requests.push_back(to_stream(stream, layers));
    }
    engine.open_transfer(peer, counter, std::move(plan), std::move(requests));
}

void submit_chunks(Engine &engine, const std::vector<ChunkTuple> &tuples) {
    Engine::Chunks chunks;
    chunks.reserve(tuples.size());
    for (const auto &[transfer, base, first, pages, last] : tuples) {
        chunks.push_back({transfer, Chunk{base, first, pages, last}});
    }
    engine.submit_chunks(std::move(chunks));
}

void set_faults(Engine &engine, const std::vector<FaultTuple> &tuples, uint64_t seed) {
    std::vector<FaultRule> rules;
    rules.reserve(tuples.size());
    for (const auto &[at, action, peer, transfer, domain, nth, times, probability, amount] : tuples) {
        rules.push_back({static_cast<FaultRule::At>(at), static_cast<FaultRule::Action>(action), peer, transfer, domain,
                         nth, times, probability, amount});
    }
    engine.set_faults(std::move(rules), seed);
}

// (offset, place, length) in each row
using Runs = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

uint64_t checksum(Engine &engine, uint64_t region, const Runs &runs, uint64_t unit, uint64_t salt) {
    const uint64_t *rows = runs.data();
    const size_t count = runs.shape(0);
    const nb::gil_scoped_release release;
    return engine.checksum(region, rows, count, unit, salt);
}

nb::dict capabilities(const Engine &engine, const Capabilities &caps) {
    nb::dict result;
    result["provider"] = caps.provider;
    result["fabric"] = caps.fabric;
    result["domain"] = caps.domain;
    result["address"] = caps.address;
    result["cq_data_size"] = caps.cq_data_size;
    result["mr_mode"] = caps.mr_mode;
    result["mr_key_size"] = caps.mr_key_size;
    result["mr_local"] = caps.mr_local();
    result["mr_virt_addr"] = caps.mr_virt_addr();
    result["mr_prov_key"] = caps.mr_prov_key();
    result["mr_allocated"] = caps.mr_allocated();
    result["max_msg_size"] = caps.max_msg_size;
    result["inject_size"] = caps.inject_size;
    result["tx_size"] = caps.tx_size;
    result["window"] = engine.window();
    result["wait_fd"] = engine.has_wait_fd();
    result["ordered"] = caps.ordered;
    result["device_memory"] = caps.device_memory;
#ifdef FI_MR_DMABUF
    result["dmabuf"] = caps.device_memory && caps.mr_virt_addr();
#else
    result["dmabuf"] = false;
#endif
    return result;
}

nb::list all_capabilities(const Engine &engine) {
    nb::list result;
    for (const auto &caps : engine.capabilities()) {
        result.append(capabilities(engine, caps));
    }
    return result;
}

nb::list domain_metrics(const Engine &engine) {
    nb::list result;
    for (const auto &domain : engine.metrics().domains) {
        nb::dict values;
        values["bytes"] = domain.bytes.get();
        values["writes"] = domain.writes.get();
        values["immediates"] = domain.immediates.get();
        result.append(values);
    }
    return result;
}

nb::tuple registered(const Engine::RegisteredRegion &region) {
    nb::list accesses;
    for (const auto &[domain, key, base] : region.accesses) {
        accesses.append(nb::make_tuple(domain, key, base));
    }
    return nb::make_tuple(region.region, accesses);
}

// Which meetings of two groups of domains have which extents of a batch: (source, destination, first, end).
std::vector<std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>> spread(uint32_t sources, uint32_t destinations,
                                                                       uint64_t extents, uint64_t quantum,
                                                                       uint64_t batch, uint64_t salt) {
    std::vector<std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>> result;
    const Phase phase = phase_of(batch, salt);
    for (const auto &meeting : meet(sources, destinations)) {
        result.emplace_back(meeting.source, meeting.destination,
                            cut(extents, quantum, meeting.from, meeting.whole, phase),
                            cut(extents, quantum, meeting.to, meeting.whole, phase));
    }
    return result;
}

nb::dict metrics(const Engine &engine) {
    nb::dict result;
    engine.metrics().each([&result](const char *name, uint64_t value) { result[name] = value; });
    const uint64_t busy = engine.metrics().busy_since_ns.load(std::memory_order_relaxed);
    const uint64_t now = now_ns();
    result["busy_us"] = busy != 0 && now > busy ? (now - busy) / 1000 : 0;
    return result;
}

void raise_in_python(const std::exception_ptr &pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const Error &error) {
        nb::dict fields;
        for (const auto &[name, value] : error.fields()) {
            fields[name.c_str()] = value;
        }
        const nb::object type = nb::module_::import_("baton_fabric.errors").attr("FabricError");
        const nb::object instance = type(error.what(), error.status(), error.reason(), fields);
        PyErr_SetObject(type.ptr(), instance.ptr());
    }
}

void bind_events(nb::module_ &m) {
    nb::class_<TransferStats>(m, "TransferStats")
        .def_ro("bytes", &TransferStats::bytes)
        .def_ro("pages", &TransferStats::pages)
        .def_ro("extents", &TransferStats::extents)
        .def_ro("writes", &TransferStats::writes)
        .def_ro("first_post_ns", &TransferStats::first_post_ns)
        .def_ro("last_completion_ns", &TransferStats::last_completion_ns)
        .def_ro("final_layer_ns", &TransferStats::final_layer_ns)
        .def_prop_ro("duration_us", &TransferStats::duration_us)
        .def_prop_ro("overlapped_us", &TransferStats::overlapped_us)
        .def_prop_ro("exposed_us", &TransferStats::exposed_us)
        .def_prop_ro("first_post_us", &TransferStats::first_post_us);
    nb::class_<InboxFull>(m, "InboxFull")
        .def_ro("slot", &InboxFull::slot)
        .def_ro("generation", &InboxFull::generation)
        .def_ro("extents", &InboxFull::extents)
        .def_ro("first_ns", &InboxFull::first_ns)
        .def_ro("full_ns", &InboxFull::full_ns);
    nb::class_<InboxViolation>(m, "InboxViolation")
        .def_ro("slot", &InboxViolation::slot)
        .def_ro("generation", &InboxViolation::generation)
        .def_ro("expected", &InboxViolation::expected)
        .def_ro("extents", &InboxViolation::extents);
    nb::class_<TransferDone>(m, "TransferDone")
        .def_ro("transfer", &TransferDone::transfer)
        .def_ro("stats", &TransferDone::stats);
    nb::class_<TransferFailed>(m, "TransferFailed")
        .def_ro("transfer", &TransferFailed::transfer)
        .def_ro("reason", &TransferFailed::reason)
        .def_ro("quiesced", &TransferFailed::quiesced)
        .def_ro("stats", &TransferFailed::stats);
    nb::class_<TransferCancelled>(m, "TransferCancelled")
        .def_ro("transfer", &TransferCancelled::transfer)
        .def_ro("quiesced", &TransferCancelled::quiesced)
        .def_ro("stats", &TransferCancelled::stats);
    nb::class_<PeerFailed>(m, "PeerFailed")
        .def_ro("peer", &PeerFailed::peer)
        .def_ro("reason", &PeerFailed::reason)
        .def_ro("detail", &PeerFailed::detail);
    nb::class_<EngineFailed>(m, "EngineFailed").def_ro("detail", &EngineFailed::detail);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::register_exception_translator(raise_in_python);
    m.def("libfabric_version", [] { return std::make_pair(FI_MAJOR(fi_version()), FI_MINOR(fi_version())); });
    m.def(
        "crc32c",
        [](const nb::bytes &data, bool by_table) {
            return by_table ? crc32c_by_table(data.data(), data.size()) : crc32c(data.data(), data.size());
        },
        nb::arg("data"), nb::arg("by_table") = false);
    m.def("spread", &spread, nb::arg("sources"), nb::arg("destinations"), nb::arg("extents"), nb::arg("quantum"),
          nb::arg("batch"), nb::arg("salt"));
    bind_events(m);

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine *self, std::string provider, std::vector<std::string> names, bool spin, uint64_t post_timeout_ms,
               bool device_memory) {
                const nb::gil_scoped_release release;
                new (self)
                    Engine({std::move(provider), std::move(names), spin, post_timeout_ms * 1'000'000, device_memory});
            },
            nb::arg("provider") = "auto", nb::arg("domains") = std::vector<std::string>{"127.0.0.1"}, nb::arg("spin") = false,
            nb::arg("post_timeout_ms") = 5000, nb::arg("device_memory") = false)
        .def_prop_ro("provider", [](const Engine &engine) { return engine.capabilities().front().provider; })
        .def("capabilities", &all_capabilities)
        .def_prop_ro("event_fd", &Engine::event_fd)
        .def("events", &Engine::events)
        .def("close", &Engine::close, NoGil())
        .def("metrics", &metrics)
        .def("domain_metrics", &domain_metrics)
        .def(
            "register_region",
            [](Engine &engine, int fd, uint64_t length, Engine::Domains domains) {
                return registered([&] {
                    const nb::gil_scoped_release release;
                    return engine.register_region(fd, length, std::move(domains));
                }());
            },
            nb::arg("fd"), nb::arg("length"), nb::arg("domains") = nb::none())
        .def(
            "register_device_region",
            [](Engine &engine, uint64_t address, uint64_t length, int device, int dmabuf_fd, Engine::Domains domains) {
                return registered([&] {
                    const nb::gil_scoped_release release;
                    return engine.register_device_region({address, length, device, dmabuf_fd}, std::move(domains));
                }());
            },
            nb::arg("address"), nb::arg("length"), nb::arg("device"), nb::arg("dmabuf_fd") = -1,
            nb::arg("domains") = nb::none())
        .def("deregister_region", &Engine::deregister_region, nb::arg("region"), NoGil())
        .def("region_retired", &Engine::region_retired, nb::arg("region"), NoGil())
        .def("attach_counter", &Engine::attach_counter, nb::arg("memory_fd"), nb::arg("doorbell_fd"),
             nb::arg("rung") = true, NoGil())
        .def("detach_counter", &Engine::detach_counter, nb::arg("counter"), NoGil())
        .def(
            "open_endpoint",
            [](Engine &engine, Engine::Domains domains) {
                const auto [endpoint, addresses] = [&] {
                    const nb::gil_scoped_release release;
                    return engine.open_endpoint(std::move(domains));
                }();
                nb::list list;
                for (const auto &address : addresses) {
                    list.append(nb::bytes(address.data(), address.size()));
                }
                return nb::make_tuple(endpoint, list);
            },
            nb::arg("domains") = nb::none())
        .def("close_endpoint", &Engine::close_endpoint, nb::arg("endpoint"), NoGil())
        .def("open_inbox", &Engine::open_inbox, nb::arg("endpoint"), nb::arg("slot"), nb::arg("generation"),
             nb::arg("expected"), nb::arg("regions") = nb::none(), NoGil())
        .def("close_inbox", &Engine::close_inbox, nb::arg("slot"), nb::arg("generation"), NoGil())
        .def(
            "connect",
            [](Engine &engine, const std::vector<nb::bytes> &addresses, Engine::Domains domains) {
                std::vector<std::string> copies;
                for (const auto &address : addresses) {
                    copies.emplace_back(static_cast<const char *>(address.data()), address.size());
                }
                const nb::gil_scoped_release release;
                return engine.connect(std::move(copies), std::move(domains));
            },
            nb::arg("addresses"), nb::arg("domains") = nb::none())
        .def("disconnect", &Engine::disconnect, nb::arg("peer"), NoGil())
        .def("open_transfer", &open_transfer, nb::arg("transfer"), nb::arg("peer"), nb::arg("slot"),
             nb::arg("generation"), nb::arg("counter"), nb::arg("layers"), nb::arg("streams"), nb::arg("source_pages"),
             nb::arg("destination_pages"), NoGil())
        .def("submit_chunks", &submit_chunks, nb::arg("chunks"), NoGil())
        .def("cancel_transfer", &Engine::cancel_transfer, nb::arg("transfer"), NoGil())
        .def("checksum", &checksum, nb::arg("region"), nb::arg("runs"), nb::arg("unit"), nb::arg("salt"))
        .def("set_faults", &set_faults, nb::arg("rules"), nb::arg("seed") = 0, NoGil())
        .def("release_faults", &Engine::release_faults, NoGil());
}
