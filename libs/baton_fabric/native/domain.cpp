#include "domain.hpp"

#include "auto_domain.hpp"
#include "error.hpp"

#include <algorithm>

namespace baton::fabric {

std::unique_ptr<Domain> open_domain(const std::string &provider, const std::string &name, bool device_memory) {
    if (provider == LocalDomain::kName) {
        return std::make_unique<LocalDomain>();
    }
    auto fabric = std::make_unique<FabricDomain>(provider, name, device_memory);
    // The local transport can't copy from or to a GPU's memory.
    if (provider == "auto" && !device_memory) {
        return AutoDomain::over(std::move(fabric));
    }
    return fabric;
}

DomainList open_domains(const std::string &provider, const std::vector<std::string> &names, bool device_memory) {
    if (names.empty()) {
        throw invalid("BAD_DOMAINS", "an engine needs at least one domain");
    }
    DomainList domains;
    for (auto name = names.begin(); name != names.end(); ++name) {
        if (std::find(names.begin(), name, *name) != name) {
            throw invalid("BAD_DOMAINS", "domain \"" + *name + "\" is there twice", {{"domain", *name}});
        }
        domains.push_back(open_domain(provider, *name, device_memory));
        const auto &first = domains.front()->capabilities();
        const auto &other = domains.back()->capabilities();
        // What a peer is told of one must hold for all.
        if (other.provider != first.provider || other.ordered != first.ordered ||
            other.mr_virt_addr() != first.mr_virt_addr()) {
            throw invalid("BAD_DOMAINS",
                          "domain \"" + *name + "\" has the provider " + other.provider + ", domain \"" +
                              names.front() + "\" " + first.provider + ": they must be alike",
                          {{"domain", *name}, {"provider", other.provider}});
        }
    }
    return domains;
}

}  // namespace baton::fabric
