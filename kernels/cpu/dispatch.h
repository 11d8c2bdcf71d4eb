// Which table of kernels serves this machine.
#pragma once
#include "kernels.h"

namespace llmr {

// The table of an instruction set by name, or the best usable one for a null or empty name.
// nullptr if the name is unknown or this machine cannot run it.
const Kernels *find_kernels(const char *name);

}  // namespace llmr
