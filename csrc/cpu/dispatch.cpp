// Which compiled kernels this machine can run.
#include "dispatch.h"

#include "kernels.h"

namespace stars::cpu {

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

InstructionSets instruction_sets() {
  InstructionSets sets = {{&baseline::kernels}, 1};
#ifdef STARS_DISPATCH
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
    sets.kernels[sets.count++] = &avx2::kernels;
  if (sets.count == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    sets.kernels[sets.count++] = &avx512::kernels;
#endif
  return sets;
}

}  // namespace stars::cpu
