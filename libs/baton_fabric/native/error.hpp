#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace baton::fabric {

// Becomes baton_fabric.errors.FabricError in Python, whose docstring lists the reasons.
class Error : public std::exception {
  public:
    using Fields = std::vector<std::pair<std::string, std::string>>;

    Error(std::string message, const char *status, const char *reason, Fields fields = {})
        : message_(std::move(message)), status_(status), reason_(reason), fields_(std::move(fields)) {}

    const char *what() const noexcept override { return message_.c_str(); }
    const std::string &status() const { return status_; }
    const std::string &reason() const { return reason_; }
    const Fields &fields() const { return fields_; }

  private:
    std::string message_;
    std::string status_;
    std::string reason_;
    Fields fields_;
};

Error invalid(const char *reason, std::string message, Error::Fields fields = {});
Error unknown(const char *kind, const char *reason, uint64_t id);
Error in_use(const char *reason, std::string message, Error::Fields fields = {});

// `result` is what the libfabric call returned: a negative error number.
Error fabric_call_failed(const char *call, long result);
// Takes errno.
Error system_call_failed(const char *call);

// Throws fabric_call_failed unless `result` is 0.
inline void check(const char *call, long result) {
    if (result != 0) [[unlikely]] {
        throw fabric_call_failed(call, result);
    }
}

}  // namespace baton::fabric
