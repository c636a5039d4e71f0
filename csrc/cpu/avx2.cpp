// The kernels for AVX2 and FMA (x86-64-v3).
#include "dispatch.h"
#ifdef STARS_DISPATCH
#include "headers.h"

// After the headers of the library, whose functions other files share.
#pragma GCC target("avx2,fma,bmi,bmi2")
#define STARS_ISA avx2
#include "isa.h"
#endif
