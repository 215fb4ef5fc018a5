#define BATON_ISA avx512vnni
#include "isa.hpp"
