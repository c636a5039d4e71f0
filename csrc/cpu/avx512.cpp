// The kernels for AVX-512 (x86-64-v4).
#include "dispatch.h"
#ifdef STARS_DISPATCH
#include "headers.h"

// After the headers of the library, whose functions other files share.
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,prefer-vector-width=512")
#define STARS_ISA avx512
#include "isa.h"
#endif
