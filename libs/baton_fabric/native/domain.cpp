#include "domain.hpp"

#include "auto_domain.hpp"

namespace baton::fabric {

std::unique_ptr<Domain> open_domain(const std::string &provider, const std::string &node, bool device_memory) {
    if (provider == LocalDomain::kName) {
        return std::make_unique<LocalDomain>();
    }
    auto fabric = std::make_unique<FabricDomain>(provider, node, device_memory);
    // The local transport can't copy from or to a GPU's memory.
    if (provider == "auto" && !device_memory) {
        return AutoDomain::over(std::move(fabric));
    }
    return fabric;
}

}  // namespace baton::fabric
