#include "faults.hpp"

#include "peer.hpp"
#include "transfer.hpp"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace baton::fabric {
namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

}  // namespace

Faults::Faults(std::vector<FaultRule> rules, uint64_t seed, Metrics &metrics) : random_(seed), metrics_(metrics) {
    for (const auto &rule : rules) {
        rules_.push_back({rule});
    }
}

const FaultRule *Faults::choose(FaultRule::At at, uint64_t peer, uint64_t transfer, uint32_t domain) {
    for (auto &rule : rules_) {
        const FaultRule &what = rule.what;
        if (what.at != at || (what.peer != 0 && what.peer != peer) ||
            (what.transfer != 0 && what.transfer != transfer) || (what.domain >= 0 && what.domain != domain)) {
            continue;
        }
        if (++rule.seen < what.nth || (what.times != 0 && rule.applied >= what.times)) {
            continue;
        }
        if (what.probability < 1.0 && std::uniform_real_distribution<double>()(random_) >= what.probability) {
            continue;
        }
        ++rule.applied;
        metrics_.faults.add();
        return &what;
    }
    return nullptr;
}

void Faults::put_off(uint64_t due_ns, WriteContext *context, uint32_t immediate, bool failed) {
    waiting_.push_back({due_ns, context, immediate, failed});
}

ssize_t Faults::post(WriteContext &context, const Lane &lane, uint64_t transfer, uint64_t now,
                     const std::function<ssize_t()> &provider) {
    if (const auto delayed = delayed_.find(&lane); delayed != delayed_.end()) {
        if (now < delayed->second) {
            return -FI_EAGAIN;
        }
        const ssize_t result = provider();
        if (result == 0) {
            delayed_.erase(delayed);
        }
        return result;
    }
    const FaultRule *rule = choose(FaultRule::At::kPost, lane.peer().id(), transfer, lane.domain());
    if (rule == nullptr) {
        return provider();
    }
    switch (rule->action) {
        case FaultRule::Action::kRefuse:
            return -FI_EAGAIN;
        case FaultRule::Action::kFail:
            return -static_cast<ssize_t>(rule->amount);
        case FaultRule::Action::kError:
            put_off(now, &context, 0, true);
            return 0;
        case FaultRule::Action::kDelay:
            delayed_[&lane] = now + rule->amount;
            return -FI_EAGAIN;
        case FaultRule::Action::kHold:
            delayed_[&lane] = kNever;
            return -FI_EAGAIN;
        case FaultRule::Action::kDrop:
            break;
    }
    return 0;
}

bool Faults::completed(WriteContext &context, uint64_t now) {
    const Lane &lane = *context.lane;
    const FaultRule *rule =
        choose(FaultRule::At::kCompletion, lane.peer().id(), context.strand->transfer().id(), lane.domain());
    if (rule == nullptr) {
        return false;
    }
    if (rule->action != FaultRule::Action::kDrop) {
        const bool failed = rule->action == FaultRule::Action::kError;
        const uint64_t wait = rule->action == FaultRule::Action::kDelay ? rule->amount : 0;
        put_off(rule->action == FaultRule::Action::kHold ? kNever : now + wait, &context, 0, failed);
    }
    return true;
}

bool Faults::arrived(uint32_t domain, uint32_t immediate, uint64_t now) {
    const FaultRule *rule = choose(FaultRule::At::kArrival, 0, 0, domain);
    if (rule == nullptr) {
        return false;
    }
    if (rule->action != FaultRule::Action::kDrop) {
        put_off(rule->action == FaultRule::Action::kHold ? kNever : now + rule->amount, nullptr, immediate, false);
    }
    return true;
}

void Faults::due(uint64_t now, const std::function<void(WriteContext &)> &written,
                 const std::function<void(WriteContext &)> &failed, const std::function<void(uint32_t)> &arrived) {
    // One at a time: a write that fails takes others of its peer with it (forget).
    for (;;) {
        const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                        [now](const Waiting &each) { return each.due_ns <= now; });
        if (found == waiting_.end()) {
            return;
        }
        const Waiting each = *found;
        waiting_.erase(found);
        if (each.context == nullptr) {
            arrived(each.immediate);
        } else {
            (each.failed ? failed : written)(*each.context);
        }
    }
}

uint64_t Faults::next_ns() const {
    uint64_t next = kNever;
    for (const auto &each : waiting_) {
        next = std::min(next, each.due_ns);
    }
    return next;
}

void Faults::release() {
    for (auto &each : waiting_) {
        each.due_ns = 0;
    }
    for (auto &[lane, until] : delayed_) {
        until = 0;
    }
}

void Faults::forget(const Lane &lane) {
    std::erase_if(waiting_, [&lane](const Waiting &each) {
        return each.context != nullptr && each.context->lane == &lane;
    });
    delayed_.erase(&lane);
}

}  // namespace baton::fabric
