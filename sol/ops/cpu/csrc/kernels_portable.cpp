#define SOL_NS portable
#include "kernel_table.h"

const sol::Kernels sol::KERNELS_PORTABLE = sol::portable::table(SOL_ISA_PORTABLE);
