// All kernels for the instruction set that the including file is compiled for, in a namespace of its own. Nothing here
// may use inline functions of the standard library: the linker keeps one copy of those, perhaps the one that this
// processor does not run.
#pragma once

#include "kernels.hpp"

#define BATON_CONCATENATE_(a, b) a##b
#define BATON_CONCATENATE(a, b) BATON_CONCATENATE_(a, b)
#define BATON_STRING_(a) #a
#define BATON_STRING(a) BATON_STRING_(a)

// clang-format off
#include "vector.hpp"
#include "rows.hpp"
#include "int8.hpp"
#include "attention.hpp"
#include "decode.hpp"
#include "draw.hpp"
// clang-format on

namespace baton::kernels {

const Kernels BATON_CONCATENATE(BATON_ISA, _kernels) = {
    BATON_STRING(BATON_ISA), BATON_ISA::attend_scratch, BATON_ISA::attend,       BATON_ISA::decode_scratch,
    BATON_ISA::decode,       BATON_ISA::rms_norm,       BATON_ISA::silu_and_mul, BATON_ISA::rotate,
    BATON_ISA::quantize,     BATON_ISA::int8_panel,     BATON_ISA::draw,
};

}  // namespace baton::kernels
