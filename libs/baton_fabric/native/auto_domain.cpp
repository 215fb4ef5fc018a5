#include "auto_domain.hpp"

#include "error.hpp"
#include "local_sender.hpp"

#include <sys/epoll.h>

#include <algorithm>

namespace baton::fabric {
namespace {

constexpr const char *kPrefix = "auto:";
constexpr size_t kPrefixLength = 5;

// Two addresses in one: the local one, which has a fixed length, and the provider's.
std::string join(const std::string &local, const std::string &fabric) { return kPrefix + local + fabric; }

// One region in both domains, under one key.
struct AutoRegistration : Registration {
    std::unique_ptr<Registration> fabric;
    std::unique_ptr<Registration> local;
};

class AutoReceivingEndpoint : public ReceivingEndpoint {
  public:
    AutoReceivingEndpoint(std::unique_ptr<ReceivingEndpoint> local, std::unique_ptr<ReceivingEndpoint> fabric)
        : local_(std::move(local)), fabric_(std::move(fabric)), address_(join(local_->address(), fabric_->address())) {}

    const std::string &address() const override { return address_; }
    bool refuse() override {
        local_->close();
        return fabric_->refuse();
    }
    void close() override {
        local_->close();
        fabric_->close();
    }

  private:
    std::unique_ptr<ReceivingEndpoint> local_;
    std::unique_ptr<ReceivingEndpoint> fabric_;
    std::string address_;
};

class AutoSendingEndpoint : public SendingEndpoint {
  public:
    AutoSendingEndpoint(std::unique_ptr<SendingEndpoint> endpoint, bool local)
        : endpoint_(std::move(endpoint)), local_(local) {}

    ssize_t post(const Write &write, uint32_t immediate, bool delivery_complete, void *context) override {
        const auto &both = *static_cast<const AutoRegistration *>(write.descriptor);
        Write own = write;
        own.descriptor = (local_ ? both.local : both.fabric)->descriptor;
        return endpoint_->post(own, immediate, delivery_complete, context);
    }
    int process_fd() const override { return endpoint_->process_fd(); }
    uint64_t window() const override { return endpoint_->window(); }

  private:
    std::unique_ptr<SendingEndpoint> endpoint_;
    bool local_;
};

}  // namespace

std::unique_ptr<Domain> AutoDomain::over(std::unique_ptr<FabricDomain> fabric) {
    const auto &capabilities = fabric->capabilities();
    const bool alike = !capabilities.mr_virt_addr() && !capabilities.mr_prov_key() && capabilities.mr_key_size >= 8 &&
                       capabilities.ordered && fabric->wait_fd() >= 0;
    if (!alike) {
        return fabric;
    }
    return std::unique_ptr<Domain>(new AutoDomain(std::move(fabric)));
}

AutoDomain::AutoDomain(std::unique_ptr<FabricDomain> fabric)
    : fabric_(std::move(fabric)), wait_set_(epoll_create1(EPOLL_CLOEXEC)), capabilities_(fabric_->capabilities()) {
    if (!wait_set_) {
        throw system_call_failed("epoll_create1");
    }
    const auto &local = local_.capabilities();
    capabilities_.provider += std::string("+") + local.provider;
    capabilities_.max_msg_size = std::min(capabilities_.max_msg_size, local.max_msg_size);
    capabilities_.tx_size = std::max(capabilities_.tx_size, local.tx_size);
    capabilities_.useful_window = std::max(capabilities_.useful_window, local.useful_window);
    for (const int fd : {fabric_->wait_fd(), local_.wait_fd()}) {
        epoll_event event{};
        event.events = EPOLLIN;
        if (epoll_ctl(wait_set_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
            throw system_call_failed("epoll_ctl");
        }
    }
}

std::unique_ptr<Registration> AutoDomain::register_memory(const Mapping &memory, int fd) {
    auto both = std::make_unique<AutoRegistration>();
    both->fabric = fabric_->register_memory(memory, fd);
    both->key = both->fabric->key;
    both->local = local_.register_as(both->key, memory, fd);
    both->descriptor = both.get();
    return both;
}

std::unique_ptr<Registration> AutoDomain::register_memory(const DeviceRange &range) {
    return local_.register_memory(range);  // refuses
}

std::unique_ptr<ReceivingEndpoint> AutoDomain::open_endpoint() {
    return std::make_unique<AutoReceivingEndpoint>(local_.open_endpoint(), fabric_->open_endpoint());
}

std::unique_ptr<SendingEndpoint> AutoDomain::connect(const std::string &address, uint64_t peer) {
    const size_t length = kPrefixLength + local_address_length();
    if (address.rfind(kPrefix, 0) != 0 || address.size() <= length) {
        throw invalid("BAD_ADDRESS", "an address of " + std::to_string(address.size()) +
                                         " bytes is none of an endpoint that is both local and a provider's");
    }
    auto local = local_.try_connect(address.substr(kPrefixLength, local_address_length()), peer);
    const bool here = local != nullptr;
    return std::make_unique<AutoSendingEndpoint>(
        here ? std::move(local) : fabric_->connect(address.substr(length), peer), here);
}

size_t AutoDomain::poll(Completions &completions) { return local_.poll(completions) + fabric_->poll(completions); }

bool AutoDomain::may_block() { return fabric_->may_block() && local_.may_block(); }

}  // namespace baton::fabric
