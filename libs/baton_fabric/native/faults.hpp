#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <unordered_map>
#include <vector>

#include "metrics.hpp"
#include "lane.hpp"

namespace baton::fabric {

// When a rule applies, and what happens then; baton_fabric.faults tells what each means.
struct FaultRule {
    enum class At { kPost, kCompletion, kArrival };
    enum class Action { kRefuse, kFail, kDrop, kError, kDelay, kHold };

    At at = At::kPost;
    Action action = Action::kDrop;
    uint64_t peer = 0;      // 0: any
    uint64_t transfer = 0;  // 0: any
    int64_t domain = -1;    // of ours; -1: any
    uint64_t nth = 1;       // of the operations that match, the first one that it applies to
    uint64_t times = 0;     // to how many of them; 0: all
    double probability = 1.0;
    uint64_t amount = 0;  // error number, or nanoseconds
};

// For tests: makes the provider look worse than it is. Between the engine and its provider at three places: posting a
// write, taking its completion, taking an immediate. Belongs to the progress thread; absent unless rules were given.
class Faults {
  public:
    Faults(std::vector<FaultRule> rules, uint64_t seed, Metrics &metrics);

    // Instead of posting: what `provider` answers, or what the rules have it answer. Nothing was posted if that is 0 and
    // `provider` was not called: the write is one of those that never complete, or that fail.
    ssize_t post(WriteContext &context, const Lane &lane, uint64_t transfer, uint64_t now,
                 const std::function<ssize_t()> &provider);
    // True if the completion of a write is not to be seen now, or ever.
    bool completed(WriteContext &context, uint64_t now);
    // True if the immediate is not to be counted now, or ever.
    bool arrived(uint32_t domain, uint32_t immediate, uint64_t now);

    // What became due: each once.
    void due(uint64_t now, const std::function<void(WriteContext &)> &written,
             const std::function<void(WriteContext &)> &failed, const std::function<void(uint32_t)> &arrived);
    // The earliest time at which due() has something to do; the maximum if there is none.
    uint64_t next_ns() const;
    // Everything that is held becomes due now; what was dropped stays dropped.
    void release();
    // The writes of a lane that is closed are over, however they went.
    void forget(const Lane &lane);

  private:
    struct Rule {
        FaultRule what;
        uint64_t seen = 0;
        uint64_t applied = 0;
    };
    struct Waiting {
        uint64_t due_ns;
        WriteContext *context;  // null: an immediate
        uint32_t immediate;
        bool failed;
    };

    // The first rule that applies; null if none does.
    const FaultRule *choose(FaultRule::At at, uint64_t peer, uint64_t transfer, uint32_t domain);
    void put_off(uint64_t due_ns, WriteContext *context, uint32_t immediate, bool failed);

    std::vector<Rule> rules_;
    std::mt19937_64 random_;
    Metrics &metrics_;
    std::vector<Waiting> waiting_;
    // By lane, until when its next post is put off.
    std::unordered_map<const Lane *, uint64_t> delayed_;
};

}  // namespace baton::fabric
