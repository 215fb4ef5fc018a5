#define BATON_ISA avxvnni
#include "isa.hpp"
