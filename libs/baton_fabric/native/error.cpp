#include "error.hpp"

#include <rdma/fabric.h>
#include <rdma/fi_errno.h>

#include <cerrno>
#include <cstring>

namespace baton::fabric {

Error invalid(const char *reason, std::string message, Error::Fields fields) {
    return {std::move(message), "INVALID_ARGUMENT", reason, std::move(fields)};
}

Error unknown(const char *kind, const char *reason, uint64_t id) {
    return {std::string("there is no ") + kind + " " + std::to_string(id),
            "NOT_FOUND",
            reason,
            {{kind, std::to_string(id)}}};
}

Error in_use(const char *reason, std::string message, Error::Fields fields) {
    return {std::move(message), "FAILED_PRECONDITION", reason, std::move(fields)};
}

Error fabric_call_failed(const char *call, long result) {
    const char *text = fi_strerror(static_cast<int>(-result));
    return {
        std::string(call) + " failed: " + text, "INTERNAL", "FABRIC_CALL_FAILED", {{"call", call}, {"error", text}}};
}

Error system_call_failed(const char *call) {
    const char *text = std::strerror(errno);
    return {
        std::string(call) + " failed: " + text, "INTERNAL", "SYSTEM_CALL_FAILED", {{"call", call}, {"error", text}}};
}

}  // namespace baton::fabric
