// As trial.cpp: the headers of csrc/cuda/ops.cpp.
#include <torch/csrc/stable/accelerator.h>

#include "../../cuda/launch.h"
