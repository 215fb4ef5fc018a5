#define BATON_ISA portable
#include "isa.hpp"
