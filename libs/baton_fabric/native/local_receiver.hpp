#pragma once

#include <memory>
#include <string>
#include <vector>

#include "local_connection.hpp"
#include "local_domain.hpp"

namespace baton::fabric {

// Where one peer's connections arrive: normally one, and a new one before the end of an old one was noticed.
class LocalReceivingEndpoint : public ReceivingEndpoint, private LocalSocket {
  public:
    explicit LocalReceivingEndpoint(LocalDomain &domain);
    ~LocalReceivingEndpoint() override;

    const std::string &address() const override { return address_; }
    void close() override;

    // Copies what senders ask for and reports what arrived; how much there was to do. `bytes`: what it may copy, and
    // afterwards what is left of that.
    size_t serve(Completions &completions, uint64_t &bytes);
    // From now on senders wake us; false if serve() has something to do already.
    bool prepare_to_sleep();
    void drop_ended();
    // Takes those who have asked to connect since the last time.
    void accept_waiting();

  private:
    void readable() override;
    void connect(UniqueFd socket);

    LocalDomain &domain_;
    std::string address_;
    UniqueFd listener_;
    std::vector<std::unique_ptr<LocalConnection>> connections_;
    size_t turn_ = 0;
    bool asked_ = false;
};

}  // namespace baton::fabric
