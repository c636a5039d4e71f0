// The kernels for what every machine of the architecture has.
#include "headers.h"

#define STARS_ISA baseline
#include "isa.h"
