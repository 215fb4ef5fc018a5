#pragma once

#include <string>

namespace baton::fabric {

// Shuts down every TCP socket of this process that is bound to `address` (a sockaddr_in or sockaddr_in6) and was not
// shut down before, the listening one included; returns whether there was one.
bool shut_down_sockets(const std::string &address);

}  // namespace baton::fabric
