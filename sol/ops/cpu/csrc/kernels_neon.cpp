#if defined(__aarch64__)
#define SOL_NS neon
#define SOL_ISA_IS_NEON 1
#include "kernel_table.h"

const sol::Kernels sol::KERNELS_NEON = sol::neon::table(SOL_ISA_NEON);
#endif
