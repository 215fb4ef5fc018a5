#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "metrics.hpp"
#include "resources.hpp"

namespace baton::fabric {

class Transfer;

// One cumulative layer counter: a 64-bit cell at the beginning of shared memory that another process stores to, and
// the eventfd that it rings afterwards.
class LayerCounter {
  public:
    LayerCounter(uint64_t id, int memory_fd, int doorbell_fd, bool rung);

    uint64_t id() const { return id_; }
    int doorbell() const { return doorbell_.get(); }
    // A GPU stores, and rings nothing: then the cell is polled while somebody waits for it.
    bool must_be_polled() const { return !rung_ && !waiting.empty(); }
    uint64_t value() const { return value_; }

    // Reads the cell; whether it has moved. Whatever was written before the store is visible afterwards.
    bool refresh();

    // Open transfers, and of those the ones with a planned chunk that is not wholly sent.
    uint32_t transfers = 0;
    std::vector<Transfer *> waiting;

  private:
    uint64_t id_;
    Mapping memory_;
    UniqueFd doorbell_;
    bool rung_;
    uint64_t value_ = 0;
};

class CounterTable {
  public:
    explicit CounterTable(Metrics &metrics) : metrics_(metrics) {}

    LayerCounter &add(int memory_fd, int doorbell_fd, bool rung);
    LayerCounter &at(uint64_t id);
    // Throws Error while transfers use it.
    void check_unused(uint64_t id);
    void remove(uint64_t id);

    bool must_be_polled() const;
    const std::vector<std::unique_ptr<LayerCounter>> &all() const { return counters_; }

  private:
    Metrics &metrics_;
    uint64_t next_ = 1;
    std::vector<std::unique_ptr<LayerCounter>> counters_;  // few: one for each attached engine
};

}  // namespace baton::fabric
