// The sum of the pieces of several ranks, in order of rank: the same bits wherever it is computed.
#pragma once

#include <cstddef>
#include <vector>

namespace baton {

enum class Element { float32, bfloat16 };

std::size_t element_bytes(Element element);

// out[i] = pieces[0][i] + pieces[1][i] + ...; bfloat16 is added up in float32 and rounded once, to nearest even.
void add_up(Element element, const std::vector<const std::byte*>& pieces, std::byte* out, std::size_t count);

}  // namespace baton
