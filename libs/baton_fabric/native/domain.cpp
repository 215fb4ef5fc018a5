#include "domain.hpp"

#include "fabric_domain.hpp"
#include "local_domain.hpp"

namespace baton::fabric {

std::unique_ptr<Domain> open_domain(const std::string &provider, const std::string &node, bool device_memory) {
    if (provider == LocalDomain::kName) {
        return std::make_unique<LocalDomain>();
    }
    return std::make_unique<FabricDomain>(provider, node, device_memory);
}

}  // namespace baton::fabric
