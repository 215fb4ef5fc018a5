#define BATON_ISA avx512
#include "isa.hpp"
