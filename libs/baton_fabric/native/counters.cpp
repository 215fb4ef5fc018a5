#include "counters.hpp"

#include "error.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <string>

namespace baton::fabric {
namespace {

Mapping map_cell(int memory_fd) {
    struct stat status{};
    if (fstat(memory_fd, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(uint64_t))) {
        throw invalid("BAD_COUNTER", "descriptor " + std::to_string(memory_fd) +
                                         " holds no layer counter: it must be memory of at least 8 bytes");
    }
    return Mapping(memory_fd, sizeof(uint64_t));
}

UniqueFd duplicate_doorbell(int fd) {
    char target[PATH_MAX] = "";
    const auto path = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = readlink(path.c_str(), target, sizeof target - 1);
    const std::string kind(target, length > 0 ? static_cast<size_t>(length) : 0);
    if (kind != "anon_inode:[eventfd]") {
        throw invalid("BAD_COUNTER", "descriptor " + std::to_string(fd) + " is no eventfd but \"" + kind + "\"");
    }
    return UniqueFd::duplicate(fd);
}

}  // namespace

LayerCounter::LayerCounter(uint64_t id, int memory_fd, int doorbell_fd, bool rung)
    : id_(id), memory_(map_cell(memory_fd)), doorbell_(duplicate_doorbell(doorbell_fd)), rung_(rung) {
    refresh();
}

bool LayerCounter::refresh() {
    auto &cell = *static_cast<uint64_t *>(memory_.address());
    const uint64_t value = std::atomic_ref<uint64_t>(cell).load(std::memory_order_acquire);
    // A counter only grows; one that went back would send pages that are being written.
    if (value <= value_) {
        return false;
    }
    value_ = value;
    return true;
}

LayerCounter &CounterTable::add(int memory_fd, int doorbell_fd, bool rung) {
    counters_.push_back(std::make_unique<LayerCounter>(next_, memory_fd, doorbell_fd, rung));
    ++next_;
    metrics_.counters.add();
    return *counters_.back();
}

LayerCounter &CounterTable::at(uint64_t id) {
    for (auto &counter : counters_) {
        if (counter->id() == id) {
            return *counter;
        }
    }
    throw unknown("counter", "UNKNOWN_COUNTER", id);
}

void CounterTable::check_unused(uint64_t id) {
    const LayerCounter &counter = at(id);
    if (counter.transfers != 0) {
        throw in_use(
            "COUNTER_IN_USE",
            "counter " + std::to_string(id) + " is used by " + std::to_string(counter.transfers) + " transfers",
            {{"counter", std::to_string(id)}, {"transfers", std::to_string(counter.transfers)}});
    }
}

bool CounterTable::must_be_polled() const {
    return std::any_of(counters_.begin(), counters_.end(), [](const auto &each) { return each->must_be_polled(); });
}

void CounterTable::remove(uint64_t id) {
    metrics_.counters.subtract(std::erase_if(counters_, [id](const auto &each) { return each->id() == id; }));
}

}  // namespace baton::fabric
