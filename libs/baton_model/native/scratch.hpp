// Memory of the calling thread, kept from call to call: fresh memory would be faulted in page by page.
#pragma once

#include <cstdint>

namespace baton::kernels {

// `bytes` of it, aligned to 64; what an earlier call returned is gone.
void *scratch(int64_t bytes);

}  // namespace baton::kernels
