#define BATON_ISA avx512bf16
#include "isa.hpp"
