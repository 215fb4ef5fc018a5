#define BATON_ISA avx2
#include "isa.hpp"
