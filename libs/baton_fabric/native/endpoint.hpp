#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <sys/types.h>

namespace baton::fabric {

// One write, ready to post.
struct Write {
    const void *source = nullptr;
    void *descriptor = nullptr;  // of the source's Registration
    uint64_t remote_address = 0;
    uint64_t remote_key = 0;
    size_t length = 0;
    uint32_t extents = 0;
    bool last_of_batch = false;
};

// Where the writes of one peer arrive.
class ReceivingEndpoint {
  public:
    virtual ~ReceivingEndpoint() = default;

    // For the peer's Domain::connect.
    virtual const std::string &address() const = 0;

    // To be called before close(), and again after its Domain was polled, until it is false.
    virtual bool refuse() { return false; }

    // The fence: afterwards no byte that was sent to it can land. Throws Error if the provider refuses: then nothing is
    // fenced.
    virtual void close() = 0;
};

// Over which we write to one peer. Once it is destroyed, it reads no local memory any more.
class SendingEndpoint {
  public:
    virtual ~SendingEndpoint() = default;

    // 0, -FI_EAGAIN, or another negative error number. `context` must hold an fi_context2 at its beginning and stay
    // until the completion.
    virtual ssize_t post(const Write &write, uint32_t immediate, bool delivery_complete, void *context) = 0;

    // Writes in flight beyond which throughput does not grow.
    virtual uint64_t window() const = 0;

    // Readable once the process behind the address has ended; -1 where that is not known, or Completions::lost tells.
    virtual int process_fd() const { return -1; }
};

}  // namespace baton::fabric
